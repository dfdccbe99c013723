"""Seams in vLLM 0.26.0: the names under which importing modules hold ``fused_norm_rope``, ``fused_eh_norm`` and the index conversion.

Where vLLM compiles a model with ``index_topk``, the kernels that Inductor generates launch as programmatic dependents, too.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lldecode.feature import Context, Feature, Patch, decline, pdl
from lldecode_pdl import op

NAME = "pdl"

# fused_norm_rope's keywords in the op's order
_KEYWORDS = ("slot_mapping", "indexer_k_cache", "mla_kv_cache", "mla_kv_cache_dtype", "mla_k_scale", "index_rope_interleave")


def probe(ctx: Context) -> str | None:
    """Why the kernels cannot run here, or None."""
    return ctx.missing("triton") or ctx.unproven(op.ARCHS)


def _norm_rope(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def fused_norm_rope(*args: Any, **kwargs: Any) -> Tensor:
        reason, keywords = None, {name: kwargs.get(name) for name in _KEYWORDS}
        kv, indexer = args[:9], args[9:]  # positions to k_rope_cos_sin_cache, index_k to topk_indices_buffer
        if not kwargs.get("has_indexer", True):
            indexer, keywords["indexer_k_cache"] = (None, None, None, 0.0, None, None), None
        elif len(args) != 15 or args[9] is None:
            reason = "index_k: expected a tensor and 15 arguments by position"
        q_out = torch.empty_like(args[1], memory_format=torch.contiguous_format) if (out := kwargs.get("q_c_out")) is None else out
        call = (q_out, *kv, *indexer, *keywords.values())
        if reason := reason or op.supports_norm_rope(*call):
            decline(NAME, reason)
            return original(*args, **kwargs)
        op.fused_norm_rope(*call, bool(pdl()))
        return q_out

    return fused_norm_rope


def _eh_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def fused_eh_norm(*args: Any) -> Tensor:
        if reason := op.supports_eh_norm(*args):
            decline(NAME, reason)
            return original(*args)
        return op.fused_eh_norm(*args, bool(pdl()))

    return fused_eh_norm


def _convert(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def triton_convert_req_index_to_global_index(
        req_id: Tensor, block_table: Tensor, token_indices: Tensor, BLOCK_SIZE: int = 64, NUM_TOPK_TOKENS: int = 2048, **rest: Any
    ) -> Any:
        workspace = [rest.get(f"prefill_workspace_{n}") if rest.get("HAS_PREFILL_WORKSPACE") else None for n in ("request_ids", "starts")]
        counts = req_id.new_empty(len(req_id)) if rest.get("return_valid_counts") else None
        args: tuple[Any, ...] = (req_id, block_table, token_indices, BLOCK_SIZE, *workspace, counts)
        if reason := op.supports_convert(*args):
            decline(NAME, reason)
            return original(req_id, block_table, token_indices, BLOCK_SIZE, NUM_TOPK_TOKENS, **rest)
        slots = op.convert_req_index(*args, bool(pdl()))
        return slots if counts is None else (slots, counts)

    return triton_convert_req_index_to_global_index


def _backend(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if hasattr(vllm_config.model_config.hf_config, "index_topk"):
            self.inductor_config = {"triton.enable_pdl": True} | self.inductor_config | {"aot_inductor.metadata": _MARK}

    return __init__


def _body(original: Callable[..., None]) -> Callable[..., None]:
    """A generated kernel lets its dependents start and waits, whatever it reads, before anything else.

    PyTorch 2.11 lets them start after the last load, too late for the next GEMM to load its weights meanwhile, and waits after those loads
    that the kernel just before did not write, on the premise that this one had waited before it let go: none that goes by the above does.
    """

    @functools.wraps(original)
    def _filter_pdl(self: Any, code: Any) -> None:
        original(self, code)
        ours = torch._inductor.config.aot_inductor.metadata == _MARK and self._enable_pdl_codegen()
        start = [self.GDC_LAUNCH, self.GDC_WAIT] if ours else []
        code._lines = start + [line for line in code._lines if str(line).strip() not in start]

    return _filter_pdl


# Of Inductor's config, so of the key of PyTorch's own caches, which do not see the body: another body takes another mark.
_MARK = {NAME: "launch, wait, body"}
_DSA = "vllm.models.deepseek_v32.nvidia"
_BACKENDS = "vllm.v1.attention.backends.mla"
_NEVER = "vLLM launches this kernel with PDL (0.33.0 does not)"
_INDUCTOR = "vLLM compiles with triton.enable_pdl, and Inductor's kernels wait whatever ran before"


def _patch(target: str, wrap: Callable[[Any], Any], remove_when: str, *expects: str, host: str = "") -> Patch:
    # Innermost: these replace a kernel, and what other features wrap around the call must stay around it.
    return Patch(target, wrap, "programmatic dependent launch", remove_when, frozenset(expects), -1, host)


FEATURE = Feature(
    name=NAME,
    summary="Programmatic dependent launch: norm + RoPE + cache write, MTP input norm, top-k index conversion, what Inductor generates",
    probe=probe,
    superseded_by="in part: vLLM 0.28.0 (PDL of fused_norm_rope), 0.29.0 (q norm of padded rows)",
    patches=(
        _patch(f"{_DSA}.attention:fused_norm_rope", _norm_rope, "vLLM >= 0.29", "5193450b3d55b29c"),
        _patch(f"{_DSA}.mtp:fused_eh_norm", _eh_norm, _NEVER, "1385aad87e4c3211"),
        *(
            _patch(f"{_BACKENDS}.{module}:triton_convert_req_index_to_global_index", _convert, _NEVER, "691cce89be0b63bc")
            for module in ("flashinfer_mla_sparse", "flashinfer_mla_sparse_sm120", "flashmla_sparse", "flashattn_mla_sparse")
        ),
        _patch("vllm.compilation.backends:VllmBackend.__init__", _backend, _INDUCTOR, "fec60ab5c401b5f3"),
        _patch("torch._inductor.codegen.triton:TritonKernel._filter_pdl", _body, _INDUCTOR, "e6155db14425e19c", host="vllm"),
        _patch("lldecode.layer:fused_norm_rope", _norm_rope, "with the feature"),
        _patch("lldecode.layer:triton_convert_req_index_to_global_index", _convert, "with the feature"),
    ),
)
