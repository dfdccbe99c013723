"""Which kernel takes a product: measured plans per GPU and shape, and a stated rule where nothing was measured."""

import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

logger = logging.getLogger("lldecode.skinny_gemm")

MARGIN = 1.04
"""How many times faster than cuBLAS a measured kernel must be before a plan leaves cuBLAS."""
MAX_M = 32
HEURISTIC_MAX_M = 16
MEASURED_M = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""A plan holds these; any other M takes the entry of the next one."""
FUSED_A = (2112, 7168)
"""The N and K that vLLM's ``dsv3_fused_a_gemm`` is built for, in bf16 and for M <= 16."""
_WARPS = {8: 0, 4: 2, 16: 2, 6: 3, 2: 4}  # and how late each is tried
_SMEM = 227 * 1024
_HALF = 104 * 1024  # of a multiprocessor: the next kernel's first CTA fits beside it, and prefetches its weights


class Shape(NamedTuple):
    """A product of x ``[batch, M, k]`` with ``[batch, k, n]``, whose n is contiguous where `n_major`."""

    n: int
    k: int
    batch: int = 1
    n_major: bool = False

    def __str__(self) -> str:
        return f"N={self.n} K={self.k}" + (f" B={self.batch}" if self.batch > 1 else "") + (" n-major" if self.n_major else "")


class Tile(NamedTuple):
    """What of a kernel's config is tuned; see ``kernel.Config``."""

    rows: int
    cluster: int
    warps: int
    stages: int
    wide: int


class Choice(NamedTuple):
    """`provider` is ``lldecode``, with its tile, ``cublas`` or ``fused_a``."""

    provider: str
    tile: Tile | None = None


def tokens(m: int) -> int:
    """The kernel's token tile for M."""
    return 8 if m <= 8 else 16 if m <= 16 else 32


