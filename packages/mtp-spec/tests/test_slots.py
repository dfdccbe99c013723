"""Kept index conversions without vLLM: the embedded layer, and what the adapter refuses; the probe."""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lldecode import layer
from lldecode.engine import Engine
from lldecode.feature import ABSENT, Context, Feature, Patch, declined
from lldecode_mtp_spec import vllm_slots
from lldecode_mtp_spec.vllm import FEATURE
from lldecode_mtp_spec.vllm_hooks import HOOKS

calls: list[str] = []


def counting(name: str) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return counted

    return wrap


NAMES = ("triton_convert_req_index_to_global_index", "sparse_attn_indexer")
COUNT = Feature("count", "test", tuple(Patch(f"lldecode.layer:{n}", counting(n), "test", "never", order=-2) for n in NAMES))


@pytest.fixture
def step() -> Any:
    """Runs one step of 6 GLM-5.2 layers, 2 of them with an indexer, with `enabled` features; (outputs, conversions)."""
    engine = Engine([FEATURE, COUNT], host="lldecode")
    dims = layer.GLM52.scaled()

    def run(*enabled: str, on_topk: Callable[[torch.Tensor], None] | None = None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        layers, state = layer.build(dims, 2, 70, "cpu", layers=6)
        if on_topk is not None:
            state = dataclasses.replace(state, on_topk=on_topk)
        calls.clear()
        try:
            engine.reconcile(["count", *enabled])
            outs = layer.step(layers, state)
            return [o.hidden for o in outs], calls.count(NAMES[0])
        finally:
            engine.reconcile([])

    return run


def test_embedded_layers_convert_once_an_indexer(step: Any) -> None:
    stock = layer.step
    off, of_stock = step()
    on, of_ours = step("mtp-spec")
    assert (of_stock, of_ours) == (6, 2)
    assert all(torch.equal(a, b) for a, b in zip(off, on, strict=True))
    assert layer.step is stock and vllm_slots._of_layer_step() is None


def test_a_selection_replaced_between_layers_is_converted(step: Any) -> None:
    def replaced() -> Callable[[torch.Tensor], None]:
        serial = iter(range(6))
        return lambda indices: indices.copy_((indices + next(serial)) % 70)

    off, of_stock = step(on_topk=replaced())
    on, of_ours = step("mtp-spec", on_topk=replaced())
    assert of_stock == of_ours == 6
    assert all(torch.equal(a, b) for a, b in zip(off, on, strict=True))


def test_a_failed_step_leaves_nothing() -> None:
    def fail(layers: Any, state: Any) -> None:
        assert vllm_slots._of_layer_step() == {}
        raise RuntimeError("step failed")

    state = layer.build(layer.GLM52.scaled(), 1, 8, "cpu", layers=1)[1]
    with pytest.raises(RuntimeError, match="step failed"):
        vllm_slots._layer_step(fail)([], state)
    assert vllm_slots._of_layer_step() is None


def test_large_batches_are_not_kept() -> None:
    kept: vllm_slots.Kept = {}
    converted = []

    def original(req_id: torch.Tensor, *_: Any, **__: Any) -> int:
        converted.append(len(req_id))
        return len(converted)

    convert = vllm_slots._convert(original, lambda: kept)
    before = sum(declined().get("mtp-spec", {}).values())
    for tokens in (vllm_slots.MAX_TOKENS, vllm_slots.MAX_TOKENS + 1):
        buffer = torch.zeros(tokens, 4, dtype=torch.int32)
        kept[vllm_slots._address(buffer)] = {}
        args = torch.zeros(tokens, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), buffer
        assert convert(*args, BLOCK_SIZE=64) == convert(*args, BLOCK_SIZE=64) or tokens > vllm_slots.MAX_TOKENS
    assert converted == [vllm_slots.MAX_TOKENS, vllm_slots.MAX_TOKENS + 1, vllm_slots.MAX_TOKENS + 1]
    assert sum(declined()["mtp-spec"].values()) == before + 2


def test_arguments_stay_alive_with_what_is_kept() -> None:
    """Else a new tensor at a freed one's address would get its result."""
    kept: vllm_slots.Kept = {}
    buffer, table = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(1, 64, dtype=torch.int32)
    kept[vllm_slots._address(buffer)] = {}
    alive = weakref.ref(table)
    vllm_slots._convert(lambda *_, **__: None, lambda: kept)(torch.zeros(2, dtype=torch.int32), table, buffer)
    del table
    assert alive() is not None
    kept.clear()
    assert alive() is None


def test_another_view_of_the_same_memory_is_another_argument() -> None:
    buffer, table = torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int32)
    kept: vllm_slots.Kept = {vllm_slots._address(buffer): {}}
    convert = vllm_slots._convert(lambda *args, **_: args, lambda: kept)
    requests = torch.zeros(4, dtype=torch.int32)
    views = [table, table[:2], table.T, table.view(torch.float32)]  # shape, stride and type
    for _ in range(2):
        assert all(convert(requests, view, buffer)[1] is view for view in views)
    assert len(kept[vllm_slots._address(buffer)]) == len(views)
    assert convert(requests[:2], table, buffer[:2])[2].shape == (2, 4)


@pytest.mark.parametrize(
    ("capabilities", "reason"),
    [
        ([], "no CUDA device"),
        ([(9, 0)], None),
        ([(10, 0), (10, 3)], "capability 10.0, 10.3: compiled for it, but not run on it yet"),
        ([(8, 0)], "got 8.0"),
        ([(9, 0), (12, 0)], "got 12.0"),
    ],
)
def test_probe(capabilities: list[tuple[int, int]], reason: str | None) -> None:
    got = FEATURE.probe(Context(tuple(capabilities)))
    assert got is None if reason is None else reason in str(got)
    assert FEATURE.probe(Context(((10, 0), (10, 3)), required=True)) is None


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        *(("SHARE", value, None) for value in ("", "0", "1")),
        ("SHARE", "on", "expected 0 or 1, got 'on'"),
        *(("LOCAL_ARGMAX", value, None) for value in ("", "0", "16")),
        ("LOCAL_ARGMAX", "on", "expected a batch size, or 0 for never, got 'on'"),
    ],
)
def test_probe_reads_the_options(monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str | None) -> None:
    """A bad one is told whatever the GPU, so that ``lldecode doctor`` shows it on any machine."""
    monkeypatch.setenv(f"LLDECODE_MTP_SPEC_{name}", value)
    for capabilities in ((9, 0),), ():
        got = FEATURE.probe(Context(capabilities))
        assert got == ((None if capabilities else "no CUDA device") if reason is None else f"LLDECODE_MTP_SPEC_{name}: {reason}")


def test_stands_down_where_vllm_has_the_hooks() -> None:
    expects = {p.target.split(".")[-1]: p.expects for p in FEATURE.patches}
    assert all(expects[name] == {ABSENT} for name in HOOKS)


def test_off_until_it_has_run() -> None:
    assert FEATURE.default == "off"
