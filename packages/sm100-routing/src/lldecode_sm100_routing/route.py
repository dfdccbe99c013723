"""The decision, from plain facts: which configurations get the optimized class, and why the others do not.

Imports neither vLLM nor torch.
"""

import dataclasses
from collections.abc import Iterable, Iterator

ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
PROVEN = ((10, 0), (10, 3))
ON_REQUEST = ((9, 0),)
"""Capabilities on which the class runs and is no gain: only where the user asks for it."""

_GENERIC = "vllm.model_executor.models.deepseek_v2:"
_GENERIC_MTP = "vllm.model_executor.models.deepseek_mtp:"
_MTP = "DeepSeekMTPModel"

# Sparse MLA backends that serve the class with each KV cache dtype, by major capability.
_BACKENDS: dict[int, dict[str, tuple[str, ...]]] = {
    9: {"fp8": ("FLASHMLA_SPARSE",), "fp8_ds_mla": ("FLASHMLA_SPARSE",)},
    10: {
        "fp8": ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE"),
        "fp8_e4m3": ("FLASHINFER_MLA_SPARSE",),
        "fp8_ds_mla": ("FLASHMLA_SPARSE",),
    },
}
_LATENT = (512, 64, 128)
_BLOCK = 64

# KV connectors whose per-layer calls do nothing in 0.26.0: the class does not make those calls.
_LOCAL_CONNECTORS = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
_PEER_CONNECTORS = frozenset(
    {
        "HF3FSKVConnector",
        "LMCacheMPConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
    }
)


@dataclasses.dataclass(frozen=True)
class Draft:
    """The draft side of a speculative configuration.

    Attributes:
        method: ``speculative_config.method``.
        architectures: of the draft model; empty where there is no draft model.
        implementation: ``"module:Class"`` that vLLM's registry holds for the MTP architecture.
        index_topk: as the draft's checkpoint has it, else None.
        kv_cache_dtype: set for the draft alone, else None.
        backend: attention backend set for the draft alone, else None.
    """

    method: str = "mtp"
    architectures: tuple[str, ...] = (_MTP,)
    implementation: str = f"{_GENERIC_MTP}DeepSeekMTP"
    index_topk: int | None = 2048
    kv_cache_dtype: str | None = None
    backend: str | None = None


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the decision depends on, as the user left it. The defaults are a plain GLM-5.2 on a B200.

    Attributes:
        capability: compute capability, None where the platform is not CUDA.
        implementation: ``"module:Class"`` that vLLM's registry holds for the architecture.
        latent: (kv_lora_rank, qk_rope_head_dim, index_head_dim), in elements.
        overridden: architectures in the user's ``model_class_overrides``.
        kv_cache_dtype: as given to ``--kv-cache-dtype``, or as the checkpoint demands.
        block_size: tokens a KV block, None unless the user set it.
        connectors: names of KV connectors, a MultiConnector's children in its place.
        breakable: ``VLLM_USE_BREAKABLE_CUDAGRAPH`` as the user set it, else None.
        bound_early: the class was imported here with the breakable switch off, which it reads only then.
        v2: ``VLLM_USE_V2_MODEL_RUNNER`` as the user set it, else None.
        v2_unsupported: what of this configuration the V2 runner does not support.
        draft: None without speculation.
    """

    arch: str = "GlmMoeDsaForCausalLM"
    capability: tuple[int, int] | None = (10, 0)
    implementation: str = f"{_GENERIC}GlmMoeDsaForCausalLM"
    runner_type: str = "generate"
    convert_type: str = "none"
    dtype: str = "bfloat16"
    index_topk: int | None = 2048
    q_lora_rank: int | None = 2048
    latent: tuple[int | None, ...] = _LATENT
    overridden: frozenset[str] = frozenset()
    lora: bool = False
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    kv_cache_dtype: str = "auto"
    calculate_kv_scales: bool = False
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    block_size: int | None = None
    connectors: tuple[str, ...] = ()
    backend: str | None = None
    backend_per_kind: bool = False
    fp4_indexer_cache: bool = False
    enforce_eager: bool = False
    compile_mode: str | None = None
    sequence_parallel: bool = False
    breakable: str | None = None
    bound_early: bool = False
    v2: bool | None = None
    v2_unsupported: tuple[str, ...] = ()
    draft: Draft | None = None


@dataclasses.dataclass(frozen=True)
class Route:
    """The optimized class, and what goes with it.

    Attributes:
        kv_cache_dtype: of the KV cache.
        breakable: the breakable CUDA graph switch is needed; not where everything runs eagerly.
        draft: the MTP draft gets its optimized class too.
    """

    kv_cache_dtype: str
    breakable: bool
    draft: bool


def unproven(capabilities: Iterable[tuple[int, int]], required: bool) -> str | None:
    """Why the class is not used on these GPUs, or None.

    Args:
        capabilities: of every visible GPU.
        required: the user asked for the feature by name.
    """
    seen = set(capabilities)
    if not seen:
        return "no CUDA device"
    refused = seen.difference(PROVEN, ON_REQUEST if required else ())
    if not refused:
        return None
    if refused <= set(ON_REQUEST):
        return f"capability {_dotted(refused)}: the class was slower at batch 16 and little faster below; only the flag's value on has it"
    return f"capability: expected {_dotted(PROVEN)}, or {_dotted(ON_REQUEST)} on demand, got {_dotted(refused)}"


def decide(facts: Facts) -> Route | str:
    """The route, or the reason for the generic class. The flag's part, 9.0 only on demand, is :func:`unproven`."""
    reason = next(_reasons(facts), None)
    if reason:
        return reason
    return Route(_kv(facts), breakable=not facts.enforce_eager, draft=facts.draft is not None)


