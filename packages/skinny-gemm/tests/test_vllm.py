"""The seams against the real classes of vLLM, which run on CPU tensors here: the op's CPU implementation computes."""

import json
import os
import subprocess
import sys

import pytest
import torch

from lldecode.engine import drift
from lldecode.testing import CUTE_DSL_ACCEPTED, CUTE_DSL_REFUSED
from lldecode_skinny_gemm.vllm import FEATURE, probe


@pytest.mark.parametrize("ctx", CUTE_DSL_ACCEPTED)
def test_probe_accepts_the_proven(ctx):
    assert probe(ctx) is None


@pytest.mark.parametrize(("ctx", "reason"), CUTE_DSL_REFUSED)
def test_probe_gives_the_reason(ctx, reason):
    assert probe(ctx) == reason


@pytest.mark.vllm
def test_the_targets_are_what_the_patches_were_written_against():
    assert [drift(p) for p in FEATURE.patches] == [None] * len(FEATURE.patches)


COMMON = """
import importlib, json, os, sys
import torch
from lldecode.engine import Engine
from lldecode.feature import declined, set_pdl
from lldecode.testing_vllm import world
from lldecode_skinny_gemm import op, vllm as adapter
from lldecode_skinny_gemm.vllm import FEATURE

out, calls = {}, []
engine = Engine([FEATURE])

def target(patch):
    owner = importlib.import_module(patch.module)
    *path, name = patch.attr.split(".")
    for part in path:
        owner = getattr(owner, part)
    return vars(owner)[name]

patches = [p for p in FEATURE.patches if p.host == "vllm"]
reference = op.reference.skinny_gemm
def counted(x, weight, residual=None):
    calls.append([list(x.shape), list(weight.shape)])
    return reference(x, weight, residual)
op.reference.skinny_gemm = counted
"""

MODEL = (
    COMMON
    + """
model, cls, kv, extra, layers = sys.argv[1:]
with world(model, speculative_config={"method": "mtp", "num_speculative_tokens": 1}, kv_cache_dtype=kv, **json.loads(extra)) as config:
    adapter.LAYERS = layers or adapter.LAYERS
    modules = [importlib.import_module(p.module) for p in patches]
    before = [target(p) for p in patches]
    engine.reconcile([FEATURE.name])
    out["replaced"] = all(target(p) is not b for p, b in zip(patches, before))
    path, name = cls.split(":")
    Target = getattr(importlib.import_module(path), name)
    draft = "vllm.model_executor.models.deepseek_mtp:DeepSeekMTP"
    if "deepseek_v32" in path:
        draft = "vllm.models.deepseek_v32.nvidia.mtp:DeepseekV32MTP"
    Draft = getattr(importlib.import_module(draft.split(":")[0]), draft.split(":")[1])
    with torch.device("meta"):
        target_model = Target(vllm_config=config, prefix="")
        import dataclasses, copy
        draft_config = copy.copy(config)
        draft_config.model_config = config.speculative_config.draft_model_config
        from vllm.config import set_current_vllm_config
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(draft_config):
            draft_model = Draft(vllm_config=draft_config, prefix="draft")
    def kinds(model):
        found = {}
        for n, m in model.named_modules():
            if hasattr(m, "lldecode_skinny_gemm"):
                kind = n.rsplit(".", 1)[-1] if hasattr(m, "weight") else "absorbed"
                found[kind] = found.get(kind, 0) + 1
        return found
    out["target"], out["draft"] = kinds(target_model), kinds(draft_model)
    out["declined"] = declined().get(FEATURE.name, {})
    out["min_latency"] = [m._use_min_latency_gemm for m in target_model.modules() if type(m).__name__ == "DeepSeekV2FusedQkvAProjLinear"]
    engine.reconcile([])
    out["restored"] = all(target(p) is b for p, b in zip(patches, before))
print("RESULT" + json.dumps(out))
"""
)

GENERIC = "vllm.model_executor.models.deepseek_v2:GlmMoeDsaForCausalLM"
OPTIMIZED = "vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM"


