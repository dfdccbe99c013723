"""On a GPU: the kernels against the reference, and that programmatic dependent launch changes no bit."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lldecode.testing import assert_close_to_oracle, graph_replay, opcheck, poison
from lldecode_pdl import op, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() not in op.ARCHS, reason="needs a GPU of a proven architecture"
    ),
]

WRITTEN = ("q_out", "topk_indices", "indexer_k_cache", "mla_kv_cache")
SLEEP_NS = 300_000


def slots_of(tokens: int) -> list[int]:
    """Distinct, in no order, every fifth one padding or past the cache."""
    return [(-1, 128 + t)[t % 2] if t % 5 == 3 else t * 37 % 128 for t in range(min(tokens, 128))] + [-1] * (tokens - 128)


def run(args: dict[str, Any], pdl: bool) -> None:
    op.fused_norm_rope(*args.values(), pdl)


def close_bytes(got: torch.Tensor, expected: torch.Tensor) -> None:
    """e4m3 bytes: nearly all equal, the others neighbours (the GPU contracts to FMA and its rsqrt is approximate)."""
    different = got != expected
    assert different.float().mean() < 0.01
    distance = (got[different].short() - expected[different].short()).abs()
    small = ((got[different] & 0x7F) <= 1) & ((expected[different] & 0x7F) <= 1)  # the two zeros and what is next to them
    assert ((distance <= 1) | small).all()


@pytest.mark.parametrize("tokens", [1, 3, 17, 63, 129])
@pytest.mark.parametrize(("cache", "interleave", "q"), [("fp8_ds_mla", True, 2048), ("fp8", False, 1536)])
@pytest.mark.parametrize("pdl", [False, True])
def test_norm_rope_is_the_reference(
    norm_rope_args: Callable, copy: Callable, tokens: int, cache: str, interleave: bool, q: int, pdl: bool
) -> None:
    args = norm_rope_args(slots_of(tokens), cache, interleave=interleave, q=q, device="cuda")
    run(args, pdl)
    expected = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    fresh = norm_rope_args(slots_of(tokens), cache, interleave=interleave, q=q)
    expected |= {k: fresh[k] for k in WRITTEN}
    reference.fused_norm_rope(**expected)
    x = expected["q_c"].double()
    oracle = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * expected["q_weight"].double()
    assert_close_to_oracle(args["q_out"].cpu(), oracle, expected["q_out"])
    assert torch.equal(args["topk_indices"].cpu(), expected["topk_indices"])
    got, want = args["mla_kv_cache"].cpu(), expected["mla_kv_cache"]
    assert torch.equal((got != 0xAB).any(-1), (want != 0xAB).any(-1))
    if cache == "fp8":
        close_bytes(got, want)
    else:
        close_bytes(got[..., :512], want[..., :512])
        written = (want != 0xAB).any(-1)
        for part, dtype, rtol in ((slice(512, 528), torch.float32, 1e-5), (slice(528, 656), torch.bfloat16, 2**-7)):
            values = (t[written][:, part].contiguous().view(dtype) for t in (got, want))
            torch.testing.assert_close(*values, rtol=rtol, atol=1e-5)
    got, want = args["indexer_k_cache"].cpu().flatten(1), expected["indexer_k_cache"].flatten(1)
    close_bytes(got[:, : 64 * 128], want[:, : 64 * 128])
    assert torch.equal(got[:, 64 * 128 :], want[:, 64 * 128 :])


@pytest.mark.parametrize("tokens", [1, 4, 33])
@pytest.mark.parametrize("dim", [2880, 6144, 7168])
def test_eh_norm_is_the_reference(tokens: int, dim: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, 2 * dim + 8, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(2, dim, device="cuda", dtype=torch.bfloat16)
    args = torch.arange(tokens, device="cuda"), x[:, :dim], x[:, dim : 2 * dim], *weights, 1e-5
    got = op.fused_eh_norm(*args, True)
    assert torch.equal(got, op.fused_eh_norm(*args, False))
    oracle = torch.cat(
        [
            h.double() * (h.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double()
            for h, w in zip(args[1:3], weights, strict=True)
        ],
        -1,
    )
    oracle[0, :dim] = 0
    assert_close_to_oracle(got, oracle, reference.fused_eh_norm(*args))


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("workspace", [False, True])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 2048), (5, 128), (70, 2048), (3, 96)])
def test_conversion_is_the_reference(tokens: int, topk: int, workspace: bool, counts: bool) -> None:
    torch.manual_seed(0)
    req_id = torch.randint(0, 3, (tokens,), dtype=torch.int32)
    table = torch.randint(0, 9000, (3, 40), dtype=torch.int32)
    indices = torch.randint(-200, 40 * 64 + 100, (tokens, topk), dtype=torch.int32)
    prefill = (
        (torch.randint(-1, 2, (tokens,), dtype=torch.int32), torch.tensor([7, 9000], dtype=torch.int32)) if workspace else (None, None)
    )
    count = torch.full((tokens,), -5, dtype=torch.int32) if counts else None
    args = [req_id, table, indices, 64, *prefill, count]
    on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]
    expected = reference.convert_req_index(*args)
    for pdl in (True, False):
        assert torch.equal(op.convert_req_index(*on_gpu, pdl).cpu(), expected)
        assert count is None or torch.equal(on_gpu[6].cpu(), count)


@pytest.mark.parametrize("slots", [[3, -1, 70, 0], [-1] * 8, None])
@pytest.mark.parametrize("indexer", [True, False])
def test_pdl_changes_no_bit(norm_rope_args: Callable, copy: Callable, slots: list[int] | None, indexer: bool) -> None:
    off = norm_rope_args(slots, indexer=indexer, q=2048, tokens=4 if slots is None else None, device="cuda")
    on = copy(off)
    run(off, False)
    for _ in range(20):
        run(on, True)
    assert not on["q_out"].isnan().any()
    for name in WRITTEN:
        assert off[name] is None or torch.equal(on[name], off[name]), name
    if slots is not None and max(slots) < 0:
        assert (on["mla_kv_cache"] == 0xAB).all() and (not indexer or (on["indexer_k_cache"] == 0xAB).all())


def test_empty_launches_nothing(norm_rope_args: Callable) -> None:
    args = norm_rope_args([], device="cuda")
    run(args, True)
    torch.cuda.synchronize()
    assert (args["topk_indices"] == 7).all()


@pytest.mark.parametrize("pdl", [False, True])
def test_replay_on_fresh_data(norm_rope_args: Callable, pdl: bool) -> None:
    def call(*values: Any) -> torch.Tensor:
        op.fused_norm_rope(*values, pdl)
        return values[0]

    graph_replay(
        call, list(norm_rope_args([3, -1, 70], device="cuda").values()), list(norm_rope_args([9, 4, -1], device="cuda", seed=1).values())
    )


def chain(norm_rope_args: Callable, pdl: bool, layers: int = 12) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor], object]:
    """A graph of layers that write the same buffers one after the other, and what each of them computed."""
    args = norm_rope_args([3, -1, 70, 9], q=2048, device="cuda")
    table = torch.randint(0, 99, (1, 40), dtype=torch.int32, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    req_id = torch.zeros(4, dtype=torch.int32, device="cuda")
    weight = torch.randn(2048, 2624, dtype=torch.bfloat16, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) / 45
    start = torch.cat([args["q_c"], args["kv_c"], args["k_pe"]], -1)
    outs: list[torch.Tensor] = []

    def step() -> None:
        outs.clear()
        qkv = start
        for _ in range(layers):
            values = args | {"q_c": qkv[:, :2048], "kv_c": qkv[:, 2048:2560], "k_pe": qkv[:, 2560:]}
            op.fused_norm_rope(*values.values(), pdl)
            slots = op.convert_req_index(req_id, table, args["topk_indices"][:4], 64, None, None, None, pdl)
            eh = op.fused_eh_norm(args["positions"], args["q_out"], qkv[:, :2048], args["q_weight"], args["q_weight"], 1e-6, pdl)
            qkv = args["q_out"] @ weight
            args["topk_indices"].copy_(args["topk_indices"] + 1 + qkv[:, :1].isnan().int().sum())  # what the next layer must clear
            outs.extend((slots, eh, qkv, args["mla_kv_cache"][0, 3].clone(), args["indexer_k_cache"].sum()))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
    torch.cuda.synchronize()
    return graph, list(outs), (args, table, req_id, weight, start)  # what a replay reads must outlive the capture


@pytest.mark.parametrize("traffic", [False, True], ids=["alone", "copies"])
def test_back_to_back_replays_change_no_bit(norm_rope_args: Callable, traffic: bool) -> None:
    (off_graph, off, _off), (on_graph, on, _on) = chain(norm_rope_args, False), chain(norm_rope_args, True)
    off_graph.replay()
    torch.cuda.synchronize()
    side, big = torch.cuda.Stream(), torch.empty(2, 1 << 28, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        for out in on:
            poison(out)
        torch.cuda.synchronize()
        if traffic:
            with torch.cuda.stream(side):
                for _ in range(20):
                    big[0].copy_(big[1])
        for _ in range(10):
            on_graph.replay()
        torch.cuda.synchronize()
        for i, (a, b) in enumerate(zip(off, on, strict=True)):
            assert torch.equal(a, b), f"output {i}"
    assert (off[0] == -1).all()


@pytest.fixture(scope="module")
def late() -> Any:
    spec = importlib.util.spec_from_file_location("late", Path(__file__).with_name("late.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def twins(
    inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, torch.Tensor]]]:
    """Two byte buffers of one layout, and the views of `inputs` and `outputs` in each."""
    every = inputs | outputs
    starts, end = {}, 0
    for name, x in every.items():
        starts[name] = end
        end += -(-x.numel() * x.element_size() // 256) * 256
    flats = [torch.zeros(end, dtype=torch.uint8, device="cuda") for _ in range(2)]
    views = [{n: flat[starts[n] :][: x.numel() * x.element_size()].view(x.dtype).view(x.shape) for n, x in every.items()} for flat in flats]
    return flats[0], flats[1], views


def race(
    late: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], call: Callable[[dict[str, torch.Tensor]], Any]
) -> list[Any]:
    """Replay a graph of a producer that lets `call` start, sleeps, then writes its inputs and reads the outputs it is about to overwrite.

    `inputs` are what the producer writes, `outputs` what stands in the outputs before. Returns the results of `call`, its outputs
    and what the producer read from them.
    """
    source, target, (from_, to) = twins(inputs, outputs)
    live = {n: to[n] for n in inputs} | {n: from_[n] for n in outputs}

    def step() -> Any:
        late.late_copy_kernel[(1,)](source, target, source.numel(), SLEEP_NS, BLOCK=4096)
        return call(live)

    def reset() -> None:
        target.zero_()
        for n, x in inputs.items():
            from_[n].copy_(x)
        for n, x in outputs.items():
            from_[n].copy_(x)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        reset()
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = step()
    for _ in range(3):
        reset()
        torch.cuda.synchronize()
        graph.replay()
    torch.cuda.synchronize()
    return [result, live, {n: to[n] for n in outputs}]


def test_a_late_wait_is_detected(late: Any) -> None:
    x = torch.arange(1, 1025, dtype=torch.int32, device="cuda")

    def call(live: dict[str, torch.Tensor]) -> None:
        late.late_wait_kernel[(1,)](live["x"], live["y"], BLOCK=1024, launch_pdl=True)

    _, live, _ = race(late, {"x": x}, {"y": torch.zeros_like(x)}, call)
    assert (live["y"] == 0).any(), "a kernel that reads before it waits saw nothing stale: the detector detects nothing"


@pytest.mark.parametrize("cache", ["fp8_ds_mla", "fp8"])
def test_norm_rope_waits(late: Any, norm_rope_args: Callable, copy: Callable, cache: str) -> None:
    args = norm_rope_args([3, -1, 70, 9], cache, q=2048, device="cuda")
    expected = copy(args)
    run(expected, False)
    qkv = torch.cat([args["q_c"], args["kv_c"], args["k_pe"]], -1)
    kw = torch.cat([torch.zeros_like(args["index_k"])[:, :32], args["index_k"]], -1)
    inputs = {"qkv": qkv, "kw": kw, **{n: args[n] for n in ("positions", "slot_mapping", "mla_k_scale")}}

    def call(live: dict[str, torch.Tensor]) -> None:
        q, kv, pe = live["qkv"].split([2048, 512, 64], -1)
        changed = {"q_c": q, "kv_c": kv, "k_pe": pe, "index_k": live["kw"][:, 32:], **{n: live[n] for n in live if n in args}}
        op.fused_norm_rope(*(args | changed).values(), True)

    before = {n: args[n].clone() for n in WRITTEN}
    _, live, read = race(late, inputs, before, call)
    for n in WRITTEN:
        assert torch.equal(live[n], expected[n]), f"{n}: read before the producer wrote"
        assert torch.equal(read[n].view(torch.uint8), before[n].view(torch.uint8)), f"{n}: overwritten before the producer read"


def test_eh_norm_and_conversion_wait(late: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 12288, device="cuda", dtype=torch.bfloat16)
    positions, weight = torch.tensor([0, 5, 6, 7], device="cuda"), torch.randn(6144, device="cuda", dtype=torch.bfloat16)

    def eh_norm(live: dict[str, torch.Tensor]) -> torch.Tensor:
        return op.fused_eh_norm(live["positions"], live["x"][:, :6144], live["x"][:, 6144:], weight, weight, 1e-6, True)

    result, _, _ = race(late, {"x": x, "positions": positions}, {}, eh_norm)
    assert torch.equal(result, op.fused_eh_norm(positions, x[:, :6144], x[:, 6144:], weight, weight, 1e-6, False))

    int32 = {"dtype": torch.int32, "device": "cuda"}
    inputs = {
        "req_id": torch.tensor([1, 0, 1, 1], **int32),
        "table": torch.randint(1, 500, (2, 40), **int32),
        "indices": torch.randint(-9, 2560, (4, 2048), **int32),
        "requests": torch.tensor([-1, 0, 1, -1], **int32),
        "starts": torch.tensor([70, 9000], **int32),
    }
    before = torch.full((4,), 77, **int32)

    def convert(live: dict[str, torch.Tensor]) -> torch.Tensor:
        return op.convert_req_index(
            live["req_id"], live["table"], live["indices"], 64, live["requests"], live["starts"], live["counts"], True
        )

    result, live, read = race(late, inputs, {"counts": before}, convert)
    counts = before.clone()
    expected = op.convert_req_index(*list(inputs.values())[:3], 64, inputs["requests"], inputs["starts"], counts, False)
    assert torch.equal(result, expected) and torch.equal(live["counts"], counts) and torch.equal(read["counts"], before)


def test_contract_on_cuda(norm_rope_args: Callable) -> None:
    args = norm_rope_args([3, -1, 70], device="cuda")
    for name in WRITTEN:
        args[name].zero_()
    opcheck(torch.ops.lldecode.pdl_fused_norm_rope.default, [*args.values(), True])


def test_refused_before_anything_is_launched(norm_rope_args: Callable) -> None:
    args = norm_rope_args([3, -1, 70], device="cuda")
    with pytest.raises(ValueError, match="positions: expected device cuda:0, got cpu"):
        run(args | {"positions": args["positions"].cpu()}, True)


INDUCTOR = """
import re, sys
import torch
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.utils import run_and_get_code

