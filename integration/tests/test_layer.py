import collections
import dataclasses
import functools
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lldecode import layer
from lldecode.engine import Engine
from lldecode.feature import Feature, Patch

SEAMS = (
    *("linear", "bmm", "fused_add_rms_norm", "fused_norm_rope", "fused_q", "sparse_attn_indexer", "forward_mqa"),
    *("triton_convert_req_index_to_global_index", "router_gemm", "grouped_topk", "fused_experts", "silu_and_mul"),
)
CONTEXT = 300


def dims(model: str, kv: str = "fp8_ds_mla") -> layer.Dims:
    return dataclasses.replace(layer.MODELS[model].scaled(), kv_cache_dtype=kv)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def built():
    return functools.cache(lambda model, kv, layers: layer.build(dims(model, kv), 3, CONTEXT, "cpu", layers=layers))


@pytest.mark.parametrize("kv", ["fp8_ds_mla", "fp8"])
@pytest.mark.parametrize("model", layer.MODELS)
def test_step_writes_everything_and_repeats_bit_for_bit(built, model, kv):
    layers, state = built(model, kv, 2)
    d = layers[0].dims
    first = None
    for _ in range(2):
        state.topk_indices.fill_(-1)
        for each in layers:
            layer.poison(each, state)
            assert all(t.isnan().all() for t in layer.written(each, state).values())
        outs = layer.step(layers, state)
        assert all(t.isfinite().all() for each in layers for t in layer.written(each, state).values())
        for out in outs:
            assert out.hidden.shape == out.residual.shape == (3, d.hidden_size)
            assert out.hidden.dtype == torch.bfloat16 and out.hidden.isfinite().all() and 0.3 < out.hidden.float().std() < 3
            assert out.router_logits.dtype == d.router_dtype and out.router_logits.shape == (3, d.n_routed_experts)
            assert out.topk_ids.dtype == torch.int32 and all(len(set(row)) == 8 for row in out.topk_ids.tolist())
        for row, n in zip(state.topk_indices.tolist(), state.seq_lens.tolist(), strict=True):
            assert len(set(row)) == d.index_topk and set(row) <= set(range(n))
        first = first or outs
        assert all(torch.equal(a, b) for x, y in zip(first, outs, strict=True) for a, b in zip(x, y, strict=True))


def test_models_differ_where_vllm_differs():
    glm, dsv = layer.GLM52, layer.DSV32
    assert (glm.router_dtype, dsv.router_dtype) == (torch.float32, torch.bfloat16)
    assert (glm.indexer_rope_interleave, dsv.indexer_rope_interleave) == (True, False)
    layers, _ = layer.build(glm.scaled(), 1, 70, "cpu", layers=5)
    assert [each.indexer is not None for each in layers] == [True, False, False, False, True]
    layers, _ = layer.build(dsv.scaled(), 1, 70, "cpu", layers=2)
    assert all(each.indexer is not None for each in layers)


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        ("glm52", {"fused_qkv_a_proj": (2624, 6144), "q_b_proj": (2048, 2048), "o_proj": (6144, 2048), "gate": (256, 6144)}),
        ("dsv32", {"fused_qkv_a_proj": (2112, 7168), "q_b_proj": (3072, 1536), "o_proj": (7168, 2048), "gate": (256, 7168)}),
    ],
)
def test_real_shapes_run_without_a_host_synchronization(model, shapes):
    with FakeTensorMode():  # raises on anything that would need a tensor's value
        layers, state = layer.build(layer.MODELS[model], 16, 4096, "cpu", layers=2)
        assert {name: tuple(getattr(layers[0], name).shape) for name in shapes} == shapes
        assert layers[0].indexer.wk_weights_proj.shape == (128 + layers[0].dims.index_n_heads, layers[0].dims.hidden_size)
        assert layers[0].kv_cache.shape[1:] == (64, 656)
        outs = layer.step(layers, state)
        assert outs[-1].hidden.shape == (16, layers[0].dims.hidden_size)
        mtp, states = layer.build_draft(layer.MODELS[model], state, 2)
        assert mtp.head.shape == ({"glm52": 19360, "dsv32": 16160}[model], layers[0].dims.hidden_size)
        assert layer.propose(mtp, states, outs[-1].hidden)[-1].tokens.shape == (16,)


