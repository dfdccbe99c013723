"""The ops ``torch.ops.lldecode.{skinny_gemm, skinny_gemm_bmm}``: what they take, their implementations, the public functions.

Each has an ``out=`` overload. They take any M: what runs, an own kernel, vLLM's ``dsv3_fused_a_gemm`` or cuBLAS, is decided
inside, from :mod:`plan`, so that torch.compile sees no branch on M. `pdl` launches with programmatic dependent launch: the kernel
may start, and load its weights, before the kernels that write its inputs have finished; it changes no result.
"""

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lldecode_skinny_gemm import plan, reference

if TYPE_CHECKING:
    from lldecode_skinny_gemm.kernel import Config

logger = logging.getLogger("lldecode.skinny_gemm")

ARCHS = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities that the kernel is proven on."""

_DTYPES = (torch.bfloat16, torch.float16)


def _check(name: str, x: Tensor, like: Tensor, shape: tuple[int | None, ...]) -> str | None:
    if x.device != like.device:
        return f"{name}: expected device {like.device}, got {x.device}"
    if x.dtype not in _DTYPES or x.dtype != like.dtype:
        return f"{name}: expected {'torch.bfloat16 or torch.float16' if x is like else like.dtype}, got {x.dtype}"
    if x.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, x.shape, strict=True)):
        return f"{name}: expected shape {str(list(shape)).replace('None', '*')}, got {list(x.shape)}"
    return None


def _aligned(name: str, x: Tensor, dense: int) -> str | None:
    """Why rows of `x` along `dense` cannot be read 16 bytes at a time, or None."""
    if (
        x.shape[dense] % 8
        or x.stride(dense) != 1
        or any(s % 8 for i, s in enumerate(x.stride()) if i != dense % x.ndim)
        or x.data_ptr() % 16
    ):
        what = f"got shape {list(x.shape)}, strides {x.stride()}, address {x.data_ptr():#x}"
        return f"{name}: expected dense rows of a multiple of 8 elements, aligned to 16 bytes, {what}"
    return None


def supports(x: Tensor, weight: Tensor, residual: Tensor | None = None, out: Tensor | None = None, *, bmm: bool = False) -> str | None:
    """Why the op cannot take these arguments of :func:`skinny_gemm`, or, with `bmm`, of :func:`skinny_bmm`; or None."""
    batch = tuple(x.shape[:1]) if bmm else ()
    weight = weight if bmm else weight.transpose(-1, -2)
    k = x.shape[-1] if x.ndim else None
    if reason := _check("x", x, x, (*batch, None, None)) or _check("weight", weight, x, (*batch, k, None)):
        return reason
    y = (*batch, x.shape[-2], weight.shape[-1])
    for name, other in (("residual", residual), ("out", out)):
        if other is not None and (reason := _check(name, other, x, y)):
            return reason
        if other is not None and other.stride(-1) != 1:
            return f"{name}: expected a last dimension of stride 1, got strides {other.stride()}"
    if x.device.type == "cpu":
        return None
    return _unavailable(x.device) or _aligned("x", x, -1) or _aligned("weight", weight, -2 if weight.stride(-2) == 1 else -1)


@functools.cache
def _unavailable(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"device: expected a CUDA device or the CPU, got {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHS:
        return f"capability: expected one of {ARCHS}, got {capability}"
    try:
        from lldecode_skinny_gemm import kernel  # noqa: F401
    except ImportError as e:
        return f"CuTe DSL: {e}"
    return None


def skinny_gemm(x: Tensor, weight: Tensor, residual: Tensor | None = None, *, out: Tensor | None = None, pdl: bool = True) -> Tensor:
    """x @ weight.T + residual, accumulated in fp32 and rounded once.

    Args:
        x: bf16 or fp16 ``[M, K]``; dense rows, aligned to 16 bytes.
        weight: ``[N, K]`` of x's dtype; one dimension dense, the other's stride a multiple of 8.
        residual: ``[M, N]``, rows dense.
        out: ``[M, N]`` to write, rows dense; a new tensor if None.

    Returns:
        ``[M, N]`` of x's dtype.

    Raises:
        ValueError: an argument is not as described, or the device is not one of :data:`ARCHS`; nothing is written.

    Source: PTX ISA 8.7, ``mma.m16n8k16`` fragments.
    """
    return _call(x, weight, residual, out, False, pdl)


def skinny_bmm(x: Tensor, weight: Tensor, *, out: Tensor | None = None, pdl: bool = True) -> Tensor:
    """x @ weight per head: MLA's absorbed products, with the weights as vLLM holds them.

    Args:
        x: bf16 or fp16 ``[H, M, K]``, strided; dense rows, aligned to 16 bytes.
        weight: ``[H, K, N]`` of x's dtype; K or N dense, the other strides multiples of 8.
        out: ``[H, M, N]`` to write, strided with dense rows; a new tensor if None.

    Returns:
        ``[H, M, N]`` of x's dtype.

    Raises:
        ValueError: as :func:`skinny_gemm`.
    """
    return _call(x, weight, None, out, True, pdl)


def _call(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor | None, bmm: bool, pdl: bool) -> Tensor:
    if not torch.compiler.is_compiling() and (reason := supports(x, weight, residual, out, bmm=bmm)):
        raise ValueError(reason)
    op = torch.ops.lldecode.skinny_gemm_bmm if bmm else torch.ops.lldecode.skinny_gemm
    args = (x, weight) if bmm else (x, weight, residual)
    if out is None:
        return op.default(*args, pdl)
    op.out(*args, pdl, out=out)
    return out


@functools.cache
def config_of(
    device: int, shape: plan.Shape, stride: int, m: int, dtype: torch.dtype, residual: bool, pdl: bool
) -> tuple[str, "Config | None"]:
    """The provider that a plan names, and the config of the own kernel."""
    from lldecode_skinny_gemm.kernel import Config

    fused_a = shape[:2] == plan.FUSED_A and shape.batch == 1 and m <= 16 and dtype == torch.bfloat16 and not residual
    fused_a = fused_a and hasattr(torch.ops._C, "dsv3_fused_a_gemm")
    choice = plan.choose(*plan.device(device), shape, m, fused_a)
    if choice.tile is None:
        return choice.provider, None
    return choice.provider, Config(shape.k, stride, plan.tokens(m), *choice.tile, dtype, shape.n_major, residual, pdl)


def shape_of(weight: Tensor) -> tuple[plan.Shape, int]:
    """The plan's name of a weight ``[H, K, N]``, and its stride that is not dense."""
    batch, k, n = weight.shape
    n_major = weight.stride(1) != 1
    return plan.Shape(n, k, batch, n_major), weight.stride(1 if n_major else 2)


