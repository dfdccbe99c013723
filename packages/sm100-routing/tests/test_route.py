from dataclasses import replace

import pytest

from lldecode.feature import Context
from lldecode_sm100_routing.route import Draft, Facts, Route, decide, unproven
from lldecode_sm100_routing.vllm import FEATURE


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
@pytest.mark.parametrize("arch", ["GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM"])
@pytest.mark.parametrize("draft", [None, Draft()])
def test_plain_configuration_is_routed(capability, arch, draft):
    assert decide(Facts(capability=capability, arch=arch, draft=draft)) == Route("fp8", breakable=True, draft=draft is not None)


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (11, 0), (12, 0), (12, 1)])
def test_other_platform_is_generic(capability):
    assert "CUDA" in decide(Facts(capability=capability)) or "capability" in decide(Facts(capability=capability))


@pytest.mark.parametrize(
    ("capability", "dtype", "backend"),
    [
        ((9, 0), "fp8", None),
        ((9, 0), "fp8", "FLASHMLA_SPARSE"),
        ((9, 0), "fp8_ds_mla", None),
        ((10, 0), "fp8", "FLASHINFER_MLA_SPARSE"),
        ((10, 0), "fp8", "FLASHMLA_SPARSE"),
        ((10, 0), "fp8_e4m3", "FLASHINFER_MLA_SPARSE"),
        ((10, 3), "fp8_ds_mla", "FLASHMLA_SPARSE"),
    ],
)
def test_usable_choice_is_kept(capability, dtype, backend):
    assert decide(Facts(capability=capability, kv_cache_dtype=dtype, backend=backend)) == Route(dtype, breakable=True, draft=False)


@pytest.mark.parametrize(
    ("capability", "dtype", "backend"),
    [
        ((9, 0), "bfloat16", None),
        ((9, 0), "fp8_e4m3", None),
        ((9, 0), "auto", "FLASH_ATTN_MLA_SPARSE"),
        ((9, 0), "fp8", "FLASHINFER_MLA_SPARSE"),
        ((10, 0), "bfloat16", None),
        ((10, 0), "fp8_e5m2", None),
        ((10, 0), "fp8_ds_mla", "FLASHINFER_MLA_SPARSE"),
        ((10, 0), "fp8_e4m3", "FLASHMLA_SPARSE"),
    ],
)
def test_unusable_kv_dtype_or_backend_is_generic(capability, dtype, backend):
    reason = decide(Facts(capability=capability, kv_cache_dtype=dtype, backend=backend))
    assert isinstance(reason, str)
    assert reason.startswith("attention backend: expected " if backend else "kv_cache_dtype: expected ")
    assert reason.endswith(f"got {backend or dtype}")


