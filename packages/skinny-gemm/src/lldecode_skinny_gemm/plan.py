"""Which kernel takes a product: measured plans per GPU and shape, and a stated rule where nothing was measured."""

import itertools
import math
from pathlib import Path
from typing import Any

from lldecode.plan import SIZES, Gemm, Plans

PLANS = Plans("skinny-gemm", Path(__file__).with_name("kernel.py"))

Tile = tuple[int, int, int, int, int]
"""What of a kernel's config is tuned: rows, cluster, warps, stages, wide; see ``kernel.Config``."""
FUSED_A = Gemm(2112, 7168)
"""What vLLM's ``dsv3_fused_a_gemm`` is built for, in bf16 and for M <= 16."""
_WARPS = (8, 4, 16, 6, 2)  # in the order in which they are tried
_SMEM, _HALF = 227 * 1024, 104 * 1024  # of a multiprocessor; beside half fits another CTA, the next kernel's first or one left over
# Clusters and the bytes of a multiprocessor that queues fill. No plan of an H200 had larger clusters with all of it, and with a
# multiprocessor a CTA they leave some idle of the 18 of a GPC.
_QUEUES = ((1, _HALF), (1, _SMEM), (2, _HALF), (2, _SMEM), (4, _HALF), (8, _HALF))
_WAVES = ((16, 3), (16, 4), (8, 4))  # rows of a CTA, and how many of them a multiprocessor has at a time, one after another


def tokens(m: int) -> int:
    """The kernel's token tile for M."""
    return 8 if m <= 8 else 16 if m <= 16 else 32


def cost(sms: int, shape: Gemm, m: int, rows: int, cluster: int) -> float:
    """Bytes of weights that the busiest multiprocessor loads, and a few percent for the meeting of a cluster.

    A byte of activations, which the L2 has, counts a quarter.
    """
    ctas = shape.batch * -(-shape.n // rows) * cluster
    return -(-ctas // sms) * (rows + m / 4) * shape.k / cluster * (1 + 0.04 * cluster)


def candidates(sms: int, shape: Gemm, m: int) -> list[Tile]:
    """Tiles worth measuring, by how many warps they have, whether their queues fill half of a multiprocessor or all of it, and
    (rows, cluster) by ascending :func:`cost`.

    Half is enough by Little's law: 0.8 us of latency at a multiprocessor's 36 GB/s of an H200's memory are 29 KB. All of it has most of
    a GEMM of a few microseconds under way at its start; which is faster depends on the shape. Up to 8 tokens large weights also stream
    well through small tiles in several waves, a few per multiprocessor, one of which loads while another ends; with more, activations,
    read by every CTA, take the time. So in turn come, each by cost, three tiles of 8 warps that fill half, three that fill all, those in
    waves, one of 4 and of 16 warps of each kind; at the end, 6 and 2 warps. Where weights are large, what moves 1.4 times the bytes of
    the best is left out.
    """
    unit, n = 64 if shape.n_major else 8, shape.batch * shape.n
    found: dict[tuple[int, int, int, int], Tile] = {}
    kinds = [(f, c, max(1, -(-n * c // (sms * per_sm * unit))) * unit, per_sm) for (c, f), per_sm in itertools.product(_QUEUES, (1, 2, 4))]
    # A fill past all of it marks waves.
    kinds += [(_SMEM + per_sm, 1, rows, per_sm) for rows, per_sm in _WAVES if m <= 8 and rows * sms < n < rows << 16 and not shape.n_major]
    for (fill, cluster, rows, per_sm), (rank, warps), wide in itertools.product(kinds, enumerate(_WARPS), (2, 1)):
        steps = -(-shape.k // (32 * wide * warps * cluster))
        # Sums are fp32 of each warp, in the place of its queue.
        sums, free = warps * tokens(m) * (-(-rows // 16) * 64 + 16), _SMEM - tokens(m) * rows * 4 - 64
        stages = min(min(fill, free) // per_sm // (warps * wide * rows * 64), steps)
        # Much of the last step is past K, or waves of other warps than were fastest on an H200.
        poor = steps * 32 * wide * warps * cluster / shape.k > 1.25 or (fill > _SMEM and warps not in (8, 16))
        registers = -(-rows // 16) * tokens(m) // 2 + rows // 2  # sums and weights of a step
        if poor or steps > 32 or rows > 192 or stages < min(2, steps) or sums > free or registers > (64 if warps == 16 else 176):
            continue
        if (slot := (rank, fill, rows, cluster)) not in found or math.prod(found[slot][3:]) < stages * wide:
            found[slot] = rows, cluster, warps, stages, wide
    bytes_moved = {slot: cost(sms, shape, m, *slot[2:]) for slot in found}
    limit = 1.4 * min(bytes_moved.values(), default=0) if n * shape.k > 1 << 22 else math.inf
    fits = sorted((s for s in found if bytes_moved[s] <= limit), key=lambda s: (s[:2], bytes_moved[s], s))
    nth = {s: i for _, kind in itertools.groupby(fits, lambda s: s[:2]) for i, s in enumerate(kind)}
    # The sort is stable: within a turn by kind, then by cost.
    return list(dict.fromkeys(found[s] for s in sorted(nth, key=lambda s: (max(s[0] - 2, 0), nth[s] if s[0] else nth[s] // 3))))


def heuristic(sms: int, shape: Gemm, m: int, fused_a: bool) -> tuple[str, Tile | None]:
    """What takes a shape that was not measured: up to 16 tokens the kernel with the first of :func:`candidates`, else cuBLAS.

    DeepSeek's fused QKV keeps vLLM's own kernel where it is (`fused_a`).
    """
    if m > 16 or not (tiles := candidates(sms, shape, m)):
        return "cublas", None
    return ("fused_a", None) if fused_a else ("lldecode", tiles[0])


def choose(gpu: str, sms: int, shape: Gemm, m: int, fused_a: bool = False) -> tuple[str, Any]:
    """What takes `shape` at M = m, ``lldecode`` with its tile, ``cublas`` or ``fused_a``: by a plan, else by :func:`heuristic`.

    Args:
        gpu, sms: name and multiprocessors of the device.
        m: at most 32.
        fused_a: vLLM's ``dsv3_fused_a_gemm`` takes this product.
    """
    m = next(size for size in SIZES if size >= m)  # so that a warm-up of these has compiled all
    provider, tile = PLANS.choice(gpu, shape, m, () if fused_a else ("fused_a",)) or heuristic(sms, shape, m, fused_a)
    return provider, tile and tuple(tile)
