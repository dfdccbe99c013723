"""Runs the attention backends of vLLM 0.26.0 with and without the feature, and prints how often indices were converted, as JSON.

For ``lldecode.testing_vllm.run_vllm``. Real are ``forward_mqa`` of each backend, its metadata class, the forward context and the
conversion (Triton, interpreted); stand-ins are the indexer's kernels and the attention kernels, which keep the indices they get.
"""

import functools
import json
import sys
from types import ModuleType
from typing import Any

import torch

from lldecode.engine import Engine
from lldecode.feature import Feature, Patch, declined
from lldecode_mtp_spec.vllm import FEATURE

LAYERS, TOPK, TOKENS = 24, 128, 4
WITH_INDEXER = {0, 1, 2, *range(6, LAYERS, 4)}
"""GLM-5.2's pattern: 8 of 24."""

MLA = "vllm.v1.attention.backends.mla"
INDEXER = "vllm.models.deepseek_v32.nvidia.attention:sparse_attn_indexer"
CONVERT = "triton_convert_req_index_to_global_index"
MODULES = ("flashinfer_mla_sparse", "flashmla_sparse", "flashattn_mla_sparse")

launches: list[int] = []
seen: list[list[torch.Tensor]] = []


def inner(original: Any) -> Any:
    """What another feature puts in the place of the kernel."""

    @functools.wraps(original)
    def converted(*args: Any, **kwargs: Any) -> Any:
        wrapped.append(1)
        return original(*args, **kwargs)

    return converted


wrapped: list[int] = []
OTHER = Feature(
    "other",
    "replaces the conversion, as pdl does",
    tuple(Patch(f"{MLA}.{m}:{CONVERT}", inner, "test", "never", frozenset({"691cce89be0b63bc"}), order=-1) for m in MODULES),
)


def keep(*tensors: Any) -> None:
    seen.append([t.clone() for t in tensors if t is not None])


def stub_kernels() -> None:
    import vllm.v1.attention.backends.mla.flashattn_mla_sparse as flashattn
    import vllm.v1.attention.backends.mla.sparse_utils as utils

    kernel = utils._convert_req_index_to_global_index_kernel

    class Counting:
        def __getitem__(self, grid: Any) -> Any:
            launches.append(1)
            return kernel[grid]

    utils._convert_req_index_to_global_index_kernel = Counting()

    def flash_attn(q: Any, block_table: Any, seqused_k: Any, **_: Any) -> Any:
        keep(block_table, seqused_k)
        return q

    def trtllm(query: Any, block_tables: Any, seq_lens: Any, **_: Any) -> Any:
        keep(block_tables, seq_lens)
        return query

    flashattn.flash_attn_varlen_func = flash_attn
    decode = ModuleType("flashinfer.decode")
    decode.trtllm_batch_decode_with_kv_cache_mla = trtllm
    sys.modules["flashinfer.decode"] = decode


def metadata(module: Any, name: str, tokens: int) -> Any:
    generator = torch.Generator().manual_seed(tokens)
    block_table = torch.randint(0, 50, (2, 8), dtype=torch.int32, generator=generator)
    req_id = torch.arange(tokens, dtype=torch.int32) * 2 // tokens
    common = {"num_reqs": 2, "max_query_len": 1, "max_seq_len": 500, "num_actual_tokens": tokens, "topk_tokens": TOPK}
    common |= {"query_start_loc": None, "slot_mapping": None, "block_table": block_table, "req_id_per_token": req_id, "seq_lens": None}
    if "flashinfer" in module.__name__:
        common |= {"num_decodes": 2, "num_prefills": 0, "num_decode_tokens": tokens}
    return getattr(module, name)(**common)