@pytest.mark.parametrize(
    ("value", "layers"),
    [("", "*,!*shared_expert*"), (" !lm_head ", "*,!*shared_expert*,!lm_head"), ("*.o_proj,!lm_head", "*.o_proj,!lm_head")],
)
def test_a_list_of_exceptions_goes_on_from_the_default(value, layers):
    code = "from lldecode_skinny_gemm import vllm; print(vllm.LAYERS, vllm._wanted('a.o_proj'), vllm._wanted('lm_head'))"
    environ = os.environ | {"LLDECODE_SKINNY_GEMM_LAYERS": value}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [layers, "True", str(not value)]


def run(script, *args, **kw):
    from lldecode.testing_vllm import run_vllm

    return json.loads(run_vllm(script, *args, env={"LLDECODE_OFF": "all"}, **kw).stdout.split("RESULT")[1])


@pytest.fixture(scope="module", params=[(GENERIC, "auto"), (OPTIMIZED, "fp8")], ids=["generic", "deepseek_v32"])
def model(request, tmp_path_factory):
    from lldecode.testing_vllm import tiny_model

    return run(MODEL, str(tiny_model(tmp_path_factory.mktemp("model"))), *request.param, "{}", "*")


# 4 layers, 3 of them dense; indexers in layers 0, 1, 2
TAKEN = {
    **dict(fused_qkv_a_proj=4, q_b_proj=4, o_proj=4, wq_b=3, wk_weights_proj=3),
    **dict(gate_up_proj=4, down_proj=4, lm_head=1, absorbed=4),
}


@pytest.mark.vllm
def test_every_linear_of_the_model_is_taken_and_nothing_else(model):
    assert model["target"] == TAKEN
    assert model["min_latency"] == [False] * 4


@pytest.mark.vllm
def test_every_linear_of_the_draft_is_taken(model):
    assert model["draft"] == {k: 1 for k in TAKEN if k != "lm_head"} | {"eh_proj": 1, "head": 1}


@pytest.mark.vllm
def test_on_replaces_and_off_restores_the_identical_objects(model):
    assert model["replaced"]
    assert model["restored"]
    assert model["declined"] == {}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("extra", "layers", "target", "declined"),
    [
        ('{"enable_lora": true}', "*", {}, {"LoRA": 2}),
        ("{}", "*.o_proj, lm_head", {"o_proj": 4, "lm_head": 1}, {}),
        ("{}", "*, !lm_head, !*.layers.*, *.q_b_proj,", {"q_b_proj": 4}, {}),
        ("{}", "", TAKEN | {"gate_up_proj": 3, "down_proj": 3}, {}),
    ],
    ids=["lora", "configured-set", "last-match", "default"],
)
def test_what_is_left_to_vllm(extra, layers, target, declined, tmp_path):
    from lldecode.testing_vllm import tiny_model

    got = run(MODEL, str(tiny_model(tmp_path)), GENERIC, "auto", extra, layers)
    assert (got["target"], got["declined"]) == (target, declined)


