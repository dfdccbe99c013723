"""The final norm's all-reduce and the draft's argmax, on two ranks of the real vLLM 0.26.0; the embedded draft's shared top-k."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lldecode import layer
from lldecode.engine import Engine
from lldecode.feature import Feature
from lldecode.testing_vllm import run_vllm
from lldecode_mtp_spec.vllm_ranks import LOCAL_ARGMAX, PATCHES, local_argmax_batch
from lldecode_mtp_spec.vllm_sharing import PATCHES as SHARING
from lldecode_mtp_spec.vllm_sharing import SHARE

wraps = {p.attr: p.wrap for p in PATCHES}


@pytest.fixture(scope="module")
def ranks() -> dict[str, Any]:
    """What ``ranks.py`` saw on the first rank, and whether the second saw the same."""
    done = run_vllm(Path(__file__).with_name("ranks.py"), cc="9.0")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.vllm
def test_targets_are_what_the_hashes_say_and_on_replaces_them(ranks: dict[str, Any]) -> None:
    assert ranks["imported_at_load"] == [] and ranks["dropped"] == {} and ranks["replaced"]


@pytest.mark.vllm
def test_off_restores_the_identical_functions(ranks: dict[str, Any]) -> None:
    assert ranks["identical"]


@pytest.mark.vllm
def test_block_output_is_reduced_exactly_once(ranks: dict[str, Any]) -> None:
    assert ranks["collectives_on"] == ranks["collectives_off"] == ["all_reduce"] and ranks["equal"]


@pytest.mark.vllm
def test_sequence_parallel_rows_are_gathered_and_not_reduced(ranks: dict[str, Any]) -> None:
    assert ranks["sequence_parallel_on"] == ranks["sequence_parallel_off"] == ["all_gather"] and ranks["sequence_parallel_equal"]


@pytest.mark.vllm
def test_batch_beyond_the_workspace_is_unfused_in_both_modules(ranks: dict[str, Any]) -> None:
    assert ranks["paths_off"] == [["fused", "fused"]] * 6  # stock vLLM would overflow it
    assert ranks["paths_on"] == [["fused", "fused"]] * 4 + [["unfused", "unfused"]] * 2
    reason = "all-reduce + norm: FlashInfer's workspace is too small for the batch, of hidden size 64"  # one, whatever the batch
    assert ranks["declined"] == {"mtp-spec": {reason: 4}}


@pytest.mark.vllm
def test_ranks_decide_and_compute_the_same(ranks: dict[str, Any]) -> None:
    assert ranks["ranks_agree"]


@pytest.mark.vllm
def test_top_tokens_are_the_argmax_of_the_whole_vocabulary(ranks: dict[str, Any]) -> None:
    assert len(ranks["argmax"]) == 15
    assert {name: [ours, stock] for name, (ours, stock, _) in ranks["argmax"].items()} == {
        name: [expected, expected] for name, (_, _, expected) in ranks["argmax"].items()
    }


@pytest.mark.vllm
def test_speculator_takes_the_local_argmax_from_the_limit_on(ranks: dict[str, Any]) -> None:
    assert ranks["greedy_on"] == ["tokens", "logits", "tokens"]


@pytest.mark.parametrize(("text", "smallest"), [(None, 64), ("", 64), ("0", 0), (" 16 ", 16)])
def test_limit_of_the_local_argmax(monkeypatch: pytest.MonkeyPatch, text: str | None, smallest: int) -> None:
    monkeypatch.delenv(LOCAL_ARGMAX, raising=False)
    if text is not None:
        monkeypatch.setenv(LOCAL_ARGMAX, text)
    assert local_argmax_batch() == smallest


@pytest.mark.parametrize("text", ["-1", "all", "1.5"])
def test_bad_limit_is_refused_when_the_feature_is_applied(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(LOCAL_ARGMAX, text)
    with pytest.raises(ValueError, match=f"{LOCAL_ARGMAX}: expected a batch size, or 0 for never, got '{text}'"):
        wraps["DraftModelSpeculator._greedy_sample_draft"](None)


@pytest.mark.parametrize(
    ("limit", "batch", "ours", "expected"),
    [("0", 1, True, "stock"), ("0", 0, True, "stock"), ("4", 4, True, "local"), ("4", 3, True, "stock"), ("4", 4, False, "stock")],
)
def test_only_large_batches_of_our_model_take_the_local_argmax(
    monkeypatch: pytest.MonkeyPatch, limit: str, batch: int, ours: bool, expected: str
) -> None:
    monkeypatch.setenv(LOCAL_ARGMAX, limit)
    get_top_tokens: Callable[..., Any] = wraps["DeepseekV32MTP.get_top_tokens"](None)
    model = type("Model", (), {"get_top_tokens": get_top_tokens if ours else lambda self, h: "other"})()
    head = SimpleNamespace(shared_head=SimpleNamespace(head="head"))
    processor = SimpleNamespace(get_top_tokens=lambda lm_head, h: "local" if lm_head == "head" else None)
    model.model = SimpleNamespace(layers={"61": head}, mtp_start_layer_idx=61, num_mtp_layers=1, logits_processor=processor)
    sample = wraps["DraftModelSpeculator._greedy_sample_draft"](lambda self, h: "stock")
    assert sample(SimpleNamespace(model=model), torch.zeros(batch, 8)) == expected


@pytest.mark.parametrize(
    ("dims", "share", "computed"),
    [(layer.GLM52, None, 1), (layer.GLM52, "0", 3), (layer.GLM52, "yes", 3), (layer.DSV32, None, 3), (layer.DSV32, "1", 1)],
    ids=lambda x: getattr(x, "name", x),
)
def test_embedded_draft_computes_its_top_k_once(
    monkeypatch: pytest.MonkeyPatch, dims: layer.Dims, share: str | None, computed: int
) -> None:
    monkeypatch.delenv(SHARE, raising=False)
    if share is not None:
        monkeypatch.setenv(SHARE, share)
    _, state = layer.build(dims.scaled(), 2, 300, "cpu", spec=3)  # more context than the top-k holds
    mtp, states = layer.build_draft(dims.scaled(), state, 3)
    read: list[torch.Tensor] = []
    states = [dataclasses.replace(s, on_topk=lambda indices: read.append(indices.clone())) for s in states]
    calls: list[int] = []
    indexer, stock_fn = layer.sparse_attn_indexer, layer.multi_step_decode
    monkeypatch.setattr(layer, "sparse_attn_indexer", lambda *a: (calls.append(1), indexer(*a))[1])
    engine = Engine([Feature("sharing", "test", SHARING)], host="lldecode")
    stock = layer.propose(mtp, states, state.hidden)
    assert len(calls) == 3 and not torch.equal(read[0], read[1])
    read.clear()
    calls.clear()
    try:
        engine.reconcile(["sharing"])
        assert layer.multi_step_decode is not stock_fn
        shared = layer.propose(mtp, states, state.hidden)
    finally:
        engine.reconcile([])
    assert layer.multi_step_decode is stock_fn
    assert len(calls) == computed and len(read) == 3
    assert all(torch.equal(r, read[0]) for r in read) == (computed == 1)
    assert torch.equal(shared[0].logits, stock[0].logits)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(shared, stock, strict=True)) == (computed == 3)
