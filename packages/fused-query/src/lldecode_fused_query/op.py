"""The op ``torch.ops.lldecode.fused_query``: what it takes, its implementations, and the public function."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lldecode_fused_query import reference

ARCHS = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities that the kernel is proven on."""

NOPE, ROPE, INDEX_DIM = 512, 64, 128

_BF16, _FP8, _FP32 = (torch.bfloat16,), (reference.FP8,), (torch.float32,)
_Spec = tuple[str, Tensor | None, tuple[torch.dtype, ...], tuple[int | None, ...]]


def supports(*args: Any) -> str | None:
    """Why :func:`fused_query` cannot take these arguments, all of them and in the order of the op, or None."""
    q_pe = args[1]
    if reason := _mismatch(args[:11]) or _unavailable(q_pe.device):
        return reason
    if not q_pe.is_cuda or not len(q_pe) or not torch.cuda.is_current_stream_capturing():
        return None
    from lldecode_fused_query.kernel import KERNEL

    return None if KERNEL.is_warm(_config_of(args), q_pe.device) else "capture: expected a kernel compiled before it, got none"


# fmt: off
def _mismatch(tensors: Sequence[Any]) -> str | None:
    positions, q_pe, cos_sin, ql_nope, q_scale, mqa_output, index_q, index_cos_sin, index_weights, idx_q_fp8, idx_weights_out = tensors
    rows = (positions.numel(), max(1, q_pe.shape[1]) if q_pe.ndim == 3 else 1)
    specs: list[_Spec] = [
        ("q_pe", q_pe, _BF16, (*rows, ROPE)), ("positions", positions, (torch.int32, torch.int64), rows[:1]),
        ("cos_sin", cos_sin, _BF16 + _FP32, (None, ROPE)),
        ("mqa_output", mqa_output, _BF16 if ql_nope is None else _FP8 + _BF16, (*rows, ROPE if ql_nope is None else NOPE + ROPE)),
    ]
    if ql_nope is not None:
        specs.append(("ql_nope", ql_nope, _BF16, (*rows, NOPE)))
    if mqa_output.dtype == reference.FP8:
        specs.append(("q_scale", None if q_scale is None else q_scale.view(-1), _FP32, (1,)))
    if index_q is not None:
        index_rows = (rows[0], max(1, index_q.shape[1]) if index_q.ndim == 3 else 1)
        specs += [
            ("index_q", index_q, _BF16, (*index_rows, INDEX_DIM)), ("index_cos_sin", index_cos_sin, (cos_sin.dtype,), (None, ROPE)),
            ("index_weights", index_weights, _BF16, index_rows), ("idx_q_fp8", idx_q_fp8, _FP8, (*index_rows, INDEX_DIM)),
            ("idx_weights_out", idx_weights_out, _FP32, index_rows),
        ]
    for name, x, dtypes, shape in specs:
        if x is None:
            return f"{name}: expected a tensor, got None"
        if x.device != q_pe.device:
            return f"{name}: expected device {q_pe.device}, got {x.device}"
        if x.dtype not in dtypes:
            return f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}"
        if x.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, x.shape, strict=True)):
            return f"{name}: expected shape {str(list(shape)).replace('None', '*')}, got {list(x.shape)}"
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            return f"{name}: expected a last dimension of stride 1, got strides {x.stride()}"
        if any(stride * x.itemsize >= 2**31 for stride in x.stride()):
            return f"{name}: expected strides below 2 GiB, got {x.stride()} elements"
        if (x is mqa_output or x is idx_q_fp8) and _alignment(x) < 16:
            return f"{name}: expected rows aligned to 16 bytes, got address {x.data_ptr():#x} and strides {x.stride()}"
    return None


