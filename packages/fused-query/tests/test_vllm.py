"""The seams against the real vLLM, which runs on CPU tensors here: the op's CPU implementation computes."""

import json

import pytest

from lldecode.engine import drift
from lldecode.testing import CUTE_DSL_ACCEPTED, CUTE_DSL_REFUSED
from lldecode_fused_query.vllm import FEATURE, probe


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
import gc, json, sys, types
import torch
from lldecode.engine import Engine
from lldecode.feature import declined
from lldecode.testing_vllm import world
from lldecode_fused_query import op
from lldecode_fused_query.vllm import FEATURE, MAX_PACKED_TOKENS, _packed
from torch.utils._python_dispatch import TorchDispatchMode

fp8_query, heads, out = sys.argv[2] == "fp8", int(sys.argv[3]), {}
launched, stock, indexed, queries, shapes = logs = [], [], [], [], []


class Count(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.lldecode.fused_query.default:
            launched.append(list(args[5].shape))
        return func(*args, **(kwargs or {}))


def error(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


with world(sys.argv[1], kv_cache_dtype="fp8", speculative_config={"method": "mtp", "num_speculative_tokens": 3}) as config:
    import vllm.models.deepseek_v32.nvidia.attention as A
    from vllm import _custom_ops
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.warmup import cutedsl_warmup
    from vllm.v1.attention.backends.mla import flashmla_sparse as F

    def concat(nope, rope, packed):
        stock.append("concat")
        packed.copy_(torch.cat([nope, rope], -1))

    def held():
        return A.fused_q, vars(F.FlashMLASparseImpl)["forward_mqa"], vars(A.DeepseekV32Attention)["__init__"]

    _custom_ops.concat_mla_q = concat
    before = held()
    engine = Engine([FEATURE])
    engine.reconcile([FEATURE.name])
    out["replaced"] = all(a is not b for a, b in zip(held(), before))

    hf = config.model_config.hf_config
    topk = torch.zeros(64, hf.index_topk, dtype=torch.int32)
    torch.manual_seed(0)
    layers = {}
    for name, i in {"indexer": 0, "shared": 3, "mtp": 4}.items():
        layer = layers[name] = A.DeepseekV32Attention(config, hf, f"model.layers.{i}.self_attn", topk)
        for p in layer.parameters():
            p.data.normal_(0, 0.05)
        layer.process_weights_after_loading(torch.bfloat16)
        layer.kv_cache = torch.zeros(2, 64, 576 if fp8_query else 656, dtype=torch.uint8)
        if layer.indexer is not None:
            layer.indexer.k_cache.kv_cache = torch.zeros(2, 64, 132, dtype=torch.uint8)

    # what needs a GPU: the indexer and the attention kernels
    def attend(q, *args, **kwargs):
        shapes.append(list(q.shape))
        queries.append(q[..., :heads, :].reshape(-1, heads, 576))
        return q[..., :512].to(torch.bfloat16), None

    A.sparse_attn_indexer = lambda *args, **kwargs: indexed.append((args[3], args[6]))
    F.flash_mla_with_kvcache = attend
    F.triton_convert_req_index_to_global_index = lambda *a, **kw: (a[2], None) if kw.get("return_valid_counts") else a[2]
    F.FlashMLASparseMetadata.FP8KernelMetadata = types.SimpleNamespace
    if fp8_query:
        type(layers["mtp"].impl).forward_mqa = lambda self, q, *args: attend(q)

    def run(layer, tokens=5, padding=2):
        n = tokens - padding
        kernel = types.SimpleNamespace(dummy_block_table=None, cache_lens=None, scheduler_metadata=None)
        decode = F.FlashMLASparseMetadata.FP8SeparatePrefillDecode.Decode(None, kernel, 1)
        mixed = heads < F.MIN_HEADS_FOR_BF16_PREFILL
        metadata = types.SimpleNamespace(
            num_actual_tokens=n, req_id_per_token=torch.zeros(n, dtype=torch.int32), block_table=None, block_size=64,
            fp8_use_mixed_batch=mixed,
            fp8_extra_metadata=kernel if mixed else F.FlashMLASparseMetadata.FP8SeparatePrefillDecode(0, n, 0, n, decode))
        for log in logs:
            log.clear()
        x = torch.randn(tokens, hf.hidden_size, generator=torch.Generator().manual_seed(1))
        slots = {layer.layer_name: torch.arange(tokens)}
        context = set_forward_context({layer.layer_name: metadata}, config, num_tokens=tokens, slot_mapping=slots)
        with torch.inference_mode(), Count(), context:
            y = layer(positions=torch.arange(tokens), hidden_states=x.bfloat16())
        return y[:n], queries[0], list(indexed), {"launched": list(launched), "concat": len(stock), "shapes": list(shapes)}

    for name, layer in layers.items():
        y, q, index, out[name] = run(layer)
        engine.reconcile([])
        y0, q0, index0, out[name]["stock"] = run(layer)
        engine.reconcile([FEATURE.name])
        out[name]["errors"] = [error(y, y0), error(q, q0), *(error(a, b) for got, want in zip(index, index0) for a, b in zip(got, want))]
        out[name]["dtypes"] = [q.dtype == q0.dtype, *(a.dtype == b.dtype for got, want in zip(index, index0) for a, b in zip(got, want))]

    table = layers["mtp"].rotary_emb.cos_sin_cache

    def arguments(tokens=3, **changed):
        g = torch.Generator().manual_seed(3)
        normal = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float32).bfloat16()
        return dict(
            positions=torch.arange(tokens), q_pe=normal(tokens, heads, 256)[..., 192:], q_pe_cos_sin_cache=table,
            index_q=normal(tokens, 32, 128), index_q_cos_sin_cache=table, ql_nope=normal(heads, tokens, 512).transpose(0, 1),
            q_scale=torch.ones((), dtype=torch.float32), index_weights=normal(tokens, 160)[:, 128:], index_weights_softmax_scale=0.1,
            index_weights_head_scale=0.2, has_indexer=True, index_rope_interleave=True, quantize_mqa=fp8_query) | changed

    no_indexer = {"index_q": None, "index_q_cos_sin_cache": None, "index_weights": None, "has_indexer": False}
    def equal(mine, theirs):
        return [torch.equal(x.float(), y.float()) and x.dtype == y.dtype for x, y in zip(mine, theirs)]

    # nothing to round: turns by a quarter, and powers of two
    turns = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]).repeat_interleave(32, 1).to(table.dtype)
    power = lambda x: torch.exp2(x.float().mul(2).round().clamp(-6, 6)).mul(x.float().sign()).bfloat16()
    a = arguments(q_pe_cos_sin_cache=turns, index_q_cos_sin_cache=turns)
    a |= {name: power(a[name]) for name in ("q_pe", "ql_nope", "index_q", "index_weights")} | {"index_weights_softmax_scale": 0.25}
    out["exact"] = [equal(A.fused_q(**a | kw), before[0](**a | kw)) for kw in ({}, {"index_rope_interleave": False})]

    whole = A.fused_q(**arguments())
    for name, changed in {"no indexer": no_indexer, "skips top-k": {"index_weights": None}}.items():
        launched.clear()
        with Count():
            index_q, weights, q = A.fused_q(**arguments(**changed))
        out[name] = [index_q is None, weights is None, torch.equal(q.float(), whole[2].float()), len(launched)]
    _, _, q = A.fused_q(**arguments(MAX_PACKED_TOKENS + 1, **no_indexer))
    out["long"] = [list(q.shape), q.is_contiguous()]

    if not fp8_query:
        a = arguments()
        rope, nope = A.fused_q(**a)[2], a["ql_nope"]
        out["hand-over"] = torch.equal(_packed((nope[:2], rope[:2]))[:, :heads], torch.cat([nope, rope], -1)[:2])
        others = (nope.clone(), rope), (nope, rope.clone()), (nope[1:], rope[1:]), (nope, rope[:, :1]), torch.cat([nope, rope], -1)
        out["no hand-over"] = [_packed(q) is None for q in others]
        view = rope[:]
        del rope, others
        out["no hand-over"].append(_packed((nope, view)) is None)

    a = arguments(q_pe=torch.zeros(3, heads, 128, dtype=torch.bfloat16)[..., ::2])
    mine, theirs = A.fused_q(**a), before[0](**a)
    skipped = A.fused_q(**a | {"index_weights": None})[2]
    pairs = zip((*mine, skipped), (*theirs, theirs[2]))
    out["declined"] = [declined()[FEATURE.name], [error(x, y) if y.any() else int(x.any()) for x, y in pairs]]

    class Cuda:  # what a table on a GPU looks like to the provider
        is_cuda, dtype, device = True, torch.float32, torch.device("cuda", 0)

    asked = []
    op.warmup = lambda *args: asked.append(list(map(str, args)))
    for layer in layers.values():
        del layer.rotary_emb
        layer.__dict__["rotary_emb"] = types.SimpleNamespace(cos_sin_cache=Cuda)
    gc.collect()  # the registry of providers is weak
    for unit in cutedsl_warmup._iter_cutedsl_warmup_compile_units():
        if unit.name == FEATURE.name:
            unit.compile()
    out["warm-up"] = sorted(asked)

    engine.reconcile([])
    out["restored"] = all(a is b for a, b in zip(held(), before))