LAYERS = (
    COMMON
    + """
from functools import partial
with world(sys.argv[1]) as config:
    from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.column = ColumnParallelLinear(64, 48, bias=False, prefix="column")
            self.row = RowParallelLinear(48, 32, bias=False, prefix="row")
            self.biased = ReplicatedLinear(64, 16, bias=True, prefix="biased")
            self.wide = ReplicatedLinear(64, 16, bias=False, params_dtype=torch.float32, prefix="wide")
            self.lm_head = ParallelLMHead(128, 32)
            self.eh_proj = torch.nn.Linear(64, 32, bias=False)
            torch.manual_seed(0)
            for p in self.parameters():
                p.data.normal_(0, 0.1)

    model = Model()
    stock = {n: m.quant_method for n, m in model.named_modules() if hasattr(m, "quant_method")}
    x, h = torch.randn(5, 64, dtype=torch.bfloat16), torch.randn(5, 32, dtype=torch.bfloat16)
    def forward(x, h):
        return model.row(model.column(x)[0])[0], model.biased(x)[0], model.eh_proj(x), LogitsProcessor(128)(model.lm_head, h)
    before = forward(x, h)
    engine.reconcile([FEATURE.name])
    forward(x, h)
    out["calls before"] = len(calls)
    out["taken"] = adapter.take(model)
    after = forward(x, h)
    out["calls"] = list(calls)
    out["close"] = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(after, before)]
    out["biased is the original's"] = torch.equal(after[1], before[1])
    out["declined"] = dict(declined()[FEATURE.name])
    out["kept"] = {n: type(m).__name__ for n, m in stock.items()} | {"wide": type(model.wide.quant_method).__name__}
    out["same methods"] = all(model.get_submodule(n).quant_method is m for n, m in stock.items())

    # one graph for every M, with the op in it
    graphs = []
    def backend(graph, inputs):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph
    compiled = torch.compile(lambda x: (model.row(model.column(x)[0])[0], model.eh_proj(x)), backend=backend, fullgraph=True, dynamic=True)
    for m in (2, 33, 70):
        compiled(torch.randn(m, 64, dtype=torch.bfloat16))
    out["graphs"] = graphs

    # MLA's absorbed weights, through vLLM's own method
    attention = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(attention)
    heads, nope, v, latent = 4, 24, 40, 64
    kv_b = ColumnParallelLinear(latent, heads * (nope + v), bias=False, prefix="kv_b_proj")
    kv_b.weight.data.normal_(0, 0.1)
    vars(attention).update(num_heads=heads, qk_nope_head_dim=nope, v_head_dim=v, kv_lora_rank=latent, use_sparse=True, quant_config=None,
                           layer_name="x", is_aiter_triton_fp4_bmm_enabled=False, is_aiter_triton_fp8_bmm_enabled=False)
    attention.kv_b_proj = kv_b
    attention.o_proj = ColumnParallelLinear(latent, 256, bias=False, prefix="o_proj")
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales
    set_default_quant_scales(attention, register_buffer=True)
    attention.process_weights_after_loading(torch.bfloat16)
    out["not taken"] = type(attention.W_UV).__name__
    out["taken attention"] = adapter.take(attention)
    attention.process_weights_after_loading(torch.bfloat16)
    attention.process_weights_after_loading(torch.bfloat16)  # as a reload does
    out["parameters"] = sorted(n for n, _ in attention.named_parameters() if n.startswith("W_"))
    q = torch.randn(7, heads, nope + 8, dtype=torch.bfloat16)[..., :nope].transpose(0, 1)
    calls.clear()
    got = torch.bmm(q, attention.W_UK_T)
    plain = attention.W_UK_T.data.as_subclass(torch.Tensor)
    exact = q.double() @ plain.double()
    out["W_UK_T"] = [len(calls), type(got).__name__, list(plain.stride()), ((got.double() - exact).norm() / exact.norm()).item()]
    into = torch.full((7, heads * v), torch.nan, dtype=torch.bfloat16)
    latents = torch.randn(7, heads, latent, dtype=torch.bfloat16)
    calls.clear()
    attention._v_up_proj(latents, into)
    exact = (latents.transpose(0, 1).double() @ attention.W_UV.data.double()).transpose(0, 1).flatten(1)
    out["W_UV"] = [len(calls), ((into.double() - exact).norm() / exact.norm()).item()]
    calls.clear()
    many = torch.randn(heads, 33, nope, dtype=torch.bfloat16)
    out["33 tokens"] = torch.equal(torch.bmm(many, attention.W_UK_T), torch.ops.lldecode.skinny_gemm(many, plain.mT))
    import types
    hf = types.SimpleNamespace(hf_config=types.SimpleNamespace(index_topk=1))
    compilation = types.SimpleNamespace(inductor_compile_config={})
    config = types.SimpleNamespace(lora_config=None, model_config=hf, compilation_config=compilation)
    out["refusals"] = [adapter._refusal(config)]
    for variable, configured, pdl in (("1", {}, None), ("0", {"triton.enable_pdl": True}, None), ("1", {}, True), ("1", {}, False)):
        os.environ["TORCHINDUCTOR_ENABLE_PDL"] = variable
        compilation.inductor_compile_config = configured
        set_pdl(pdl)
        out["refusals"].append(adapter._refusal(config))
    set_pdl(None)
    del os.environ["TORCHINDUCTOR_ENABLE_PDL"]
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    out["refusals"].append(adapter._refusal(config))
    del os.environ["VLLM_BATCH_INVARIANT"]
    del hf.hf_config.index_topk
    out["refusals"].append(adapter._refusal(config))
    out["fp32 out"] = type(attention.W_UK_T.float() + 1).__name__

    from vllm.model_executor.warmup import cutedsl_warmup
    out["units on a CPU"] = len(adapter._units(attention))
    class OnGpu(torch.Tensor):
        is_cuda = True
    detach = torch.Tensor.detach
    torch.Tensor.detach = lambda t: detach(t).as_subclass(OnGpu)
    warmed = []
    adapter.op.warmup = lambda w, pdl: warmed.append(list(w.shape))
    units = adapter._units(attention)
    torch.Tensor.detach = detach
    out["units"] = sorted(list(shape) for shape, *_ in units)
    for compile in units.values():
        compile()
    out["warmed"] = sorted(warmed)

    engine.reconcile([])
    calls.clear()
    out["reverted"] = torch.equal(model.column(x)[0], torch.nn.functional.linear(x, model.column.weight)) and not calls
print("RESULT" + json.dumps(out))
"""
)


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    from lldecode.testing_vllm import tiny_model

    return run(LAYERS, str(tiny_model(tmp_path_factory.mktemp("model"))))


