"""What bench/bench.py expects, and that each of its checks can fail."""

import copy
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("mtp_spec_bench", Path(__file__).parents[1] / "bench" / "bench.py")
assert _spec and _spec.loader
bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)

GLM = {"num_hidden_layers": 24, "index_topk_freq": 4, "index_skip_topk_offset": 3, "num_nextn_predict_layers": 1}


@pytest.mark.parametrize(
    ("variant", "indexers", "conversions"),
    [("nospec", 8, 24), ("off", 11, 27), ("unshared", 11, 11), ("on", 9, 11)],
)
def test_expected_of_the_slice(variant: str, indexers: int, conversions: int) -> None:
    want = {"indexer logits": indexers, "indexer top-k": indexers, "conversion": conversions}
    assert bench.expected(GLM, variant, 3) == want


def test_an_indexer_in_every_layer_and_by_pattern() -> None:
    assert bench.own_indexers({"num_hidden_layers": 5}) == 5
    assert bench.own_indexers({"num_hidden_layers": 5, "index_topk_pattern": "FSS"}) == 3


def test_launches_are_counted_by_kernel() -> None:
    kernels = {
        "void deep_gemm::sm90_fp8_paged_mqa_logits<64>(int)": (18, 1.0),
        "void deep_gemm::sched::smxx_paged_mqa_logits_metadata<32>(int)": (8, 1.0),
        "void vllm::cooperative::cooperative_topk_cs8<2048u>(int)": (16, 1.0),
        "void vllm::persistent::persistent_topk_kernel<2048, 1>(int)": (2, 1.0),
        "_convert_req_index_to_global_index_kernel": (22, 1.0),
    }
    assert bench.launches(kernels, 2) == {"indexer logits": 9, "indexer top-k": 9, "conversion": 11}


def test_z_score() -> None:
    rng = random.Random(0)
    a, b = ([rng.choice([0, 3, 3, 3]) for _ in range(1000)] for _ in range(2))
    assert abs(bench.z_score(a, b)) < 3 < abs(bench.z_score(a, [x - (i % 3 == 0) for i, x in enumerate(b)]))
    assert bench.z_score([1, 1], [1, 1]) == 0 and bench.z_score([1, 1], [2, 2]) == float("inf")


def outcome(variant: str) -> dict[str, Any]:
    tokens = {"tokens": [5, 6], "logprobs": [-1.0, -1.0], "margins": [1.0, 1.0]}
    out: dict[str, Any] = {
        "errors": {},
        "state": {"applied": sorted(bench.VARIANTS[variant][0])},
        "cases": {"B=1 ctx=4096": {"launches": bench.expected(GLM, variant, 3)}},
        "tokens": {"batches": {"1": {"prompts": [tokens]}}},
    }
    if variant != "nospec":
        out["acceptance"] = {"accepted": [3, 3, 2, 1] * 250, "control": [0] * 100, "tokens_ok": True}
    return out


def failing(change: Callable[[dict[str, Any]], object]) -> list[str]:
    outcomes = {name: copy.deepcopy(outcome(name)) for name in bench.VARIANTS}
    change(outcomes)
    specs = [SimpleNamespace(variant=name, mtp=0 if name == "nospec" else 3) for name in bench.VARIANTS]
    return [name for name, ok, _ in bench.checks(outcomes, GLM, specs) if not ok]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda o: None, []),
        (lambda o: o["on"]["errors"].update(worker="died"), ["on worker"]),
        (lambda o: o["off"]["state"].update(applied=["mtp-spec"]), ["off features"]),
        (lambda o: o["on"]["cases"]["B=1 ctx=4096"]["launches"].update(conversion=11.5), ["on B=1 ctx=4096 conversion"]),
        (lambda o: o["on"]["tokens"]["batches"]["1"]["prompts"][0].update(tokens=[5, 7]), ["on B=1 tokens of nospec"]),
        (lambda o: o["on"]["acceptance"].update(control=[2] * 100), ["on acceptance needs the top-k"]),
        (lambda o: o["on"]["acceptance"].update(tokens_ok=False), ["on constructed tokens"]),
        (lambda o: o["on"]["acceptance"].update(accepted=[3, 3, 1, 1] * 250), ["on acceptance as off"]),
        (lambda o: o["on"]["acceptance"].update(accepted=[3, 3, 2, 1] * 100), ["on acceptance"]),
    ],
)
def test_each_check_can_fail(change: Callable[[dict[str, Any]], object], names: list[str]) -> None:
    assert failing(change) == names


def test_each_prompt_is_decoded_in_batches_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    runner_up = {2: SimpleNamespace(logprob=-3.0)}

    class Llm:
        def generate(self, prompts: list[dict[str, list[int]]], *_: object, **__: object) -> list[Any]:
            asked.append([p["prompt_token_ids"][0] for p in prompts])
            return [
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1], logprobs=[{1: SimpleNamespace(logprob=-1.0)} | runner_up])])
                for _ in prompts
            ]

        def collective_rpc(self, name: str) -> None:
            asked.append(name)

        def reset_prefix_cache(self) -> None: ...

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    found = bench.greedy(Llm(), SimpleNamespace(tokens=1, batches=[1, 4]), [[i] for i in range(4)])  # type: ignore[arg-type]
    assert asked == ["lldecode_spread_both", [0], [0, 1, 2, 3], [0, 1], [2, 3], [1], [2], [3]]
    assert sorted(found["again"]) == ["0", "1", "2", "3"] and len(found["batches"]["4"]["prompts"]) == 4
    assert [len(found["again"][i]) for i in "0123"] == [1, 2, 2, 2]
    assert [run["margins"] for run in found["again"]["3"]] == [[2.0]] * 2