print("RESULT" + json.dumps(out))
"""

BACKENDS = {"flashmla": ("bf16", 8, "9.0"), "flashmla-48-heads": ("bf16", 48, "9.0"), "flashinfer": ("fp8", 16, "10.0")}


@pytest.fixture(scope="module", params=BACKENDS)
def seam(request, tmp_path_factory):
    from lldecode.testing_vllm import run_vllm, tiny_model

    query, heads, cc = BACKENDS[request.param]
    model = tiny_model(tmp_path_factory.mktemp("model"), num_attention_heads=heads, num_key_value_heads=heads)
    done = run_vllm(SEAM, str(model), query, str(heads), cc=cc, env={"LLDECODE_OFF": "all"})
    return json.loads(done.stdout.split("RESULT")[1]) | {"query": query, "heads": heads}


@pytest.mark.vllm
def test_on_replaces_and_off_restores_the_identical_objects(seam):
    assert seam["replaced"]
    assert seam["restored"]


@pytest.mark.vllm
@pytest.mark.parametrize("layer", ["indexer", "shared", "mtp"])
def test_a_layer_launches_once_and_agrees_with_stock(seam, layer):
    got, heads = seam[layer], seam["heads"]
    assert got["launched"] == [[5, heads, 576]]
    assert got["stock"]["launched"] == []
    # the interpreter truncates where a GPU rounds, so stock itself is off by a unit in the last place
    assert max(got["errors"]) < 0.09
    assert len(got["errors"]) == (2 if layer == "shared" else 4)
    assert all(got["dtypes"])


@pytest.mark.vllm
def test_equals_stock_where_nothing_is_rounded(seam):
    assert seam["exact"] == [[True] * 3] * 2


@pytest.mark.vllm
def test_flashmla_concatenates_and_pads_nothing(seam):
    if seam["query"] == "fp8":
        assert seam["indexer"]["shapes"] == seam["indexer"]["stock"]["shapes"] == [[3, 16, 576]]
        return
    assert seam["indexer"]["stock"]["concat"] == 1
    assert seam["indexer"]["concat"] == 0
    assert seam["indexer"]["shapes"] == seam["indexer"]["stock"]["shapes"]
    assert seam["hand-over"]
    assert all(seam["no hand-over"])
    assert len(seam["no hand-over"]) == 6


@pytest.mark.vllm
def test_a_layer_without_an_indexer_or_that_skips_its_top_k(seam):
    assert seam["no indexer"] == seam["skips top-k"] == [True, True, True, 1]


@pytest.mark.vllm
def test_a_prefill_batch_is_not_packed_in_bf16(seam):
    assert seam["long"] == [[1025, seam["heads"], 576 if seam["query"] == "fp8" else 64], True]


@pytest.mark.vllm
def test_what_the_kernel_cannot_take_goes_to_stock(seam):
    counts, errors = seam["declined"]
    assert list(counts.values()) == [2]
    assert next(iter(counts)).startswith("q_pe: expected a last dimension of stride 1")
    assert errors == [0, 0, 0, 0]


@pytest.mark.vllm
def test_warm_up_compiles_each_kind_of_layer_once(seam):
    outputs = ("fp8",) if seam["query"] == "fp8" else ("bf16", "rope")
    kinds = sorted([o, str(i), "True", "torch.float32", "cuda:0", "False"] for o in outputs for i in (True, False))
    assert seam["warm-up"] == kinds


@pytest.mark.parametrize("packed", [True, False])
def test_the_embedded_layer_gets_the_same_query(cases, packed):
    import torch

    from lldecode import layer
    from lldecode.engine import Engine

    case = cases.make_case(3, 4, 8, "fp8" if packed else "bf16")
    args = (
        case.positions,
        case.q_pe,
        case.cos_sin,
        case.index_q,
        case.index_cos_sin,
        case.ql_nope,
        case.q_scale,
        case.index_weights,
        0.1,
        0.2,
    )
    expected = layer.fused_q(*args, True, True, packed)
    before = layer.fused_q, layer.forward_mqa
    engine = Engine([FEATURE], host="lldecode")
    engine.reconcile([FEATURE.name])
    try:
        assert layer.fused_q is not before[0]
        got = layer.fused_q(*args, True, True, packed)
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x.float(), y.float(), rtol=2**-4, atol=1e-3)
            assert x.dtype == y.dtype
        if not packed:
            seen = []
            inner = layer.forward_mqa.__wrapped__
            layer.forward_mqa.__closure__[0].cell_contents = lambda q, *rest: seen.append(q)
            layer.forward_mqa((case.ql_nope, got[2]))
            layer.forward_mqa.__closure__[0].cell_contents = inner
            assert torch.equal(seen[0], torch.cat([case.ql_nope, got[2]], -1))
    finally:
        engine.reconcile([])
    assert (layer.fused_q, layer.forward_mqa) == before
