"""The adapter: against vLLM 0.26.0 itself, and what it does with calls that the kernels do not take."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lldecode import layer
from lldecode.engine import Engine
from lldecode.feature import Context, Feature, Patch, declined
from lldecode.testing_vllm import run_vllm
from lldecode_pdl import reference
from lldecode_pdl.vllm import _MARK as MARK
from lldecode_pdl.vllm import FEATURE

wraps = {p.target: p.wrap for p in FEATURE.patches}
norm_rope = wraps["vllm.models.deepseek_v32.nvidia.attention:fused_norm_rope"]
eh_norm = wraps["vllm.models.deepseek_v32.nvidia.mtp:fused_eh_norm"]
convert = wraps["vllm.v1.attention.backends.mla.flashmla_sparse:triton_convert_req_index_to_global_index"]


@pytest.fixture(scope="module")
def seam() -> dict[str, Any]:
    done = run_vllm(Path(__file__).with_name("seam.py"), cc="9.0", env={"LLDECODE_OFF": "all"})
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.vllm
def test_plugin_load_initialises_and_imports_nothing(seam: dict[str, Any]) -> None:
    assert not seam["cuda_at_load"] and seam["imported_at_load"] == [] and seam["pending"]
    assert seam["pdl_on"] is True and seam["pdl_off"] is None


@pytest.mark.vllm
def test_targets_are_what_the_hashes_say(seam: dict[str, Any]) -> None:
    assert seam["dropped"] == {} and seam["on"]["replaced"]


@pytest.mark.vllm
def test_off_restores_the_identical_functions(seam: dict[str, Any]) -> None:
    assert seam["off"]["identical"]


@pytest.mark.vllm
def test_attention_layer_gets_every_query_row(seam: dict[str, Any]) -> None:
    assert seam["off"]["rows"] == [True, False, True] and seam["off"]["profile"] == [False, False, False]
    assert seam["on"]["rows"] == [True, True, True] and seam["on"]["profile"] == [True, True, True]
    assert seam["declined"] == {}


@pytest.mark.vllm
def test_mtp_layer_and_backends_compute_the_same(seam: dict[str, Any]) -> None:
    assert seam["eh_norm_error"] < 1e-5 and seam["conversion_equal"]


@pytest.mark.vllm
def test_compiled_sparse_models_launch_with_pdl_unless_the_user_says_otherwise(seam: dict[str, Any]) -> None:
    default, refused, dense = seam["on"]["inductor"]
    assert default == {"triton.enable_pdl": True, "aot_inductor.metadata": MARK}
    assert refused["triton.enable_pdl"] is False
    assert dense == seam["off"]["inductor"] == {}


@pytest.mark.parametrize("metadata", [MARK, {}], ids=["ours", "other"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_generated_kernel_begins_with_the_launch_and_the_wait(metadata: dict[str, str], enabled: bool) -> None:
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel

    start, wait, other = TritonKernel.GDC_LAUNCH, TritonKernel.GDC_WAIT, object()
    pdl = [f"  {wait}", f"  {start}"] if enabled else []
    lines = ["  a", *pdl[:1], "  load", other, *pdl, "  load", *pdl[1:], "  store"]
    stock, code = SimpleNamespace(_lines=[*lines]), SimpleNamespace(_lines=[*lines])
    kernel = SimpleNamespace(GDC_LAUNCH=start, GDC_WAIT=wait, _enable_pdl_codegen=lambda: enabled)
    TritonKernel._filter_pdl(kernel, stock)  # type: ignore[arg-type]
    with config.patch({"aot_inductor.metadata": metadata}):
        wraps["torch._inductor.codegen.triton:TritonKernel._filter_pdl"](TritonKernel._filter_pdl)(kernel, code)
    assert code._lines == ([start, wait, "  a", "  load", other, "  load", "  store"] if enabled and metadata else stock._lines)


def test_pytorchs_own_caches_tell_our_kernels_from_its_own() -> None:
    from torch._inductor import config
    from torch._inductor.codecache import compiled_fx_graph_hash
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.ones(4)
    graph = make_fx(lambda x: (x + 1,))(x)

    def key(**patches: object) -> str:
        with config.patch({"triton.enable_pdl": True} | patches):
            return compiled_fx_graph_hash(graph, [x], {}, [])[0]  # type: ignore[arg-type]

    assert key() == key() != key(**{"aot_inductor.metadata": MARK})


class Original:
    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "original"


def as_vllm(args: dict[str, Any], **changes: Any) -> tuple[list[Any], dict[str, Any]]:
    args = args | changes
    names = ("slot_mapping", "indexer_k_cache", "mla_kv_cache", "mla_kv_cache_dtype", "mla_k_scale", "index_rope_interleave")
    return [args[n] for n in list(args)[1:16]], {n: args[n] for n in names}


def declines(feature: str = "pdl") -> int:
    return sum(declined().get(feature, {}).values())


@pytest.mark.parametrize("indexer", [True, False])
def test_layer_call_is_the_reference(norm_rope_args: Callable, copy: Callable, indexer: bool) -> None:
    args = norm_rope_args([3, -1, 70], indexer=indexer)
    expected = copy(args)
    reference.fused_norm_rope(**expected)
    original = Original()
    positional, keywords = as_vllm(args)
    kept = torch.full((3, 64), 7, dtype=torch.int32)
    if not indexer:
        positional[14] = kept  # the layer passes the buffer all the same
    got = norm_rope(original)(*positional, **keywords, has_indexer=indexer)
    assert torch.equal(got, expected["q_out"]) and torch.equal(args["mla_kv_cache"], expected["mla_kv_cache"])
    if indexer:
        assert torch.equal(args["indexer_k_cache"], expected["indexer_k_cache"]) and torch.equal(
            args["topk_indices"], expected["topk_indices"]
        )
    assert (kept == 7).all() and not original.calls


def test_given_output_is_written(norm_rope_args: Callable) -> None:
    args = norm_rope_args([3, -1])
    positional, keywords = as_vllm(args)
    assert norm_rope(Original())(*positional, **keywords, q_c_out=args["q_out"]) is args["q_out"]
    assert not args["q_out"].isnan().any()


@pytest.mark.parametrize(
    "changes",
    [{"mla_kv_cache_dtype": "auto"}, {"index_k": None}, {"kv_weight": torch.ones(511)}],
    ids=["bf16 cache", "skip_topk without index_k", "odd latent"],
)
def test_other_calls_go_to_the_original_once(norm_rope_args: Callable, changes: dict[str, Any]) -> None:
    positional, keywords = as_vllm(norm_rope_args([3, -1]), **changes)
    original, before = Original(), declines()
    assert norm_rope(original)(*positional, **keywords, has_indexer=True) == "original"
    ((args, kwargs),) = original.calls
    assert all(a is b for a, b in zip(args, positional, strict=True)) and kwargs == {**keywords, "has_indexer": True}
    assert declines() == before + 1


def test_other_norms_and_conversions_go_to_the_original_once() -> None:
    before = declines()
    original = Original()
    x = torch.ones(2, 8)
    assert eh_norm(original)(torch.arange(2), x, x, x[0], torch.ones(9), 1e-6) == "original"
    ids = torch.zeros(2, dtype=torch.int64)
    table = torch.zeros(1, 4, dtype=torch.int32)
    assert convert(original)(ids, table, torch.zeros(2, 64, dtype=torch.int32), BLOCK_SIZE=64, return_valid_counts=True) == "original"
    assert len(original.calls) == 2 and original.calls[1][1] == {"return_valid_counts": True} and declines() == before + 2


def test_conversion_keywords() -> None:
    ids, table = torch.zeros(2, dtype=torch.int32), torch.tensor([[5, 6]], dtype=torch.int32)
    indices = torch.tensor([[0, 64, -1, 500], [1, 2, 3, 4]], dtype=torch.int32)
    run = convert(Original())
    assert run(ids, table, indices, BLOCK_SIZE=64, NUM_TOPK_TOKENS=4)[0].tolist() == [320, 384, -1, -1]
    requests, starts = torch.tensor([-1, 0], dtype=torch.int32), torch.tensor([900], dtype=torch.int32)
    workspace = {"prefill_workspace_request_ids": requests, "prefill_workspace_starts": starts}
    both = {"HAS_PREFILL_WORKSPACE": True, "return_valid_counts": True}
    slots, counts = run(ids, table, indices, BLOCK_SIZE=64, NUM_TOPK_TOKENS=4, **workspace, **both)
    assert slots.tolist() == [[320, 384, -1, -1], [901, 902, 903, 904]] and counts.tolist() == [2, 4]
    # the workspace counts only where the flag says so
    assert run(ids, table, indices, BLOCK_SIZE=64, NUM_TOPK_TOKENS=4, **workspace)[1].tolist() == [321, 322, 323, 324]


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
    got = FEATURE.probe(Context(tuple(capabilities), {"vllm": "0.26.0", "triton": "3.6.0"}))
    assert got is None if reason is None else reason in str(got)
    assert FEATURE.probe(Context(((10, 0), (10, 3)), {"triton": "3.6.0"}, required=True)) is None
    assert FEATURE.probe(Context(((9, 0),), {})) == "triton is not installed"


def test_what_others_wrap_stays_around_ours() -> None:
    seen = []

    def caching(original: Callable) -> Callable:
        return lambda *a, **k: (seen.append(original), original(*a, **k))[1]

    other = Feature("a-cache", "test", (Patch("lldecode.layer:triton_convert_req_index_to_global_index", caching, "test", "never"),))
    engine = Engine([FEATURE, other], host="lldecode")
    stock = layer.triton_convert_req_index_to_global_index
    try:
        engine.reconcile(["pdl", "a-cache"])
        ids, table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
        layer.triton_convert_req_index_to_global_index(ids, table, torch.zeros(1, 4, dtype=torch.int32), BLOCK_SIZE=64, NUM_TOPK_TOKENS=4)
        assert [f.__wrapped__ for f in seen] == [stock]
    finally:
        engine.reconcile([])
    assert layer.triton_convert_req_index_to_global_index is stock


@pytest.mark.parametrize("dims", [layer.GLM52, layer.DSV32], ids=lambda d: d.name)
def test_embedded_layer_computes_the_same(dims: layer.Dims) -> None:
    before = declines()
    results = {}
    for enabled in ([], ["pdl"]):
        engine = Engine([FEATURE], host="lldecode")
        layers, state = layer.build(dims.scaled(), 2, 70, "cpu", layers=2)
        for each in layers:
            layer.poison(each, state)
        try:
            engine.reconcile(enabled)
            outs = layer.step(layers, state)
        finally:
            engine.reconcile([])
        results[bool(enabled)] = outs, [layer.written(each, state) for each in layers]
    for off, on in zip(*(r[0] for r in results.values()), strict=True):
        torch.testing.assert_close(on.hidden, off.hidden, rtol=0.05, atol=0.05)
    for off, on in zip(*(r[1] for r in results.values()), strict=True):
        for name in off:
            torch.testing.assert_close(on[name], off[name], rtol=0.13, atol=1e-3)  # one step of e4m3
    assert declines() == before