def fused_query(
    positions: Tensor, q_pe: Tensor, cos_sin: Tensor, ql_nope: Tensor | None, q_scale: Tensor | None, mqa_output: Tensor,
    index_q: Tensor | None = None, index_cos_sin: Tensor | None = None, index_weights: Tensor | None = None,
    idx_q_fp8: Tensor | None = None, idx_weights_out: Tensor | None = None, softmax_scale: float = 1.0, head_scale: float = 1.0,
    index_rope_interleave: bool = False, pdl: bool = False,
) -> None:
    """Rotate, quantize and pack the queries of one layer; T tokens, H heads, I indexer heads. One kernel on CUDA, torch on a CPU.

    Every result is that of exact arithmetic, rounded once, where no product of a rotation underflows fp32. Quantized values
    are the nearest in float8_e4m3fn, saturating at 448; NaN stays NaN. Tensors may be strided; their last dimension is dense.

    Args:
        positions: int32 or int64 ``[T]``, rows of the tables; not checked against their length.
        q_pe: bf16 ``[T, H, 64]``; adjacent pairs rotate.
        cos_sin: fp32 or bf16 ``[positions, 64]``, cosines then sines.
        ql_nope: bf16 ``[T, H, 512]``, or None: only the rotated q_pe is written.
        q_scale: fp32, one positive normal number that the fp8 query is divided by; not read for bf16.
        mqa_output: written: ``[T, H, 576]``, ql_nope before the rotated q_pe, in fp8 or bf16; without ql_nope bf16 ``[T, H, 64]``.
        index_q: bf16 ``[T, I, 128]``, the first 64 rotate; or None in a layer without an indexer: none of what follows is used.
        index_cos_sin: as `cos_sin`, of the same dtype.
        index_weights: bf16 ``[T, I]``.
        idx_q_fp8: written: fp8 ``[T, I, 128]``, index_q divided by its row's ue8m0 scale.
        idx_weights_out: written: fp32 ``[T, I]``, index_weights * the row's scale * `softmax_scale` * `head_scale`.
        index_rope_interleave: the indexer rotates adjacent pairs (GLM-5.2) rather than the two halves (DeepSeek-V3.2).
        pdl: launch as a programmatic dependent; changes no result.

    Raises:
        ValueError: an argument is not as described, the device is not one of :data:`ARCHS`, or the kernel was not compiled
            before the CUDA graph capture that the current stream is in; nothing is written.

    Source: RoPE and fp8 query of DeepSeek-V3.2-Exp (DeepSeek-AI, 2025), ``inference/model.py``, ``Indexer``.
    """
    args = (positions, q_pe, cos_sin, ql_nope, q_scale, mqa_output, index_q, index_cos_sin, index_weights, idx_q_fp8, idx_weights_out,
            softmax_scale, head_scale, index_rope_interleave, pdl)
    if not torch.compiler.is_compiling() and (reason := supports(*args)):
        raise ValueError(reason)
    torch.ops.lldecode.fused_query(*args)
# fmt: on


def _unavailable(device: torch.device) -> str | None:
    if device.type not in ("cpu", "cuda"):
        return f"device: expected a CUDA device or the CPU, got {device}"
    from lldecode.jit import unavailable

    return unavailable() if device.type == "cuda" else None


def _alignment(*tensors: Tensor | None) -> int:
    """The largest power of two up to 16 that divides every address and stride, in bytes."""
    bits = 16
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
            for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
                bits |= stride * x.itemsize if size > 1 else 0
    return bits & -bits


def _config_of(args: Sequence[Any]) -> Any:
    from lldecode_fused_query.kernel import Config

    positions, q_pe, cos_sin, ql_nope, _, mqa_output, index_q, index_cos_sin, *_, interleave, pdl = args
    output = "rope" if ql_nope is None else "fp8" if mqa_output.dtype == reference.FP8 else "bf16"
    align = _alignment(q_pe, cos_sin, ql_nope, index_q, index_cos_sin)
    return Config(output, index_q is not None, index_q is not None and interleave, positions.dtype, cos_sin.dtype, align, pdl)


torch.library.define(
    "lldecode::fused_query",
    "(Tensor positions, Tensor q_pe, Tensor cos_sin, Tensor? ql_nope, Tensor? q_scale, Tensor(a!) mqa_output, "
    "Tensor? index_q, Tensor? index_cos_sin, Tensor? index_weights, Tensor(b!)? idx_q_fp8, Tensor(c!)? idx_weights_out, "
    "float softmax_scale, float head_scale, bool index_rope_interleave, bool pdl) -> ()",
)
torch.library.register_fake("lldecode::fused_query", lambda *_: None)


@torch.library.impl("lldecode::fused_query", "CUDA")
def _cuda(*args: Any) -> None:
    q_pe, q_scale, mqa_output = args[1], args[4], args[5]
    if not len(q_pe):
        return
    from lldecode_fused_query.kernel import KERNEL

    scale = q_scale.view(1) if mqa_output.dtype == reference.FP8 else None
    index = args[6:11] if args[6] is not None else (None,) * 5
    KERNEL.get(_config_of(args), q_pe.device)(*args[:4], scale, mqa_output, *index, *args[11:13])


@torch.library.impl("lldecode::fused_query", "CPU")
def _cpu(*args: Any) -> None:
    positions, q_pe, cos_sin, ql_nope, q_scale, mqa_output, index_q, index_cos_sin, index_weights, *outputs = args[:11]
    mqa_output.copy_(reference.mqa_query(q_pe, cos_sin[positions], ql_nope, q_scale if mqa_output.dtype == reference.FP8 else None))
    if index_q is not None:
        results = reference.index_query(index_q, index_cos_sin[positions], index_weights, *args[11:14])
        for out, result in zip(outputs, results, strict=True):
            out.copy_(result)


def warmup(output: str, indexed: bool, interleave: bool, cos_sin: torch.dtype, device: torch.device, pdl: bool) -> None:
    """Compile what a layer needs for any number of tokens, with vLLM's int64 positions and aligned queries.

    Args:
        output: ``fp8``, ``bf16`` or ``rope``; see :class:`lldecode_fused_query.kernel.Config`.
        indexed: the layer has an indexer.
    """
    from lldecode_fused_query.kernel import KERNEL, Config

    KERNEL.get(Config(output, indexed, indexed and interleave, torch.int64, cos_sin, 16, pdl), device)
