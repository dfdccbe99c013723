"""Against vLLM 0.26.0 itself: the speculator and its draft model, and the attention backends."""

import json
from pathlib import Path
from typing import Any

import pytest

from lldecode.testing_vllm import run_vllm

pytestmark = pytest.mark.vllm


def ran(script: str, *args: str) -> dict[str, Any]:
    return json.loads(run_vllm(Path(__file__).with_name(script), *args).stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def seam(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ran("seam_speculator.py", str(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def slots() -> dict[str, Any]:
    return ran("seam_slots.py")


def test_plugin_load_initialises_and_imports_nothing(seam: dict[str, Any]) -> None:
    assert seam["imported_at_load"] == [] and not seam["cuda_at_load"]


def test_targets_are_what_the_hashes_say(seam: dict[str, Any], slots: dict[str, Any]) -> None:
    assert seam["dropped"] == slots["dropped"] == {}
    assert all(seam["replaced"].values())


def test_off_restores_the_identical_objects(seam: dict[str, Any]) -> None:
    assert all(seam["identical"].values())
    assert {"on_prefill_begin", "on_prefill_end", "on_multi_step_decode_begin", "on_multi_step_decode_end", "__getattr__"} <= set(
        seam["absent"]
    )


# By batch, the position at which the top-k of each row of step 0, of the requests' last accepted tokens, and of the padded rows was chosen.
STEP_0 = [
    [0, 1, 2, 3, 4, 0, 1, 2],
    [5, 6, 7, 8, 3, 4, 5, 6, 0, 0],
    [7, 8, 9, 10, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5],
    [8, 9, 10, 11, 0, 0, 0, 0],
]
LAST = [[4, 2], [6, 6], [7, 9, 5], [11]]


def test_later_steps_attend_to_what_step_0_chose(seam: dict[str, Any]) -> None:
    for batch, step_0, last in zip(seam["on"], STEP_0, LAST, strict=True):
        assert batch["indexer"] == [len(step_0)]
        assert batch["rows"] == [step_0, last, last]
        assert batch["tokens"] == [len(last), 3]


def test_without_sharing_each_step_chooses_anew_as_stock_does(seam: dict[str, Any]) -> None:
    assert seam["unshared"] == seam["stock"]
    for batch, step_0, last in zip(seam["stock"], STEP_0, LAST, strict=True):
        assert batch["indexer"] == [len(step_0), len(last), len(last)]
        assert batch["rows"] == [step_0, [p + 1 for p in last], [p + 2 for p in last]]
    assert seam["declined"]["mtp-spec"] == {"top-k sharing: LLDECODE_MTP_SPEC_SHARE=0": 1}


def test_later_steps_write_the_kv_cache_and_no_indexer_keys(seam: dict[str, Any]) -> None:
    assert [b["kv_grows"] for b in seam["on"]] == [True] * 4
    assert [b["keys_grow"] for b in seam["on"]] == [[False, False]] * 4
    assert all(any(b["keys_grow"]) for b in seam["stock"])


def test_stock_attention_asserts_where_ours_reuses(seam: dict[str, Any]) -> None:
    assert seam["stock_asserts"]


def test_hooks_surround_the_same_steps_in_propose_and_capture(seam: dict[str, Any]) -> None:
    begin, end = "on_prefill_begin", "on_prefill_end"
    decode_begin, decode_end = "on_multi_step_decode_begin", "on_multi_step_decode_end"
    assert seam["order_propose"] == [
        [begin, 2], "indexer", "attention", [end, 2],
        [decode_begin, 2], "attention", "attention", [decode_end, 2],
    ]  # fmt: skip
    assert seam["order_capture"] == [
        [begin, 4], ["Capturing prefill CUDA graphs", False], [end, 4],
        [decode_begin, 4], ["Capturing decode CUDA graphs", True], [decode_end, 4],
    ]  # fmt: skip
    assert seam["order_single"] == [begin, "indexer", "attention", end]


def test_a_failure_leaves_no_reuse_behind(seam: dict[str, Any]) -> None:
    assert seam["failing"]["_generate_draft"] == {"error": "step failed", "during": [True], "after": False}
    assert seam["failing"]["on_multi_step_decode_begin"] == {"error": "step failed", "during": [True], "after": False}
    assert seam["failing"]["_prefill"] == {"error": "step failed", "during": [False], "after": False}
    assert seam["failing"]["capture"] == {"error": "step failed", "during": [True], "after": False}


def test_hooks_are_the_speculators_or_the_models(seam: dict[str, Any]) -> None:
    assert seam["hooks_only"] == [["own", 2], ["model", 3]]


EXPECTED = "draft model: expected vllm.models.deepseek_v32.nvidia.mtp.DeepseekV32MTP"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("none", None),
        ("forced", None),
        ("generic", f"{EXPECTED}, got vllm.model_executor.models.deepseek_mtp.DeepSeekMTP"),
        ("subclass", f"{EXPECTED}, got other.Other"),
        ("single", "num_speculative_tokens: expected at least 2, got 1"),
        ("undeclared", "index_share_for_mtp_iteration: expected true in the draft's config, or LLDECODE_MTP_SPEC_SHARE=1, got None"),
        ("false", "index_share_for_mtp_iteration: expected true in the draft's config, or LLDECODE_MTP_SPEC_SHARE=1, got False"),
        ("switched off", "LLDECODE_MTP_SPEC_SHARE=0"),
        ("two buffers", "topk_indices_buffer: expected the attention to read the one that its indexer writes"),
    ],
)
def test_reasons_not_to_share(seam: dict[str, Any], case: str, reason: str | None) -> None:
    assert seam["refused"][case] == reason


def test_v1_runner_says_why(seam: dict[str, Any]) -> None:
    assert seam["v1"] == ["hooks and top-k sharing: model runner: expected V2, got V1"]


KINDS = ["flashattn", "flashinfer", "flashmla-bf16", "flashmla-mixed", "flashmla-separate"]


@pytest.mark.parametrize("kind", KINDS)
def test_24_layers_convert_8_times(slots: dict[str, Any], kind: str) -> None:
    """A target pass, the draft's step 0 on the target's metadata and step 1 on its own, the next target pass on the same objects."""
    assert slots["counts "][kind] == [24, 1, 1, 24]
    assert slots["counts mtp-spec"][kind] == [8, 1, 1, 8]
    assert slots["counts mtp-spec+other"][kind] == [8, 1, 1, 8]


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_attends_to_the_same_slots(slots: dict[str, Any], kind: str) -> None:
    assert slots["layers"][kind] == 50 and slots["distinct"][kind] == 18  # 8 + 1 + 1 + 8 of them differ
    assert slots["equal"][kind]


def test_what_others_put_in_the_place_of_the_kernel_runs_inside(slots: dict[str, Any]) -> None:
    assert slots["wrapped mtp-spec"] == 0 and slots["wrapped mtp-spec+other"] == len(KINDS) * (8 + 1 + 1 + 8)


@pytest.mark.parametrize(
    ("case", "conversions"),
    [
        ("two layers", 1),
        ("not written in this pass", 2),
        ("written again", 2),
        ("another buffer written", 1),
        ("another buffer", 2),
        ("another block table", 2),
        ("other requests", 2),
        ("without counts", 2),
        ("no forward pass", 1),
    ],
)
def test_what_is_kept(slots: dict[str, Any], case: str, conversions: int) -> None:
    assert slots["edges"][case] == conversions


def test_what_is_not_kept_is_declined(slots: dict[str, Any]) -> None:
    assert slots["declined"] == 3  # two calls not written in the pass, one outside of any
    assert slots["reasons"] == [
        "index conversion: expected a forward pass, got a call outside of one",
        "index conversion: no indexer of the deepseek_v32 class ran before it in the forward pass "
        "(a draft step that reuses its top-k has none)",
    ]