def test_layer_without_indexer_leaves_the_selection_alone(built):
    layers, state = built("glm52", "fp8_ds_mla", 2)
    state.topk_indices.copy_(torch.arange(state.topk_indices.numel()).view_as(state.topk_indices) % 100)
    before = state.topk_indices.clone()
    layer.step(layers[1:], state)
    assert torch.equal(state.topk_indices, before)


def test_attention_reads_what_on_topk_leaves(built):
    layers, state = built("glm52", "fp8_ds_mla", 1)
    plain = layer.step(layers, state)[0].residual
    seen = []

    def narrow(indices: torch.Tensor) -> None:
        seen.append(indices.clone())
        indices[:, 1:] = -1

    narrowed = layer.step(layers, dataclasses.replace(state, on_topk=narrow))[0].residual
    assert len(seen) == 1 and (seen[0] >= 0).all()
    assert not torch.equal(plain, narrowed)


def test_every_seam_is_looked_up_at_the_call(built):
    layers, state = built("glm52", "fp8_ds_mla", 2)
    calls = collections.Counter()

    def counting(name):
        def wrap(original):
            @functools.wraps(original)
            def call(*args, **kwargs):
                calls[name] += 1
                return original(*args, **kwargs)

            return call

        return wrap

    patches = tuple(Patch(f"lldecode.layer:{name}", counting(name), why="test", remove_when="never") for name in SEAMS)
    engine = Engine([Feature("count", "test", patches)], host="lldecode")
    originals = {name: getattr(layer, name) for name in SEAMS}
    stock = layer.step(layers, state)
    assert not calls
    try:
        engine.reconcile(["count"])
        counted = layer.step(layers, state)
    finally:
        engine.reconcile([])
    assert {name: getattr(layer, name) for name in SEAMS} == originals
    each = dict.fromkeys(SEAMS, 2)
    # per layer qkv_a, q_b, o and the shared expert's two; with an indexer also wq_b and wk_weights_proj
    assert calls == each | {"linear": 2 * 5 + 2, "bmm": 4, "fused_add_rms_norm": 4, "silu_and_mul": 4, "sparse_attn_indexer": 1}
    assert torch.equal(stock[-1].hidden, counted[-1].hidden)


@pytest.fixture(scope="module")
def drafting():
    """By model: a draft layer, the states of 3 steps, and the hidden state that they start from."""

    def make(model):
        layers, state = layer.build(dims(model), 3, 67, "cpu", spec=3)
        return (*layer.build_draft(dims(model), state, 3), layer.step(layers, state)[0].hidden)

    return functools.cache(make)


@pytest.mark.parametrize("model", layer.MODELS)
def test_each_draft_step_is_fed_by_the_one_before(drafting, model):
    mtp, states, hidden = drafting(model)
    d = mtp.block.dims
    for state in states:
        layer.poison(mtp.block, state)
    drafts = layer.propose(mtp, states, hidden)
    tokens = states[0].tokens
    for i, (state, draft) in enumerate(zip(states, drafts, strict=True)):
        assert state.positions.tolist() == [66 + i, 65 + i, 64 + i] and (state.seq_lens == state.positions + 1).all()
        assert all(t.isfinite().all() for t in layer.written(mtp.block, state).values())
        assert draft.out.hidden.isfinite().all() and draft.logits.shape == (3, d.vocab_size)
        assert torch.equal(draft.tokens, draft.logits.argmax(-1)) and draft.tokens.dtype == torch.int64
        again = layer.draft_step(mtp, state, tokens, hidden)
        assert all(torch.equal(a, b) for a, b in zip(again[:3], draft[:3], strict=True))
        other = layer.draft_step(mtp, state, (tokens + 1) % d.vocab_size, hidden)
        assert not torch.equal(other.hidden, draft.hidden)
        layer.draft_step(mtp, state, tokens, hidden)
        tokens, hidden = draft.tokens, draft.hidden
    assert len({tuple(s.slot_mapping.tolist()) for s in states}) == 3