class Backend:
    """One backend's real ``forward_mqa`` and metadata class."""

    def __init__(self, kind: str) -> None:
        import vllm.v1.attention.backends.mla.flashattn_mla_sparse as flashattn
        import vllm.v1.attention.backends.mla.flashinfer_mla_sparse as flashinfer
        import vllm.v1.attention.backends.mla.flashmla_sparse as flashmla

        self.kind = kind
        self.module = {"flashattn": flashattn, "flashinfer": flashinfer}.get(kind, flashmla)
        prefix = {"flashattn": "FlashAttnMLASparse", "flashinfer": "FlashInferMLASparse"}.get(kind, "FlashMLASparse")
        self.metadata_name = f"{prefix}Metadata"
        cls = getattr(self.module, f"{prefix}Impl")
        impl = object.__new__(cls)
        values: dict[str, Any] = {"num_heads": 4, "head_size": 576, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "scale": 1.0}
        values |= {"dcp_world_size": 1, "_workspace_buffer": torch.empty(1), "bmm1_scale": 1.0, "bmm2_scale": 1.0, "softmax_scale": 1.0}
        values |= {
            "kv_cache_dtype": "auto" if kind == "flashmla-bf16" else "fp8_ds_mla",
            "qk_nope_head_dim": 128,
            "need_to_return_lse_for_decode": False,
        }
        for name, value in values.items():
            vars(impl)[name] = value
        impl._bf16_flash_mla_kernel = lambda q, kv, topk, length=None: keep(topk, length) or q
        impl._fp8_flash_mla_kernel = lambda q, topk_indices, **_: (keep(topk_indices) or q, None)
        self.impl = impl

    def new_metadata(self, tokens: int) -> Any:
        made = metadata(self.module, self.metadata_name, tokens)
        if self.kind == "flashmla-mixed":
            made.fp8_use_mixed_batch = True
            made.fp8_extra_metadata = self.module.FlashMLASparseMetadata.FP8KernelMetadata(None, None, None)
        if self.kind == "flashmla-separate":
            cls = self.module.FlashMLASparseMetadata.FP8SeparatePrefillDecode
            decode = cls.Decode(None, None, 1)
            made.fp8_extra_metadata = cls(num_decodes=tokens, num_decode_tokens=tokens, decode=decode)
        return made

    def attend(self, buffer: torch.Tensor, made: Any) -> None:
        self.impl.topk_indices_buffer = buffer
        q = torch.zeros(made.num_actual_tokens, 4, 576, dtype=torch.bfloat16)
        cache = torch.zeros(50, made.block_size, 576, dtype=torch.bfloat16)
        self.impl.forward_mqa((q[..., :512], q[..., 512:]) if self.kind == "flashattn" else q, cache, made, None)


def written(buffer: torch.Tensor, seed: int) -> Any:
    """A stand-in for the indexer, as the attention calls it, wrapped as the feature wraps the real one."""

    def run(*args: Any, **_: Any) -> torch.Tensor:
        args[13].copy_(torch.randint(-1, 500, args[13].shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed)))
        return args[13]

    call = next(p.wrap for p in FEATURE.patches if p.target == INDEXER)(run) if "mtp-spec" in engine.enabled else run
    return call(*[None] * 13, buffer, True, False, skip_topk_buffer_clear=True)


def forward_pass(backend: Backend, made: Any, buffer: torch.Tensor, layers: range, seed: int) -> None:
    """A pass through `layers`, those of :data:`WITH_INDEXER` writing the buffer first."""
    from vllm.forward_context import ForwardContext, override_forward_context

    with override_forward_context(ForwardContext(no_compile_layers={}, attn_metadata={"layer": made}, slot_mapping={})):
        for i in layers:
            if i in WITH_INDEXER:
                written(buffer, seed + i)
            backend.attend(buffer, made)