def cost(sms: int, shape: Shape, m: int, tile: Tile) -> float:
    """Bytes that the busiest multiprocessor loads, weights and activations, and a few percent for the meeting of a cluster."""
    ctas = shape.batch * -(-shape.n // tile.rows) * tile.cluster
    return -(-ctas // sms) * (tile.rows + m) * shape.k / tile.cluster * (1 + 0.02 * tile.cluster)


def candidates(sms: int, shape: Shape, m: int) -> list[Tile]:
    """Tiles worth measuring: the first choice of every (rows, cluster) by ascending :func:`cost`, then the second ones, and so on.

    Preferred are 8 warps, then a queue that leaves half of the multiprocessor to the next kernel. Where weights are large, what
    moves 1.4 times the bytes of the best is left out.
    """
    unit = 64 if shape.n_major else 8
    found: dict[tuple[int, int, int], Tile] = {}
    for cluster, per_sm, (warps, rank), wide, half in itertools.product((1, 2, 4, 8), (1, 2, 4), _WARPS.items(), (2, 1), (True, False)):
        rows = max(1, -(-shape.batch * shape.n * cluster // (sms * per_sm * unit))) * unit
        steps = -(-shape.k // (32 * wide * warps * cluster))
        sums = warps * tokens(m) * (-(-rows // 16) * 64 + 16)  # fp32 of each warp, in the place of its queue
        free = _SMEM - tokens(m) * rows * 4 - 64
        stages = min((min(_HALF, free) if half else free) // per_sm // (warps * wide * rows * 64), steps)
        idle = steps * 32 * wide * warps * cluster / shape.k > 1.25
        registers = -(-rows // 16) * tokens(m) // 2 + rows // 2  # sums and weights of a step
        if idle or steps > 32 or rows > 192 or stages < min(2, steps) or sums > free or registers > (64 if warps == 16 else 176):
            continue
        tile = Tile(rows, cluster, warps, stages, wide)
        slot = rows, cluster, rank + (not half)
        if slot not in found or found[slot].stages * found[slot].wide < stages * wide:
            found[slot] = tile
    bytes_moved = {slot: cost(sms, shape, m, tile) for slot, tile in found.items()}
    limit = 1.4 * min(bytes_moved.values(), default=0) if shape.batch * shape.n * shape.k > 1 << 22 else math.inf
    order = sorted((rank, bytes_moved[slot], slot) for slot in found if bytes_moved[slot] <= limit for rank in slot[2:])
    return list(dict.fromkeys(found[slot] for *_, slot in order))


def heuristic(sms: int, shape: Shape, m: int, fused_a: bool) -> Choice:
    """What takes a shape that was not measured: up to 16 tokens the kernel with the first of :func:`candidates`, else cuBLAS.

    DeepSeek's fused QKV keeps vLLM's own kernel where it is (`fused_a`).
    """
    if m > HEURISTIC_MAX_M or not (tiles := candidates(sms, shape, m)):
        return Choice("cublas")
    return Choice("fused_a") if fused_a else Choice("lldecode", tiles[0])


@functools.cache
def source() -> str:
    """12 hex digits of the kernel's source, which a plan was measured with."""
    return hashlib.sha256(Path(__file__).with_name("kernel.py").read_bytes()).hexdigest()[:12]


def driver() -> str:
    """Major version of the NVIDIA kernel driver, empty where there is none."""
    try:
        found = re.search(r"Kernel Module(?:.*?)\s(\d+)\.\d", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia "))


def shipped(gpu: str) -> Path:
    """The plan of this package for a GPU; may not exist."""
    return Path(__file__).with_name("plans") / f"{_slug(gpu)}.json"


def tuned(gpu: str) -> Path:
    """The plan that ``tune`` writes on this machine: in ``$LLDECODE_CACHE_DIR``, else ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("LLDECODE_CACHE_DIR")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lldecode"
    return base / f"skinny-gemm-{_slug(gpu)}.json"


def stamp(gpu: str) -> dict[str, str]:
    """What a plan must agree with to be used."""
    return {"gpu": gpu, "driver": driver(), "source": source()}


def read(path: Path, wanted: dict[str, str]) -> tuple[dict[str, Any], str | None]:
    """Shapes of a plan file (see :func:`write`), and why it cannot be used, or None. A missing file is an empty plan."""
    try:
        data = json.loads(path.read_text())
        for key, value in wanted.items():
            if data[key] != value:
                return {}, f"{path}: stale: {key}: expected {value}, got {data[key]}"
        return data["shapes"], None
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError, KeyError, TypeError) as e:
        return {}, f"{path}: {type(e).__name__}: {e}"


def write(path: Path, wanted: dict[str, str], shapes: dict[str, Any]) -> None:
    """Replace a plan file: by shape and M, ``{"choice": [provider, tile or null], "us": {provider: us}}``."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(shape)}: {json.dumps(entries)}" for shape, entries in sorted(shapes.items()))
    tmp = path.with_suffix(".tmp")
    tmp.write_text(f'{json.dumps(wanted)[:-1]}, "shapes": {{\n{lines}\n}}}}\n')
    tmp.replace(path)


def decide(us: dict[str, float], tile: Tile | None) -> Choice:
    """The fastest of what was measured (with `tile` the best own one), cuBLAS unless it is beaten by :data:`MARGIN`."""
    best = min(us, key=lambda provider: us[provider])
    return Choice("cublas") if us["cublas"] < MARGIN * us[best] else Choice(best, tile if best == "lldecode" else None)


@functools.cache
def _plans(gpu: str) -> list[dict[str, Any]]:
    wanted = stamp(gpu)
    out = []
    # No driver is asked of the shipped plan: it is better than none under the next one.
    for path, need in ((tuned(gpu), wanted), (shipped(gpu), {k: wanted[k] for k in ("gpu", "source")})):
        shapes, reason = read(path, need)
        if reason:
            logger.warning("plan ignored: %s", reason)
        out.append(shapes)
    return out


def choose(gpu: str, sms: int, shape: Shape, m: int, fused_a: bool = False) -> Choice:
    """What takes `shape` at M = m: this machine's plan, else the shipped one, else :func:`heuristic`; cuBLAS above 32 tokens.

    Args:
        gpu, sms: name and multiprocessors of the device.
        fused_a: vLLM's ``dsv3_fused_a_gemm`` takes this product.
    """
    if m > MAX_M:
        return Choice("cublas")
    measured = str(next(size for size in MEASURED_M if size >= m))
    for shapes in _plans(gpu):
        if entry := shapes.get(str(shape), {}).get(measured):
            provider, tile = entry["choice"]
            if provider == "fused_a" and not fused_a:
                break
            return Choice(provider, Tile(*tile) if tile else None)
    return heuristic(sms, shape, m, fused_a)


def device(index: int) -> tuple[str, int]:
    """Name and multiprocessors of a CUDA device."""
    found = torch.cuda.get_device_properties(index)
    return found.name, found.multi_processor_count