@pytest.mark.vllm
def test_the_ops_results_are_vllms(layers):
    assert layers["taken"] == {"column 48x64": 1, "row 32x48": 1, "biased 16x64": 1, "lm_head 128x32": 1, "eh_proj 32x64": 1}
    assert layers["calls"] == [[[5, 64], [48, 64]], [[5, 48], [32, 48]], [[5, 64], [32, 64]], [[5, 32], [128, 32]]]
    assert max(layers["close"]) < 6e-3
    assert layers["same methods"]
    assert layers["calls before"] == 0
    assert layers["reverted"]


@pytest.mark.vllm
def test_bias_and_fp32_weights_take_the_original(layers):
    assert layers["biased is the original's"]
    assert layers["declined"] == {"bias": 1}
    assert layers["kept"]["wide"] == "UnquantizedLinearMethod"


@pytest.mark.vllm
def test_the_compiler_sees_one_graph_for_every_m(layers):
    assert len(layers["graphs"]) == 1
    assert sum("skinny_gemm" in target for target in layers["graphs"][0]) == 3


@pytest.mark.vllm
def test_absorbed_weights_answer_bmm(layers):
    assert layers["not taken"] == "Parameter"
    assert layers["taken attention"] == {"absorbed": 1, "o_proj 256x64": 1}
    assert layers["parameters"] == ["W_UK_T", "W_UV"]
    calls, kind, strides, error = layers["W_UK_T"]
    assert (calls, kind, strides) == (1, "Tensor", [64 * (24 + 40), 64, 1])
    assert error < 3e-3
    assert layers["W_UV"][0] == 1
    assert layers["W_UV"][1] < 3e-3
    assert layers["33 tokens"]
    assert layers["fp32 out"] == "Tensor"


@pytest.mark.vllm
def test_what_a_config_rules_out_is_left_to_vllm(layers):
    pytorch = "triton.enable_pdl without the pdl feature: what PyTorch generates may read before it waits"
    assert layers["refusals"] == [None, pytorch, pytorch, None, None, "VLLM_BATCH_INVARIANT", "a model without index_topk"]


@pytest.mark.vllm
def test_nothing_is_warmed_up_without_a_gpu(layers):
    assert layers["units on a CPU"] == 0


@pytest.mark.vllm
def test_each_distinct_weight_is_warmed_up_as_the_op_takes_it(layers):
    assert layers["units"] == layers["warmed"] == [[4, 40, 64], [4, 64, 24], [256, 64]]


def test_the_embedded_layer_uses_the_op():
    import lldecode.layer as layer
    from lldecode.engine import Engine

    x, w = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(16, 64, dtype=torch.bfloat16)
    before = layer.linear, layer.bmm
    engine = Engine([FEATURE], host="lldecode")
    engine.reconcile([FEATURE.name])
    try:
        assert torch.equal(layer.linear(x, w), (x.float() @ w.float().T).to(x.dtype))
        out = torch.empty(3, 2, 16, dtype=torch.bfloat16)
        weight = torch.randn(2, 64, 16, dtype=torch.bfloat16)
        assert layer.bmm(x.expand(2, 3, 64), weight, out=out.transpose(0, 1)) is not None
        assert torch.equal(out.transpose(0, 1), (x.float() @ weight.float()).to(x.dtype))
    finally:
        engine.reconcile([])
    assert (layer.linear, layer.bmm) == before