def run(kind: str) -> dict[str, Any]:
    """A target pass of 24 layers, then the draft's: step 0 with the target's metadata, step 1 with its own and no indexer."""
    backend = Backend(kind)
    target, draft = (torch.full((TOKENS + 2, TOPK), -1, dtype=torch.int32) for _ in range(2))
    counts = []

    def part(*args: Any) -> None:
        before = len(launches)
        forward_pass(backend, *args)
        counts.append(len(launches) - before)

    seen.clear()
    made = backend.new_metadata(TOKENS)
    part(made, target, range(LAYERS), 0)
    part(made, draft, range(1), 100)
    draft[:2] = draft[[1, 3]].clone()
    part(backend.new_metadata(2), draft, range(3, 4), 0)
    part(made, target, range(LAYERS), 200)  # the next step, same objects
    return {"counts": counts, "indices": [[t.tolist() for t in ts] for ts in seen]}


def edges() -> dict[str, Any]:
    """What must not be kept, or not be mixed."""
    from vllm.forward_context import ForwardContext, override_forward_context

    backend, found = Backend("flashmla-bf16"), {}
    mixed = Backend("flashmla-mixed")

    def count(*steps: Any) -> int:
        before = len(launches)
        with override_forward_context(ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})):
            for step in steps:
                step()
        return len(launches) - before

    buffer, other = torch.zeros(TOKENS, TOPK, dtype=torch.int32), torch.zeros(TOKENS, TOPK, dtype=torch.int32)
    made, tables, requests = (backend.new_metadata(TOKENS) for _ in range(3))
    tables.req_id_per_token, requests.block_table = made.req_id_per_token, made.block_table
    attend = functools.partial(backend.attend, buffer, made)
    wrote = functools.partial(written, buffer, 1)
    found["two layers"] = count(wrote, attend, attend)
    found["not written in this pass"] = count(attend, attend)
    found["written again"] = count(wrote, attend, wrote, attend)
    found["another buffer written"] = count(wrote, attend, functools.partial(written, other, 2), attend)
    found["another buffer"] = count(wrote, functools.partial(written, other, 2), attend, functools.partial(backend.attend, other, made))
    found["another block table"] = count(wrote, attend, functools.partial(backend.attend, buffer, tables))
    found["other requests"] = count(wrote, attend, functools.partial(backend.attend, buffer, requests))
    found["without counts"] = count(wrote, attend, functools.partial(mixed.attend, buffer, mixed_metadata(mixed, made)))
    before = len(launches)
    attend()
    found["no forward pass"] = len(launches) - before
    return found


def mixed_metadata(mixed: Backend, like: Any) -> Any:
    made = mixed.new_metadata(TOKENS)
    made.block_table, made.req_id_per_token = like.block_table, like.req_id_per_token
    return made


engine = Engine([FEATURE, OTHER])


def main() -> None:
    engine.reconcile(["mtp-spec", "other"])
    import vllm.models.deepseek_v32.nvidia.attention  # noqa: F401

    stub_kernels()
    out: dict[str, Any] = {"dropped": engine.dropped}
    kinds = ("flashattn", "flashinfer", "flashmla-bf16", "flashmla-mixed", "flashmla-separate")
    results = {}
    for enabled in ([], ["mtp-spec"], ["mtp-spec", "other"]):
        engine.reconcile(enabled)
        wrapped.clear()
        results["+".join(enabled)] = {kind: run(kind) for kind in kinds}
        out[f"counts {'+'.join(enabled)}"] = {kind: r["counts"] for kind, r in results["+".join(enabled)].items()}
        out[f"wrapped {'+'.join(enabled)}"] = len(wrapped)
    first = results[""]
    out["layers"] = {kind: len(first[kind]["indices"]) for kind in kinds}
    out["distinct"] = {kind: len({json.dumps(i) for i in first[kind]["indices"]}) for kind in kinds}
    out["equal"] = {kind: all(r[kind]["indices"] == first[kind]["indices"] for r in results.values()) for kind in kinds}
    engine.reconcile(["mtp-spec"])
    before = sum(declined().get("mtp-spec", {}).values())
    out["edges"] = edges()
    out["declined"] = sum(declined().get("mtp-spec", {}).values()) - before
    out["reasons"] = sorted(declined().get("mtp-spec", {}))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
