"""The op ``torch.ops.lldecode.skinny_gemm``, with an ``out=`` overload: what it takes, its implementations, the public functions.

It takes any M: what runs, an own kernel, vLLM's ``dsv3_fused_a_gemm`` or cuBLAS, is decided inside, from :mod:`plan`, so that
torch.compile sees no branch on M. `pdl` launches with programmatic dependent launch: the kernel may start, and load its weights,
before the kernels that write its inputs have finished; it changes no result.
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from lldecode.plan import SIZES, Gemm, gpu
from lldecode_skinny_gemm import plan, reference

logger = logging.getLogger("lldecode.skinny_gemm")

ARCHS = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities that the kernel is proven on."""


def supports(x: Tensor, weight: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> str | None:
    """Why the op cannot take these arguments of :func:`skinny_gemm`, each with a leading dimension for :func:`skinny_bmm`; or None."""
    if x.ndim not in (2, 3):
        return f"x: expected shape [M, K] or [H, M, K], got {list(x.shape)}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x: expected torch.bfloat16 or torch.float16, got {x.dtype}"
    *heads, m, k = x.shape
    n = weight.shape[-2] if weight.ndim == x.ndim else "N"
    for name, t, shape in (("weight", weight, [*heads, n, k]), ("residual", residual, [*heads, m, n]), ("out", out, [*heads, m, n])):
        if t is not None and (t.device, t.dtype, list(t.shape)) != (x.device, x.dtype, shape):
            return f"{name}: expected {x.dtype} {shape} on {x.device}, got {t.dtype} {list(t.shape)} on {t.device}"
        if t is not None and t is not weight and t.stride(-1) != 1:
            return f"{name}: expected a last dimension of stride 1, got strides {t.stride()}"
    if x.device.type != "cuda":
        return None if x.device.type == "cpu" else f"x: expected a CUDA or CPU tensor, got {x.device}"
    from lldecode import jit

    # Nothing compiles inside a capture, not even to find out whether anything does.
    return (None if torch.cuda.is_current_stream_capturing() else jit.unavailable()) or _misaligned(x, weight)


def _misaligned(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot read its operands 16 bytes at a time, along K or, of a weight, along N; or None."""
    for name, t, dense in (("x", x, x.ndim - 1), ("weight", weight, weight.ndim - 1 - (weight.stride(-1) != 1))):
        strides = [s % 8 for i, s in enumerate(t.stride()) if i != dense]
        if not t.shape[dense] or t.shape[dense] % 8 or t.stride(dense) != 1 or any(strides) or t.data_ptr() % 16:
            got = f"{list(t.shape)}, strides {t.stride()}, {t.data_ptr() % 16} bytes off"
            return f"{name}: expected dense rows of a multiple of 8 elements, aligned to 16 bytes, got {got}"
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
    if not torch.compiler.is_compiling() and (reason := supports(x, weight, residual, out)):
        raise ValueError(reason)
    if out is None:
        return torch.ops.lldecode.skinny_gemm.default(x, weight, residual, pdl)
    torch.ops.lldecode.skinny_gemm.out(x, weight, residual, pdl, out=out)
    return out


def skinny_bmm(x: Tensor, weight: Tensor, *, out: Tensor | None = None, pdl: bool = True) -> Tensor:
    """x @ weight per head: MLA's absorbed products, with the weights as vLLM holds them.

    Args:
        x: bf16 or fp16 ``[H, M, K]``, strided; dense rows, aligned to 16 bytes.
        weight: ``[H, K, N]`` of x's dtype; K or N dense, the other strides multiples of 8.
        out: ``[H, M, N]`` to write, strided with dense rows; a new tensor if None.

    Returns:
        ``[H, M, N]`` of x's dtype.

    Raises:
        ValueError: as :func:`skinny_gemm`, with the weight transposed.
    """
    return skinny_gemm(x, weight.transpose(-2, -1), out=out, pdl=pdl)


def fused_a(shape: Gemm, m: int) -> bool:
    """Whether vLLM's ``dsv3_fused_a_gemm`` is there and takes a product in bf16."""
    return shape == plan.FUSED_A and m <= 16 and hasattr(torch.ops._C, "dsv3_fused_a_gemm")


def run_fused_a(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """As :func:`run`, by vLLM's kernel; all operands contiguous."""
    torch.ops._C.dsv3_fused_a_gemm(out[0], x[0], weight[0].T)


def run_cublas(x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    """As :func:`run`, by cuBLAS."""
    if residual is not None:
        torch.baddbmm(residual, x, weight.mT, out=out)
    elif len(x) > 1:
        torch.bmm(x, weight.mT, out=out)
    else:
        torch.mm(x[0], weight[0].T, out=out[0])


def run(cfg: Any, x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    """Launch one config: x ``[H, M, K]``, weight ``[H, N, K]``, residual and out ``[H, M, N]``."""
    from lldecode_skinny_gemm.kernel import KERNEL

    with torch.cuda.device(x.device):
        KERNEL.get(cfg, x.device)(x, weight.mT if cfg.n_major else weight, out, residual)


def config(shape: Gemm, stride: int, m: int, tile: plan.Tile, dtype: torch.dtype, residual: bool, pdl: bool) -> Any:
    """Of the kernel for any M that takes the same tile of tokens; `stride` is that of the weight which is not dense."""
    from lldecode_skinny_gemm.kernel import Config

    return Config(shape.k, stride, plan.tokens(m), *tile, dtype, shape.n_major, residual, pdl)


@functools.cache
def choose(device: int, shape: Gemm, stride: int, m: int, dtype: torch.dtype, residual: bool, pdl: bool) -> tuple[str, Any]:
    """The provider that :func:`plan.choose` names, and the config of the own kernel."""
    special = fused_a(shape, m) and dtype == torch.bfloat16 and not residual and stride == shape.k
    provider, tile = plan.choose(*gpu(device), shape, m, special)
    return provider, tile and config(shape, stride, m, tile, dtype, residual, pdl)


def warmup(weight: Tensor, pdl: bool) -> None:
    """Compile and run whatever is chosen for a weight ``[N, K]`` or ``[H, N, K]`` at any M up to 32."""
    for m in SIZES:
        torch.ops.lldecode.skinny_gemm(weight.new_zeros(*weight.shape[:-2], m, weight.shape[-1]), weight, None, pdl)


def _cuda(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor, pdl: bool) -> None:
    """All operands of three dimensions."""
    from lldecode.jit import NotWarm

    if x.shape[1] <= SIZES[-1] and not _misaligned(x, weight):
        provider, cfg = choose(x.device.index, *Gemm.of(weight), x.shape[1], x.dtype, residual is not None, pdl)
        if provider == "fused_a" and x.is_contiguous() and out.is_contiguous():
            return run_fused_a(x, weight, out)
        if cfg is not None:
            try:
                return run(cfg, x, weight, out, residual)
            except NotWarm as e:
                logger.warning("cuBLAS instead: %s", e)
    run_cublas(x, weight, out, residual)


def _into(x: Tensor, weight: Tensor, residual: Tensor | None = None, pdl: bool = True, *, out: Tensor) -> None:
    if x.is_cuda and out.numel():
        _cuda(*(t if t is None or t.ndim == 3 else t[None] for t in (x, weight, residual, out)), pdl)  # type: ignore[arg-type, call-arg]
    elif out.numel():
        out.copy_(reference.skinny_gemm(x, weight, residual))


def _new(x: Tensor, weight: Tensor, residual: Tensor | None = None, pdl: bool = True) -> Tensor:
    out = _fake(x, weight)
    _into(x, weight, residual, pdl, out=out)
    return out


def _fake(x: Tensor, weight: Tensor, residual: Tensor | None = None, pdl: bool = True) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[-2])


_ARGS = "Tensor x, Tensor weight, Tensor? residual=None, bool pdl=True"
for _name, _schema, _run, _abstract in (
    ("lldecode::skinny_gemm", f"({_ARGS}) -> Tensor", _new, _fake),
    ("lldecode::skinny_gemm.out", f"({_ARGS}, *, Tensor(a!) out) -> ()", _into, lambda *args, out: None),
):
    torch.library.define(_name, _schema)
    torch.library.impl(_name, ("cpu", "cuda"), _run)
    torch.library.register_fake(_name, _abstract)