GENERIC = {
    "overridden": ({"overridden": frozenset({"GlmMoeDsaForCausalLM"})}, "model_class_overrides"),
    "mtp overridden": ({"overridden": frozenset({"DeepSeekMTPModel"})}, "model_class_overrides"),
    "registered elsewhere": ({"implementation": "vllm.models.deepseek_v32:X"}, "registered as vllm.models.deepseek_v32:X"),
    "pooling": ({"runner_type": "pooling"}, "runner"),
    "converted": ({"convert_type": "embed"}, "runner"),
    "dense attention": ({"index_topk": None}, "index_topk"),
    "no q lora": ({"q_lora_rank": None}, "q_lora_rank"),
    "other head size": ({"latent": (256, 64, 128)}, "(256, 64, 128)"),
    "float16": ({"dtype": "float16"}, "dtype: expected bfloat16, got float16"),
    "lora": ({"lora": True}, "LoRA"),
    "dcp": ({"decode_context_parallel": 2}, "decode context"),
    "pcp": ({"prefill_context_parallel": 2}, "prefill context"),
    "pp": ({"pipeline_parallel": 2}, "pipeline"),
    "sp": ({"sequence_parallel": True}, "sequence parallelism"),
    "backend per kind": ({"backend_per_kind": True}, "each kind"),
    "calculated scales": ({"calculate_kv_scales": True}, "calculate_kv_scales"),
    "skipped layers": ({"kv_cache_dtype_skip_layers": ("0",)}, "kv_cache_dtype_skip_layers"),
    "block size": ({"block_size": 32}, "block_size: expected a multiple of 64, got 32"),
    "fp4 indexer": ({"fp4_indexer_cache": True}, "fp4"),
    "layer-wise connector": ({"connectors": ("ExampleConnector",), "kv_cache_dtype": "fp8"}, "ExampleConnector"),
    "one layer-wise child": ({"connectors": ("OffloadingConnector", "LMCacheConnectorV1")}, "LMCacheConnectorV1"),
    "connector of the user's": ({"connectors": ("mine.NixlConnector",), "kv_cache_dtype": "fp8"}, "mine.NixlConnector"),
    "peer without a dtype": ({"connectors": ("NixlConnector",)}, "the same on every peer"),
    "V1": ({"v2": False}, "VLLM_USE_V2_MODEL_RUNNER=0"),
    "not on V2": ({"v2_unsupported": ("dual batch overlap",)}, "dual batch overlap"),
    "compiled": ({"compile_mode": "VLLM_COMPILE"}, "compilation mode"),
    "not breakable": ({"breakable": "0"}, "VLLM_USE_BREAKABLE_CUDAGRAPH=0"),
    "bound early": ({"bound_early": True}, "imported before"),
    "ngram": ({"draft": Draft(method="ngram", architectures=())}, "speculative method: expected mtp, got ngram"),
    "other draft": ({"draft": Draft(architectures=("Qwen3NextMTP",))}, "got Qwen3NextMTP"),
    "mtp registered elsewhere": ({"draft": Draft(implementation="mine:MTP")}, "mine:MTP"),
    "dense draft": ({"draft": Draft(index_topk=None)}, "draft's checkpoint"),
    "bf16 draft": ({"draft": Draft(kv_cache_dtype="bfloat16")}, "draft kv_cache_dtype"),
    "draft dtype against the backend": (
        {"backend": "FLASHMLA_SPARSE", "draft": Draft(kv_cache_dtype="fp8_e4m3")},
        "draft kv_cache_dtype: expected fp8 or fp8_ds_mla",
    ),
    "draft backend": ({"draft": Draft(backend="FLASHMLA_SPARSE")}, "draft attention backend"),
}


@pytest.mark.parametrize("case", GENERIC)
def test_generic_with_the_reason(case):
    changes, reason = GENERIC[case]
    assert reason in decide(replace(Facts(), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"overridden": frozenset({"LlamaForCausalLM"})},
        {"block_size": 128},
        {"connectors": ("OffloadingConnector",)},
        {"connectors": ("NixlConnector", "OffloadingConnector"), "kv_cache_dtype": "fp8"},
        {"v2": True},
        {"compile_mode": "NONE"},
        {"breakable": "1"},
        {"draft": Draft(kv_cache_dtype="fp8")},
    ],
    ids=str,
)
def test_choice_that_the_class_can_honour_is_routed(changes):
    assert isinstance(decide(replace(Facts(), **changes)), Route)


@pytest.mark.parametrize("changes", [{}, {"breakable": "0"}, {"bound_early": True}, {"compile_mode": "VLLM_COMPILE"}], ids=str)
def test_eager_needs_no_breakable_switch(changes):
    assert decide(Facts(enforce_eager=True, **changes)) == Route("fp8", breakable=False, draft=False)


@pytest.mark.parametrize(
    ("capabilities", "required", "reason"),
    [
        ([(10, 0)] * 8, False, None),
        ([(10, 3)], False, None),
        ([(9, 0)] * 8, True, None),
        ([(9, 0)] * 8, False, "slower"),
        ([(10, 0), (9, 0)], False, "slower"),
        ([(10, 0), (12, 0)], True, "got 12.0"),
        ([(12, 1)], True, "expected 10.0, 10.3, or 9.0 on demand, got 12.1"),
        ([(11, 0)], False, "got 11.0"),
        ([(8, 0)], False, "got 8.0"),
        ([(8, 9)], True, "got 8.9"),
        ([], True, "no CUDA device"),
    ],
)
def test_probe_takes_hopper_only_on_demand(capabilities, required, reason):
    found = FEATURE.probe(Context(tuple(capabilities), required=required))
    assert found == unproven(capabilities, required)
    assert (found is None) if reason is None else (reason in found)
