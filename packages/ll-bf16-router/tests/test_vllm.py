"""The seam against the real GateLinear of vLLM, which runs on CPU tensors here: the op's CPU implementation computes."""

import json

import pytest
import torch

from lldecode.engine import drift
from lldecode.testing import CUTE_DSL_ACCEPTED, CUTE_DSL_REFUSED
from lldecode_ll_bf16_router.vllm import FEATURE, probe


@pytest.mark.parametrize("ctx", CUTE_DSL_ACCEPTED)
def test_probe_accepts_the_proven(ctx):
    assert probe(ctx) is None


@pytest.mark.parametrize(("ctx", "reason"), CUTE_DSL_REFUSED)
def test_probe_gives_the_reason(ctx, reason):
    assert probe(ctx) == reason


@pytest.mark.vllm
def test_the_targets_are_what_the_patches_were_written_against():
    assert [drift(p) for p in FEATURE.patches] == [None] * len(FEATURE.patches)


SEAM = """
import json, sys
import torch
from lldecode.engine import Engine
from lldecode.feature import declined
from lldecode.testing_vllm import world
from lldecode_ll_bf16_router import op
from lldecode_ll_bf16_router.vllm import FEATURE

out = {}
calls = []
with world(sys.argv[1]):
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import ReplicatedLinear

    before = (vars(GateLinear)["forward"], vars(GateLinear)["__init__"])
    engine = Engine([FEATURE])
    engine.reconcile([FEATURE.name])
    out["replaced"] = vars(GateLinear)["forward"] is not before[0] and vars(GateLinear)["__init__"] is not before[1]

    def gate(**kw):
        made = GateLinear(256, 32, prefix="gate", **kw)
        torch.manual_seed(0)
        made.weight.data.normal_(0, 0.05)
        if made.bias is not None:
            made.bias.data.zero_()
        made.allow_ll_bf16_gemm = made.allow_dsv3_router_gemm = made.allow_cublas_router_gemm = False  # stock, on a CPU
        return made

    def run(g, x):
        calls.clear()
        y, bias = g(x)
        return y

    op_run = op.ll_bf16_router
    def counted(*args):
        calls.append(args[2:])
        return op_run(*args)
    op.ll_bf16_router = counted

    x = torch.randn(8, 256, dtype=torch.bfloat16)
    for name, dtype in (("glm", torch.float32), ("dsv32", None)):
        g = gate(out_dtype=dtype)
        y = run(g, x)
        exact = x.double() @ g.weight.double().T
        out[name] = [str(y.dtype), len(calls), ((y.double() - exact).norm() / exact.norm()).item()]
    late = gate()
    late.set_out_dtype(torch.float32)
    out["late dtype"] = [str(run(late, x).dtype), len(calls)]

    stock = {}
    stock["33 tokens"] = (gate(out_dtype=torch.float32), torch.randn(33, 256, dtype=torch.bfloat16))
    stock["fp32 weight"] = (gate(out_dtype=torch.float32, params_dtype=torch.float32), x)
    stock["bias"] = (gate(bias=True), x)
    for name, (g, xs) in stock.items():
        ours = run(g, xs)
        n = len(calls)
        theirs = before[0](g, xs)[0]
        out[name] = [n, torch.equal(ours, theirs)]
    for _ in range(3):
        run(stock["33 tokens"][0], torch.randn(40, 256, dtype=torch.bfloat16))
    out["declined"] = declined()[FEATURE.name]

    # the compiler must see one branch, whatever the batch size
    compiled = torch.compile(lambda g, xs: g(xs)[0], backend="eager", fullgraph=True, dynamic=True)
    calls.clear()
    g = gate(out_dtype=torch.float32)
    out["compiled"] = [torch.equal(compiled(g, x), before[0](g, x)[0]), len(calls)]

    from vllm.model_executor.warmup import cutedsl_warmup
    asked = []
    op.warmup = lambda n, k, out_dtype, device, pdl: asked.append([n, k, str(out_dtype), pdl])
    class Cuda:  # what a gate on a GPU looks like to the provider
        is_cuda, dtype, device, shape = True, torch.bfloat16, torch.device("cuda", 0), (32, 256)
    gates = [gate(out_dtype=torch.float32), gate(out_dtype=torch.float32), gate()]
    for g in gates:
        del g._parameters["weight"]
        g.weight = Cuda
    import gc; gc.collect()
    mine = [u for u in cutedsl_warmup._iter_cutedsl_warmup_compile_units() if u.name == FEATURE.name]
    for unit in mine:
        unit.compile()
    out["warm-up"] = sorted(asked)

    engine.reconcile([])
    out["restored"] = vars(GateLinear)["forward"] is before[0] and vars(GateLinear)["__init__"] is before[1]
print("RESULT" + json.dumps(out))
"""


@pytest.fixture(scope="module")
def seam(tmp_path_factory):
    from lldecode.testing_vllm import run_vllm, tiny_model

    # the plugin leaves this feature alone: this engine is the test's own
    done = run_vllm(SEAM, str(tiny_model(tmp_path_factory.mktemp("model"))), env={"LLDECODE_OFF": "all"})
    return json.loads(done.stdout.split("RESULT")[1])


@pytest.mark.vllm
def test_on_replaces_and_off_restores_the_identical_methods(seam):
    assert seam["replaced"]
    assert seam["restored"]


@pytest.mark.vllm
@pytest.mark.parametrize(("model", "dtype", "bound"), [("glm", "torch.float32", 1e-6), ("dsv32", "torch.bfloat16", 3e-3)])
def test_each_model_keeps_its_logits_dtype(seam, model, dtype, bound):
    got, calls, error = seam[model]
    assert (got, calls) == (dtype, 1)
    assert error < bound


@pytest.mark.vllm
def test_a_dtype_set_after_construction_is_honoured(seam):
    assert seam["late dtype"] == ["torch.float32", 1]


@pytest.mark.vllm
@pytest.mark.parametrize("case", ["33 tokens", "fp32 weight", "bias"])
def test_what_is_not_supported_takes_the_original(seam, case):
    assert seam[case] == [0, True]


@pytest.mark.vllm
def test_reasons_are_counted_and_do_not_depend_on_the_batch_size(seam):
    assert len(seam["declined"]) == 3
    assert sorted(seam["declined"].values()) == [1, 1, 4]


@pytest.mark.vllm
def test_a_traced_gate_is_stock(seam):
    assert seam["compiled"] == [True, 0]


@pytest.mark.vllm
def test_warm_up_compiles_each_distinct_gate_once(seam):
    assert seam["warm-up"] == [[32, 256, "torch.bfloat16", True], [32, 256, "torch.float32", True]]


def test_the_embedded_layer_takes_the_op():
    from lldecode import layer
    from lldecode.engine import Engine

    engine = Engine([FEATURE], "lldecode")
    x, w = torch.randn(4, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    stock = layer.router_gemm
    engine.reconcile([FEATURE.name])
    try:
        assert layer.router_gemm is not stock
        torch.testing.assert_close(layer.router_gemm(x, w, torch.float32), stock(x, w, torch.float32))
    finally:
        engine.reconcile([])
    assert layer.router_gemm is stock