import lldecode_pdl.op
from lldecode_pdl.vllm import _MARK, FEATURE

for p in FEATURE.patches:
    if p.module == TritonKernel.__module__:
        name = p.attr.split(".")[1]
        setattr(TritonKernel, name, p.wrap(getattr(TritonKernel, name)))

def step(x, weight, positions):
    for _ in range(4):
        y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        rows = torch.ops.lldecode.pdl_fused_eh_norm(positions, y, y, weight, weight, 1e-6, True)
        x = (y + rows[:, : x.shape[1]] - y.softmax(-1)).contiguous()
    return x

torch.manual_seed(0)
torch.set_default_device("cuda")
x, weight, positions = torch.randn(4, 4096).bfloat16(), torch.ones(4096).bfloat16(), torch.arange(4)
ours = {"triton.enable_pdl": True, "aot_inductor.metadata": _MARK}
with torch._inductor.config.patch(ours | {"force_disable_caches": True, "deterministic": True}):
    compiled = torch.compile(step, fullgraph=True)
    results, (code,) = run_and_get_code(compiled, x, weight, positions)
kernels = re.findall(r"^def triton_.*?^'''", code, re.M | re.S)
assert len(kernels) >= 2 and code.count("'launch_pdl': True") >= 2
for kernel in kernels:
    assert kernel.index("gdc_launch_dependents()") < kernel.index("gdc_wait()") < kernel.index("tl.program_id("), kernel
    assert kernel.count("gdc_") == 2, kernel
results = [results]
if sys.argv[2] == "graph":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x, weight, positions)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        results.append(out.clone())
torch.save([r.cpu() for r in results], sys.argv[1])
"""


def test_kernels_that_inductor_generates_wait_first(tmp_path: Path) -> None:
    """The same bits launched one by one as replayed, with a kernel between them that lets its dependents start before it waits."""
    for name, blocking in (("serial", "1"), ("graph", "0")):
        command = [sys.executable, "-c", INDUCTOR, str(tmp_path / name), name]
        subprocess.run(command, env=os.environ | {"CUDA_LAUNCH_BLOCKING": blocking}, check=True)
    (expected,), replays = (torch.load(tmp_path / name) for name in ("serial", "graph"))
    assert not expected.isnan().any() and len(replays) == 21
    assert [torch.equal(r, expected) for r in replays] == [True] * 21