def run(cfg: "Config", x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """Launch one config: x ``[H, M, K]``, weight ``[H, K, N]``, residual and out ``[H, M, N]``."""
    from lldecode_skinny_gemm.kernel import KERNEL

    fn = KERNEL.get(cfg, x.device)
    with torch.cuda.device(x.device):
        fn(x, weight if cfg.n_major else weight.transpose(1, 2), out, residual)


def warmup(weight: Tensor, pdl: bool) -> None:
    """Compile and run whatever the plan names for a weight ``[N, K]`` or ``[H, K, N]`` at any M up to 32."""
    w = weight.T[None] if weight.ndim == 2 else weight
    shape, stride = shape_of(w)
    configs = {config_of(w.device.index, shape, stride, m, w.dtype, False, pdl)[1]: m for m in plan.MEASURED_M}
    for cfg, m in configs.items():
        if cfg is not None and not _aligned("weight", w, -1 if shape.n_major else 1):
            run(cfg, w.new_zeros(shape.batch, m, shape.k), w, None, w.new_empty(shape.batch, m, shape.n))


def _cuda(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor, pdl: bool) -> None:
    """All operands of three dimensions, weight [H, K, N]."""
    from lldecode.jit import NotWarm

    if not out.numel():
        return
    shape, stride = shape_of(weight)
    cfg = None
    if x.shape[1] <= plan.MAX_M and shape.k and not (_aligned("x", x, -1) or _aligned("weight", weight, 1 if not shape.n_major else -1)):
        provider, cfg = config_of(x.device.index, shape, stride, x.shape[1], x.dtype, residual is not None, pdl)
        if provider == "fused_a" and out.is_contiguous() and x.is_contiguous():
            torch.ops._C.dsv3_fused_a_gemm(out[0], x[0], weight[0])
            return
    if cfg is not None:
        try:
            return run(cfg, x, weight, residual, out)
        except NotWarm as e:
            logger.warning("cuBLAS instead: %s", e)
    if residual is None:
        torch.bmm(x, weight, out=out) if len(x) > 1 else torch.mm(x[0], weight[0], out=out[0])
    else:
        torch.addmm(residual[0], x[0], weight[0], out=out[0])


def _gemm_out(x: Tensor, weight: Tensor, residual: Tensor | None = None, pdl: bool = True, *, out: Tensor) -> None:
    if x.is_cuda:
        _cuda(x[None], weight.T[None], None if residual is None else residual[None], out[None], pdl)
    else:
        out.copy_(reference.skinny_gemm(x, weight, residual))


def _bmm_out(x: Tensor, weight: Tensor, pdl: bool = True, *, out: Tensor) -> None:
    if x.is_cuda:
        _cuda(x, weight, None, out, pdl)
    else:
        out.copy_(reference.skinny_gemm(x, weight.transpose(1, 2)))


def _register(name: str, args: str, into: Callable[..., None], shape: Callable[[Tensor, Tensor], tuple[int, ...]]) -> None:
    def new(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        out = x.new_empty(shape(x, weight))
        into(x, weight, *rest, out=out)
        return out

    for full, returns, run, fake in (
        (name, f"({args}) -> Tensor", new, lambda x, weight, *rest: x.new_empty(shape(x, weight))),
        (f"{name}.out", f"({args}, *, Tensor(a!) out) -> ()", into, lambda *args, out: None),
    ):
        torch.library.define(full, returns)
        torch.library.impl(full, ("cpu", "cuda"), run)
        torch.library.register_fake(full, fake)


_register(
    "lldecode::skinny_gemm",
    "Tensor x, Tensor weight, Tensor? residual=None, bool pdl=True",
    _gemm_out,
    lambda x, weight: (x.shape[0], weight.shape[0]),
)
_register(
    "lldecode::skinny_gemm_bmm", "Tensor x, Tensor weight, bool pdl=True", _bmm_out, lambda x, weight: (*x.shape[:2], weight.shape[2])
)