def test_draft_steps_write_where_the_block_table_says():
    _, state = layer.build(dims("glm52"), 2, 64, "cpu", spec=3)
    _, states = layer.build_draft(dims("glm52"), state, 3)
    for i, each in enumerate(states):
        for row in range(2):
            position = 63 - row + i
            assert each.slot_mapping[row] == state.block_table[row, position // 64] * 64 + position % 64
    assert layer.build(dims("glm52"), 2, 64, "cpu")[1].block_table.shape == (2, 1)
    assert states[0].topk_indices is states[1].topk_indices and states[0].topk_indices is not state.topk_indices


def test_draft_hidden_is_normed_once_and_recycled(drafting):
    mtp, states, hidden = drafting("glm52")
    draft = layer.draft_step(mtp, states[0], states[0].tokens, hidden)
    total = draft.out.hidden.double() + draft.out.residual.double()
    want = total / (total.square().mean(-1, keepdim=True) + mtp.block.dims.rms_norm_eps).sqrt() * mtp.norm.double()
    assert (draft.hidden.double() - want).norm() / want.norm() < 0.01
    logits = want @ mtp.head.double().T
    assert (draft.logits.double() - logits).norm() / logits.norm() < 0.01


def test_joined_norms_of_a_draft_input():
    generator = torch.Generator().manual_seed(8)
    embeds, previous = torch.randn(3, 32, generator=generator), torch.randn(3, 32, generator=generator)
    e, h = torch.rand(32, generator=generator), torch.rand(32, generator=generator)
    got = layer.fused_eh_norm(torch.tensor([4, 0, 1]), embeds, previous, e, h, 1e-5)
    assert (got[1, :32] == 0).all()
    for row in (0, 2):
        for half, x, w in ((got[row, :32], embeds[row], e), (got[row, 32:], previous[row], h)):
            assert torch.allclose(half.double(), x.double() / (x.double().square().mean() + 1e-5).sqrt() * w, atol=1e-5)


def test_layer_without_residual_starts_from_its_input(built):
    layers, state = built("glm52", "fp8_ds_mla", 1)
    zero = layer.decoder_layer(layers[0], state, state.hidden, torch.zeros_like(state.hidden))
    assert all(torch.equal(a, b) for a, b in zip(zero, layer.decoder_layer(layers[0], state, state.hidden, None), strict=True))


def test_draft_step_without_indexer_reads_the_selection_of_the_one_before(drafting):
    mtp, states, hidden = drafting("glm52")
    first = layer.draft_step(mtp, states[0], states[0].tokens, hidden)
    selected = states[0].topk_indices.clone()
    bare = dataclasses.replace(mtp, block=dataclasses.replace(mtp.block, indexer=None))
    seen = []
    watched = [dataclasses.replace(s, on_topk=lambda indices: seen.append(indices.clone())) for s in states[1:]]
    layer.multi_step_decode(bare, watched, first.tokens, first.hidden)
    assert len(seen) == 2 and all(torch.equal(s, selected) for s in seen)


def test_every_seam_of_a_draft_is_looked_up_at_the_call(drafting, monkeypatch):
    mtp, states, hidden = drafting("glm52")
    calls = collections.Counter()
    for name in (*SEAMS, "step", "draft_step", "multi_step_decode", "fused_eh_norm"):
        original = getattr(layer, name)
        monkeypatch.setattr(layer, name, lambda *a, name=name, f=original, **k: (calls.update([name]), f(*a, **k))[1])
    layer.propose(mtp, states, hidden)
    each = dict.fromkeys((*SEAMS, "step", "draft_step", "fused_eh_norm"), 3)
    # beside the layer's own seven, eh_proj and the head; the input norm is not fused with an addition, the final one is
    assert calls == each | {"multi_step_decode": 1, "linear": 3 * 9, "bmm": 6, "fused_add_rms_norm": 6, "silu_and_mul": 6}


def test_ue8m0_scale_is_the_exact_power_of_two():
    up = torch.tensor([448.0]).nextafter(torch.tensor(torch.inf)).item()
    amax = torch.tensor([0.0, 1e-4, 1.0, 448.0, up, 896.0, 447.0, 3e38])
    values, scale = layer._ue8m0(torch.stack([amax, -amax / 3], -1))
    assert scale[:, 0].tolist() == [2.0**-22, 2.0**-22, 2.0**-8, 1.0, 2.0, 2.0, 1.0, 2.0**120]
    assert torch.equal(values.float(), (torch.stack([amax, -amax / 3], -1).double() / scale.double()).float().to(layer.FP8).float())


def test_index_conversion_matches_its_definition():
    table = torch.tensor([[7, 3], [0, 5]], dtype=torch.int32)
    indices = torch.tensor([[0, 64, -1, 127], [63, -1, 65, 1], [5, -1, -1, 70]], dtype=torch.int32)
    req = torch.tensor([1, 0, 1], dtype=torch.int32)
    got = layer.triton_convert_req_index_to_global_index(req, table, indices, 64, 4)
    want = [[-1 if i < 0 else int(table[r, i // 64]) * 64 + i % 64 for i in row] for r, row in zip(req, indices.tolist(), strict=True)]
    assert got.dtype == torch.int32 and got.tolist() == want


def test_indexer_takes_the_best_positions_of_each_request(built):
    layers, state = built("dsv32", "fp8_ds_mla", 1)
    cache, d = layers[0].indexer.k_cache, layers[0].dims
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(3, d.index_n_heads, d.index_head_dim, generator=generator).to(layer.FP8)
    w = torch.randn(3, d.index_n_heads, generator=generator)
    topk = torch.full((3, 20), -1, dtype=torch.int32)
    layer.sparse_attn_indexer(q, w, cache, state.seq_lens, state.block_table, topk)
    for i, n in enumerate(state.seq_lens.tolist()):
        keys = torch.stack([layer.read_index_k(cache, state.block_table[i, p // 64] * 64 + p % 64) for p in range(n)])
        logits = ((q[i].double() @ keys.double().T).relu() * w[i, :, None].double()).sum(0)
        assert set(topk[i].tolist()) == set(logits.topk(20).indices.tolist())
    short = torch.full((3, 400), -1, dtype=torch.int32)
    layer.sparse_attn_indexer(q, w, cache, state.seq_lens, state.block_table, short)
    assert [sorted(p for p in row if p >= 0) for row in short.tolist()] == [list(range(n)) for n in state.seq_lens.tolist()]


@pytest.mark.parametrize("kv", ["fp8_ds_mla", "fp8"])
def test_attention_over_selected_slots_matches_fp64(kv):
    d = dims("glm52", kv)
    generator = torch.Generator().manual_seed(5)
    cache = torch.empty(4, layer.BLOCK_SIZE, d.cache_width, dtype=torch.uint8)
    slots, one = torch.arange(256), torch.ones(())
    latent, rope = torch.randn(256, 512, generator=generator), torch.randn(256, 64, generator=generator)
    layer._write_mla(cache, slots, latent, rope, kv, one)
    keys = layer.read_mla(cache, slots, 512, kv, one)
    assert (keys.float() - torch.cat([latent, rope], -1)).norm() / torch.cat([latent, rope], -1).norm() < 0.03
    query = torch.randn(2, d.num_heads, 576, generator=generator).bfloat16()
    q = query.to(layer.FP8) if kv == "fp8" else query.split([512, 64], -1)
    chosen = torch.stack([torch.randperm(256, generator=generator)[:40] for _ in range(2)]).to(torch.int32)
    chosen[1, 7:] = -1
    got = layer.forward_mqa(q, cache, chosen, d.scale, 512, kv, one, one)
    query = (query.to(layer.FP8) if kv == "fp8" else query).double()
    for t, n in ((0, 40), (1, 7)):
        picked = keys[chosen[t, :n].long()].double()
        want = ((query[t] @ picked.T) * d.scale).softmax(-1) @ picked[:, :512]
        assert (got[t].double() - want).norm() / want.norm() < 0.01


@pytest.mark.parametrize("model", layer.MODELS)
def test_routing_keeps_to_the_best_groups(model):
    d = layer.MODELS[model]
    generator = torch.Generator().manual_seed(6)
    logits, bias = torch.randn(32, 256, generator=generator), torch.randn(256, generator=generator) * 0.1
    args = (8, True, d.n_group, d.topk_group, "sigmoid", d.routed_scaling_factor, bias)
    weights, ids = layer.grouped_topk(torch.empty(32, 1), logits, *args)
    for row in range(32):
        scores = logits[row].double().sigmoid()
        choice = (scores + bias).view(d.n_group, -1)
        groups = sorted(range(d.n_group), key=lambda g: -choice[g].topk(2).values.sum())[: d.topk_group]
        size = 256 // d.n_group
        allowed = [g * size + e for g in groups for e in range(size)]
        want = sorted(allowed, key=lambda e: -choice.flatten()[e])[:8]
        assert set(ids[row].tolist()) == set(want)
        expected = scores[ids[row].long()] / scores[ids[row].long()].sum() * 2.5
        assert torch.allclose(weights[row].double(), expected, rtol=1e-5)
    with pytest.raises(ValueError, match='scoring_func: expected "sigmoid"'):
        layer.grouped_topk(torch.empty(32, 1), logits, 8, True, 1, 1, "softmax", 1.0, bias)


def test_experts_match_a_loop_over_tokens():
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(5, 64, generator=generator)
    w13, w2 = torch.randn(16, 64, 64, generator=generator) / 8, torch.randn(16, 64, 32, generator=generator) / 6
    weights, ids = torch.rand(5, 4, generator=generator), torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(5)])
    got = layer.fused_experts(hidden, w13, w2, weights, ids.to(torch.int32))
    for t in range(5):
        want = sum(weights[t, j] * (w2[e] @ layer.silu_and_mul((w13[e] @ hidden[t])[None])[0]) for j, e in enumerate(ids[t]))
        assert torch.allclose(got[t], want, atol=1e-4)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(batch=0, context=5), "batch: expected at least 1, got 0"),
        (dict(batch=4, context=4), "context: expected at least 5, got 4"),
        (dict(batch=1, context=5, layers=0), "layers: expected at least 1, got 0"),
    ],
)
def test_build_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        layer.build(dims("glm52"), device="cpu", **kwargs)


def test_unknown_cache_layout_is_refused():
    with pytest.raises(ValueError, match='kv_cache_dtype: expected "fp8_ds_mla" or "fp8", got \'auto\''):
        dataclasses.replace(layer.GLM52, kv_cache_dtype="auto")


def test_head_of_a_state_is_the_same_requests():
    layers, state = layer.build(dims("glm52"), 4, 70, "cpu")
    whole = layer.step(layers, state)[0]
    part = layer.step(layers, state.head(2))[0]
    assert part.hidden.shape[0] == 2
    assert (part.hidden.float() - whole.hidden[:2].float()).norm() / whole.hidden[:2].float().norm() < 0.02
    assert (state.seq_lens - state.positions == 1).all() and len(set(state.slot_mapping.tolist())) == 4


AGAINST_VLLM = """
import importlib.util, pathlib, torch
from lldecode import layer
root = importlib.util.find_spec("vllm").submodule_search_locations[0]
spec = importlib.util.spec_from_file_location("kernels", pathlib.Path(root, "models/deepseek_v32/nvidia/kernels.py"))
vllm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vllm)
torch.manual_seed(0)
rand = lambda *s: torch.randn(*s).bfloat16()
T, H, I = 3, 4, 8
pos, cs, one = torch.tensor([0, 5, 9]), torch.rand(32, 64).bfloat16(), torch.ones(())
slot = torch.tensor([3, 70, 9])
def close(a, b, name):
    assert a.shape == b.shape and a.dtype == b.dtype, (name, a.shape, b.shape, a.dtype, b.dtype)
    a, b = a.float(), b.float()
    # the interpreter truncates to bf16, and loses the carry where fp8 rounds up to a power of two (2 becomes 1)
    step = 0.0 if name.split()[1] in ("weights", "topk") else 2**-7 if name.split()[1] == "q" or name.endswith("bf16") else 2**-3
    within = (a - b).abs() <= step * torch.maximum(a.abs(), b.abs()) + 2**-9 * (step > 0)
    assert (within | (a == 2 * b)).all() and within.float().mean() > 0.96, name
for interleave in (True, False):
    for kv in ("fp8", "fp8_ds_mla"):
        qkv, kw = rand(T, 256 + 512 + 64), rand(T, 128 + I)
        q_c, kv_c, k_pe = qkv.split([256, 512, 64], -1)
        args = (pos, q_c, rand(256), 1e-6, kv_c, rand(512), 1e-6, k_pe, cs, kw[:, :128], rand(128), rand(128), 1e-6, cs)
        got = []
        for fn in (vllm.fused_norm_rope, layer.fused_norm_rope):
            mla = torch.zeros(2, 64, 576 if kv == "fp8" else 656, dtype=torch.uint8)
            index, topk = torch.zeros(2, 64, 132, dtype=torch.uint8), torch.zeros(T, 128, dtype=torch.int32)
            q = fn(*args, topk, slot_mapping=slot, indexer_k_cache=index, mla_kv_cache=mla, mla_kv_cache_dtype=kv,
                   mla_k_scale=one, has_indexer=True, index_rope_interleave=interleave)
            slots = torch.arange(128)
            got.append((q, layer.read_mla(mla, slots, 512, kv, one), layer.read_index_k(index, slots), topk))
        for name, a, b in zip(("q", "mla", "index_k", "topk"), *got):
            close(b, a, f"fused_norm_rope {name} {kv} {interleave}")
    for quantize in (True, False):
        args = (pos, rand(T, H, 192)[..., 128:], cs, rand(T, I, 128), cs, rand(H, T, 512).transpose(0, 1), one, rand(T, 136)[:, 128:])
        kw = dict(has_indexer=True, index_rope_interleave=interleave, quantize_mqa=quantize)
        for name, a, b in zip(("index_q", "weights", "mqa_q"), vllm.fused_q(*args, 0.1, 0.2, **kw), layer.fused_q(*args, 0.1, 0.2, **kw)):
            close(b, a, f"fused_q {name} {interleave} {quantize} {'fp8' if quantize or name != 'mqa_q' else 'bf16'}")
args = (torch.tensor([0, 5, 9]), rand(T, 128), rand(T, 128), rand(128), rand(128), 1e-6)
close(layer.fused_eh_norm(*args), vllm.fused_eh_norm(*args), "fused_eh_norm bf16")
print("equal")
"""


@pytest.mark.vllm
def test_fused_steps_match_the_kernels_of_vllm(tmp_path):
    """vLLM's Triton kernels, interpreted on the CPU."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    environ = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = pathlib.Path(tmp_path, "against_vllm.py")
    script.write_text(AGAINST_VLLM)
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("model", layer.MODELS)
def test_gpu_capture_equals_eager(model):
    layers, state = layer.build(layer.MODELS[model], 4, 4096, "cuda", layers=2)
    eager = layer.step(layers, state)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer.step(layers, state)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = layer.step(layers, state)
    captured[-1].hidden.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(eager[-1][:3], captured[-1][:3], strict=True):
        assert (a.float() - b.float()).norm() / a.float().norm() < 0.02
