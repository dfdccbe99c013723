"""``torch.ops.lldecode.ll_bf16_router``: the router GEMM of an MoE layer, for a decode step's few tokens."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from lldecode_ll_bf16_router import reference

ARCHS = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities that the kernels are built for."""
MAX_M = 32


class Config(NamedTuple):
    """How a shape is split: `tile` weight rows a CTA; `cluster` CTAs and `warps` warps of each share their K."""

    kind: str
    tile: int
    cluster: int
    warps: int


_H200 = (9, 0)
# (capability, N, K): (largest M, its config) by rising M. Fastest of 14 interleaved rounds of cold-L2 graph replays with PDL on an H200.
_MEASURED: dict[tuple[tuple[int, int], int, int], tuple[tuple[int, Config], ...]] = {
    (_H200, 256, 6144): (
        (1, Config("dotprod", 6, 1, 12)),
        (8, Config("splitk", 16, 8, 8)),
        (16, Config("splitk", 32, 8, 8)),
        (32, Config("splitk", 32, 8, 12)),
    ),
    (_H200, 256, 7168): (
        (1, Config("dotprod", 6, 1, 16)),
        (8, Config("splitk", 16, 8, 7)),
        (16, Config("splitk", 16, 8, 7)),
        (32, Config("splitk", 32, 8, 14)),
    ),
    (_H200, 384, 7168): (
        (1, Config("dotprod", 6, 1, 16)),
        (8, Config("splitk", 16, 4, 14)),
        (16, Config("splitk", 32, 4, 14)),
        (32, Config("splitk", 32, 8, 7)),
    ),
    (_H200, 256, 4096): (
        (1, Config("dotprod", 8, 1, 8)),
        (8, Config("splitk", 16, 8, 8)),
        (16, Config("splitk", 32, 8, 6)),
        (32, Config("splitk", 16, 8, 6)),
    ),
    (_H200, 128, 2880): (
        (1, Config("dotprod", 4, 1, 6)),
        (8, Config("splitk", 16, 8, 6)),
        (16, Config("splitk", 32, 8, 6)),
        (32, Config("splitk", 32, 8, 4)),
    ),
}


