"""Seams in vLLM 0.26.0: ``fused_q``, and FlashMLA's query, which arrives packed so that its own concat kernel is not launched."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lldecode.feature import Context, Feature, Patch, decline, pdl
from lldecode.warmup import Units, WarmUp
from lldecode_fused_query import op

NAME = "fused-query"

MAX_PACKED_TOKENS = 1024
"""Above this a bf16 query is not packed: a prefill batch would need a buffer that vLLM's memory profile has not seen."""

_handed = threading.local()  # vLLM runs micro-batches in threads


def probe(ctx: Context) -> str | None:
    """Why the kernel cannot run here, or None."""
    return ctx.missing("apache-tvm-ffi", "nvidia-cutlass-dsl") or ctx.unproven(op.ARCHS)


# fmt: off
def _fused_q(original: Callable[..., Any], padded_heads: Callable[[int], int]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fused_q(
        positions: Tensor, q_pe: Tensor, q_pe_cos_sin_cache: Tensor, index_q: Any, index_q_cos_sin_cache: Any, ql_nope: Tensor,
        q_scale: Tensor, index_weights: Any, index_weights_softmax_scale: float, index_weights_head_scale: float,
        has_indexer: bool = True, index_rope_interleave: bool = False, quantize_mqa: bool = True,
    ) -> tuple[Any, Any, Tensor]:
        tokens, heads, rope = q_pe.shape
        nope: Tensor | None = ql_nope
        if quantize_mqa:
            mqa_q = out = q_pe.new_empty(tokens, heads, op.NOPE + rope, dtype=torch.float8_e4m3fn)
        elif tokens <= MAX_PACKED_TOKENS:
            # what the padding holds does not matter: heads of an attention do not mix
            out = q_pe.new_empty(tokens, padded_heads(heads), op.NOPE + rope)[:, :heads]
            mqa_q = out[..., op.NOPE :]
        else:
            mqa_q, nope = (out := q_pe.new_empty(tokens, heads, rope)), None
        has_indexer = has_indexer and index_weights is not None  # there are none where the layer skips its top-k
        index: tuple[Any, ...] = (None,) * 5
        if has_indexer:
            index_out = torch.empty_like(index_q, dtype=torch.float8_e4m3fn), torch.empty_like(index_weights, dtype=torch.float32)
            index = index_q, index_q_cos_sin_cache, index_weights, *index_out
        args = (positions, q_pe, q_pe_cos_sin_cache, nope, q_scale, out, *index, index_weights_softmax_scale, index_weights_head_scale,
                index_rope_interleave, bool(pdl()))
        if reason := op.supports(*args):
            decline(NAME, reason)
            return original(positions, q_pe, q_pe_cos_sin_cache, index_q, index_q_cos_sin_cache, ql_nope, q_scale, index_weights,
                            *args[11:13], has_indexer, index_rope_interleave, quantize_mqa)
        torch.ops.lldecode.fused_query(*args)
        if mqa_q is not out:
            _handed.over = weakref.ref(mqa_q), weakref.ref(ql_nope)
        return index[3], index[4], mqa_q

    return fused_q
# fmt: on


def _packed(q: Any) -> Tensor | None:
    """The packed query, padded heads included, whose parts `q` are the leading tokens of; None where `q` is anything else."""
    if not isinstance(q, tuple) or not hasattr(_handed, "over"):
        return None
    for part, ref in zip(reversed(q), _handed.over, strict=True):
        whole = ref()  # while it lives nothing else is at its address
        if whole is None or (part.data_ptr(), part.stride(), part.shape[1:]) != (whole.data_ptr(), whole.stride(), whole.shape[1:]):
            return None
    rope = q[1]
    shape = len(rope), rope.stride(0) // rope.stride(1), op.NOPE + rope.shape[2]
    return rope.as_strided(shape, rope.stride(), rope.storage_offset() - op.NOPE)


def _forward_mqa(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_mqa(self: Any, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any) -> Any:
        packed = _packed(q)
        if packed is None:
            return original(self, q, kv_c_and_k_pe_cache, attn_metadata, layer)
        heads = q[0].shape[1]
        if not attn_metadata.fp8_use_mixed_batch or self.kv_cache_dtype != "fp8_ds_mla":
            packed = packed[:, :heads]
        out, lse = original(self, packed, kv_c_and_k_pe_cache, attn_metadata, layer)
        return out[:, :heads], lse

    return forward_mqa


def _units(layer: Any) -> Units:
    table = layer.rotary_emb.cos_sin_cache
    what = layer.indexer is not None, layer._index_rope_interleave, table.dtype, table.device, bool(pdl())
    outputs = ("fp8",) if layer._fp8_query else ("bf16", "rope")
    return {(output, *what): functools.partial(op.warmup, output, *what) for output in outputs if table.is_cuda}


_warm_up = WarmUp(NAME, _units)  # vLLM's registry of providers is weak


def _layer_forward_mqa(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return functools.wraps(original)(lambda q, *args: original(q if (packed := _packed(q)) is None else packed, *args))


def _padded_heads(heads: int) -> int:
    return heads if heads >= 32 else 64  # below, FlashMLA sparse attends for all tokens with one kernel, which takes 64 heads


_DSA = "vllm.models.deepseek_v32.nvidia.attention"
_FLASHMLA = "vllm.v1.attention.backends.mla.flashmla_sparse:FlashMLASparseImpl"
_REMOVE = "vLLM's own CuTe DSL kernel runs on SM90 and for FlashMLA and measures as fast (0.33.0 does not)"
_WHY = "rotates, quantizes and packs the queries in one kernel"
_PACKED = "takes the packed query, so that no kernel concatenates or pads it"

FEATURE = Feature(
    name=NAME,
    summary="RoPE, fp8 quantization and packing of the MQA and indexer queries in one kernel; in the deepseek_v32 class only",
    probe=probe,
    superseded_by="in part: vLLM 0.28.0 on SM100 with the FlashInfer backend",
    patches=(
        Patch(f"{_DSA}:fused_q", functools.partial(_fused_q, padded_heads=_padded_heads), _WHY, _REMOVE, frozenset({"2a9cc3a62d30e701"})),
        Patch(f"{_FLASHMLA}.forward_mqa", _forward_mqa, _PACKED, _REMOVE, frozenset({"977a9e20d977d321"})),
        Patch(f"{_DSA}:DeepseekV32Attention.__init__", _warm_up.init, "has vLLM warm it up", _REMOVE, frozenset({"e98c9bdbe836037f"})),
        Patch("lldecode.layer:fused_q", functools.partial(_fused_q, padded_heads=lambda heads: heads), _WHY, "with the feature"),
        Patch("lldecode.layer:forward_mqa", _layer_forward_mqa, _PACKED, "with the feature"),
    ),
)