def _kv(f: Facts) -> str:
    return "fp8" if f.kv_cache_dtype == "auto" else f.kv_cache_dtype


def _reasons(f: Facts) -> Iterator[str]:
    if f.capability is None:
        yield "the platform is not CUDA"
        return
    if f.capability not in PROVEN + ON_REQUEST:
        yield f"capability: expected {_dotted(PROVEN + ON_REQUEST)}, got {_dotted([f.capability])}"
        return
    yield from _model(f)
    yield from _parallel(f)
    yield from _kv_cache(f, _BACKENDS[f.capability[0]])
    yield from _runner(f)
    if f.draft:
        yield from _draft(f, f.draft, _BACKENDS[f.capability[0]])


def _model(f: Facts) -> Iterator[str]:
    if f.overridden & {f.arch, _MTP}:
        yield f"model_class_overrides set for {', '.join(sorted(f.overridden))}"
    if not f.implementation.startswith(_GENERIC):
        yield f"{f.arch} is registered as {f.implementation}"
    if (f.runner_type, f.convert_type) != ("generate", "none"):
        yield f"runner: expected generate, got {f.runner_type} with convert {f.convert_type}"
    if f.index_topk is None:
        yield "the checkpoint has no index_topk"
    if f.q_lora_rank is None or f.latent != _LATENT:
        yield f"kv_lora_rank, qk_rope_head_dim, index_head_dim: expected {_LATENT} and a q_lora_rank, got {f.latent}, {f.q_lora_rank}"
    if f.dtype != "bfloat16":
        yield f"dtype: expected bfloat16, got {f.dtype}"
    if f.lora:
        yield "LoRA"


def _parallel(f: Facts) -> Iterator[str]:
    if f.decode_context_parallel > 1:
        yield f"decode context parallelism: expected 1, got {f.decode_context_parallel}"
    if f.prefill_context_parallel > 1:
        yield f"prefill context parallelism: expected 1, got {f.prefill_context_parallel}"
    if f.pipeline_parallel > 1:
        yield f"pipeline parallelism: expected 1, got {f.pipeline_parallel}"
    if f.sequence_parallel:
        yield "sequence parallelism or async TP"


def _kv_cache(f: Facts, backends: dict[str, tuple[str, ...]]) -> Iterator[str]:
    if _kv(f) not in backends:
        yield f"kv_cache_dtype: expected auto or {', '.join(backends)}, got {f.kv_cache_dtype}"
        return
    if f.backend is not None and f.backend not in backends[_kv(f)]:
        yield f"attention backend: expected {' or '.join(backends[_kv(f)])} with {_kv(f)}, got {f.backend}"
    if f.backend_per_kind:
        yield "an attention backend for each kind of KV cache"
    if f.calculate_kv_scales:
        yield "calculate_kv_scales"
    if f.kv_cache_dtype_skip_layers:
        yield f"kv_cache_dtype_skip_layers: expected none, got {', '.join(f.kv_cache_dtype_skip_layers)}"
    if f.block_size is not None and f.block_size % _BLOCK:
        yield f"block_size: expected a multiple of {_BLOCK}, got {f.block_size}"
    if f.fp4_indexer_cache:
        yield "fp4 indexer cache"
    if layerwise := sorted(set(f.connectors) - _LOCAL_CONNECTORS - _PEER_CONNECTORS):
        yield f"KV connector that may move each layer by itself: {', '.join(layerwise)}"
    # a peer that is not routed, or not patched, would read and write a bf16 cache
    if f.kv_cache_dtype == "auto" and (peers := sorted(_PEER_CONNECTORS.intersection(f.connectors))):
        yield f"kv_cache_dtype: expected an explicit one, the same on every peer, with {', '.join(peers)}, got auto"


def _runner(f: Facts) -> Iterator[str]:
    if f.v2 is False:
        yield "VLLM_USE_V2_MODEL_RUNNER=0"
    if f.v2_unsupported:
        yield f"V2 model runner: unsupported: {', '.join(f.v2_unsupported)}"
    if f.enforce_eager:
        return
    if f.compile_mode not in (None, "NONE"):
        yield f"compilation mode: expected unset or NONE, as the class is not compiled, got {f.compile_mode}"
    if f.breakable not in (None, "1"):
        yield f"VLLM_USE_BREAKABLE_CUDAGRAPH={f.breakable}"
    if f.bound_early:
        yield "vllm.models.deepseek_v32 was imported before its breakable CUDA graph switch could be set"


def _draft(f: Facts, d: Draft, backends: dict[str, tuple[str, ...]]) -> Iterator[str]:
    if d.method != "mtp":
        yield f"speculative method: expected mtp, got {d.method}"
        return
    if _MTP not in d.architectures or not d.implementation.startswith(_GENERIC_MTP):
        yield f"MTP draft: expected {_MTP}, got {', '.join(d.architectures)} registered as {d.implementation}"
    if d.index_topk is None:
        yield "the draft's checkpoint has no index_topk"
    if d.kv_cache_dtype is not None:
        expected = [dtype for dtype, served_by in backends.items() if f.backend is None or f.backend in served_by]
        if d.kv_cache_dtype not in expected:
            yield f"draft kv_cache_dtype: expected {' or '.join(expected)}, got {d.kv_cache_dtype}"
    if d.backend is not None:
        yield f"draft attention backend {d.backend}: the V2 model runner takes none for MTP"


def _dotted(capabilities: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in sorted(capabilities))