def dispatch(m: int, n: int, k: int, capability: tuple[int, int]) -> Config:
    """The measured config where there is one, else what the measured ones have in common."""
    for up_to, config in _MEASURED.get((capability, n, k), ()):
        if m <= up_to:
            return config
    if k <= (8192 if m == 1 else 512):
        # Two loads a thread and row; about 40 CTAs, because each reads all of x.
        return Config("dotprod", min(8 if m == 1 else 4, max(1, n // 40)), 1, -(-k // 512))
    tile = 16 if m <= 8 else 32
    # At most about one CTA an SM, and fewer of the large ones, so that the next kernel's fit beside them and load their weights.
    cluster = min(8, max(1, (160 if m <= 8 else 96) // -(-n // tile)))
    return Config("splitk", tile, cluster, min(16, -(-k // (32 * 3 * cluster))))


class _Plan(NamedTuple):
    """Everything that names a compiled function, hashable in a fraction of a microsecond."""

    config: Config
    m_tile: int
    k: int
    out_dtype: torch.dtype
    pdl: bool
    device: int


@functools.cache
def _plan(m: int, n: int, k: int, out_dtype: torch.dtype, pdl: bool, device: int) -> _Plan:
    config = dispatch(m, n, k, torch.cuda.get_device_capability(device))
    m_tile = min(m, 4) if config.kind == "dotprod" else -(-m // 8)
    return _Plan(config, m_tile, k, out_dtype, pdl, device)


_functions: dict[_Plan, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]] = {}


def _compile(plan: _Plan) -> None:
    config, m_tile, k, out_dtype, pdl, device = plan
    kernel: Any
    cfg: Any
    if config.kind == "dotprod":
        from lldecode_ll_bf16_router import kernel_dotprod as kernel

        cfg = kernel.Dotprod(k, config.tile, m_tile, config.warps, out_dtype, pdl)
    else:
        from lldecode_ll_bf16_router import kernel_splitk as kernel

        cfg = kernel.SplitK(k, config.tile // 16, m_tile, config.cluster, config.warps, out_dtype, pdl)
    _functions[plan] = kernel.KERNEL.get(cfg, torch.device("cuda", device))


def unsupported(n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> str | None:
    """Why no M is supported for a weight [n, k] of `dtype`, or None."""
    if dtype != torch.bfloat16:
        return f"weight: expected dtype torch.bfloat16, got {dtype}"
    if out_dtype not in (torch.float32, torch.bfloat16):
        return f"out_dtype: expected torch.float32 or torch.bfloat16, got {out_dtype}"
    if n < 1 or k < 8 or k % 8:
        return f"weight: expected shape [N, K] with N >= 1 and K a positive multiple of 8, got {[n, k]}"
    return None


def supports(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, pdl: bool = False) -> str | None:
    """Why :func:`ll_bf16_router` would refuse these arguments now, or None."""
    if x.dim() != 2 or weight.dim() != 2:
        return f"x, weight: expected two dimensions each, got {x.dim()} and {weight.dim()}"
    m, n, k = x.shape[0], weight.shape[0], weight.shape[1]
    if reason := unsupported(n, k, weight.dtype, out_dtype):
        return reason
    if x.dtype != torch.bfloat16:
        return f"x: expected dtype torch.bfloat16, got {x.dtype}"
    if x.shape[1] != k:
        return f"x: expected shape [M, {k}], got {list(x.shape)}"
    if m > MAX_M:
        return f"x: expected at most {MAX_M} rows, got {m}"
    for name, t in (("x", x), ("weight", weight)):
        row, column = t.stride()
        if column != 1 or row % 8:
            return f"{name}: expected a last stride of 1 and a row stride that is a multiple of 8, got {t.stride()}"
        if t.data_ptr() % 16:
            return f"{name}: expected 16-byte aligned data, got a view that is {t.data_ptr() % 16} bytes off"
    device = x.device
    if weight.device != device:
        return f"weight: expected device {device}, got {weight.device}"
    if device.type != "cuda":
        return None if device.type == "cpu" else f"x: expected a CUDA or CPU tensor, got {device}"
    if m == 0 or _plan(m, n, k, out_dtype, pdl, device.index) in _functions:
        return None
    return _cold(device)


def _cold(device: torch.device) -> str | None:
    """Why a kernel that is not in memory cannot be compiled now, or None."""
    from lldecode import jit

    if (capability := torch.cuda.get_device_capability(device)) not in ARCHS:
        proven = ", ".join(f"{major}.{minor}" for major, minor in ARCHS)
        return f"device: expected compute capability {proven}, got {capability[0]}.{capability[1]}"
    if torch.cuda.is_current_stream_capturing():
        return "kernel: expected to be compiled before a CUDA graph is captured, got none for these arguments"
    return jit.unavailable()


def warmup(
    n: int, k: int, out_dtype: torch.dtype, device: torch.device, pdl: bool = False, ms: Iterable[int] = range(1, MAX_M + 1)
) -> None:
    """Compile, or load from disk, every kernel that a weight [n, k] on `device` needs for the batch sizes `ms`.

    Raises:
        ValueError: the weight or `out_dtype` is not supported, or `device` is not a supported GPU.
    """
    reason = unsupported(n, k, torch.bfloat16, out_dtype)
    if reason is None:
        reason = f"device: expected a CUDA device, got {device}" if device.type != "cuda" else _cold(device)
    if reason:
        raise ValueError(reason)
    index = torch.cuda.current_device() if device.index is None else device.index
    for plan in dict.fromkeys(_plan(m, n, k, out_dtype, pdl, index) for m in ms):
        if plan not in _functions:
            _compile(plan)


def ll_bf16_router(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype = torch.float32, pdl: bool = False) -> torch.Tensor:
    """``x @ weight.T``, accumulated in fp32.

    The first call for a shape compiles for about a second; :func:`warmup` does that ahead.

    Args:
        x: [M, K] bf16, 0 <= M <= 32, K a multiple of 8; rows 16-byte aligned and otherwise anywhere.
        weight: [N, K] bf16, likewise.
        out_dtype: float32 or bfloat16.
        pdl: launch as a programmatic dependent: start, and load `weight`, while the kernel before on the stream still runs.
            Only where no kernel of the step writes `weight`.

    Returns:
        [M, N], bit for bit the same on every run.

    Raises:
        ValueError: what :func:`supports` says.
    """
    return _op(x, weight, out_dtype, pdl)


def _check(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, pdl: bool) -> None:
    if reason := supports(x, weight, out_dtype, pdl):
        raise ValueError(reason)


def _cuda(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, pdl: bool = False) -> torch.Tensor:
    _check(x, weight, out_dtype, pdl)
    m, n, k, device = x.shape[0], weight.shape[0], weight.shape[1], x.device
    y = torch.empty((m, n), dtype=out_dtype, device=device)
    if m == 0:
        return y
    plan = _plan(m, n, k, out_dtype, pdl, device.index)
    if plan not in _functions:
        _compile(plan)
    if torch.cuda.current_device() == device.index:
        _functions[plan](x, weight, y)
    else:
        with torch.cuda.device(device):
            _functions[plan](x, weight, y)
    return y


def _cpu(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, pdl: bool = False) -> torch.Tensor:
    _check(x, weight, out_dtype, pdl)
    return reference.ll_bf16_router(x, weight, out_dtype)


def _fake(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, pdl: bool = False) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


_library = torch.library.Library("lldecode", "FRAGMENT")
_library.define(
    "ll_bf16_router(Tensor x, Tensor weight, ScalarType out_dtype, bool pdl=False) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("ll_bf16_router", _cuda, "CUDA")
_library.impl("ll_bf16_router", _cpu, "CPU")
torch.library.register_fake("lldecode::ll_bf16_router", _fake, lib=_library)
_op = torch.ops.lldecode.ll_bf16_router.default
