import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from lldecode.plan import Gemm
from lldecode.testing import assert_close_to_oracle, graph_replay, opcheck, poison
from lldecode_skinny_gemm import op, skinny_bmm, skinny_gemm

BF16, FP16 = torch.bfloat16, torch.float16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# N, K of real models and odd ones
REAL = [
    (2624, 6144),
    (2048, 2048),
    (2112, 7168),
    (160, 6144),
    (512, 6144),
    (6144, 256),
    (3072, 1536),
    (129, 2880),
    (17, 64),
    (1, 8),
    (63, 200),
]


def normal(*size, dtype=BF16, device="cpu", seed=0):
    return torch.empty(size, dtype=dtype, device=device).normal_(generator=torch.Generator(device).manual_seed(seed))


def check(got, x, w, residual=None):
    exact = x.double() @ w.double() + (0 if residual is None else residual.double())
    plain = x @ w if residual is None else (x.float() @ w.float() + residual.float()).to(x.dtype)
    assert_close_to_oracle(got, exact, plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", [0, 1, 3, 17, 32, 40])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_matches_reference(device, m, dtype):
    for n, k in REAL if device == "cuda" else REAL[-5:]:
        x, w = normal(m, k + 24, dtype=dtype, device=device)[:, :k], normal(n, k, dtype=dtype, device=device, seed=1) * k**-0.5
        residual = normal(m, n + 5, dtype=dtype, device=device, seed=2)[:, :n]
        for r in (None, residual):
            out = poison(torch.empty(m, 2 * n, dtype=dtype, device=device))
            assert skinny_gemm(x, w, r, out=out[:, :n]) is not None
            check(out[:, :n], x, w.T, r)
            assert out[:, n:].isnan().all()
            fresh = skinny_gemm(x, w, r)
            check(fresh, x, w.T, r)
            assert m > 16 or torch.equal(fresh, out[:, :n])  # above, cuBLAS chooses by the layout


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [1, 8, 16])
@pytest.mark.parametrize("tokens", [0, 1, 7, 16, 32, 33])
def test_absorbed_products_in_the_layouts_of_vllm(device, heads, tokens):
    nope, rope, v, latent = 192, 64, 256, 512
    kv_b = normal(heads * (nope + v), latent, device=device) * latent**-0.5
    halves = kv_b.T.view(latent, heads, nope + v)
    w_uk_t, w_uv = halves[..., :nope].permute(1, 2, 0), halves[..., nope:].transpose(0, 1)
    q = normal(tokens, heads, nope + rope, device=device, seed=1)[..., :nope].transpose(0, 1)
    check(skinny_bmm(q, w_uk_t), q, w_uk_t)
    attention = normal(tokens, heads, latent, device=device, seed=2).transpose(0, 1)
    out = poison(torch.empty(tokens, heads, v, dtype=BF16, device=device))
    skinny_bmm(attention, w_uv, out=out.transpose(0, 1))
    check(out.transpose(0, 1), attention, w_uv)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 33),
    n=st.integers(1, 300),
    k8=st.integers(1, 80),
    pad=st.integers(0, 3),
    out_pad=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_any_shape_and_stride(device, m, n, k8, pad, out_pad, seed):
    k = 8 * k8
    x, w = normal(m, k + 8 * pad, device=device, seed=seed)[:, :k], normal(n, k, device=device, seed=seed + 1)
    out = poison(torch.empty(m, n + out_pad, dtype=BF16, device=device))
    skinny_gemm(x, w, out=out[:, :n])
    check(out[:, :n], x, w.T)
    assert out[:, n:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_nan_and_infinity_stay_in_their_row_and_column(device):
    x, w = normal(5, 64, device=device), normal(24, 64, device=device, seed=1)
    x[2, 7], w[9, 3], w[11, 5] = torch.nan, torch.inf, torch.nan
    got = skinny_gemm(x, w)
    stray = ~got.isfinite()
    expected = torch.zeros_like(stray)
    expected[2], expected[:, 9], expected[:, 11] = True, True, True
    assert torch.equal(stray, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_op_contract(device):
    x, w, r = normal(3, 64, device=device), normal(16, 64, device=device), normal(3, 16, device=device)
    out = torch.empty(3, 16, dtype=BF16, device=device)
    opcheck(torch.ops.lldecode.skinny_gemm.default, (x, w, r))
    opcheck(torch.ops.lldecode.skinny_gemm.out, (x, w), {"out": out})
    opcheck(torch.ops.lldecode.skinny_gemm.default, (x[None], w.T.contiguous().T[None]))
    opcheck(torch.ops.lldecode.skinny_gemm.out, (x[None], w[None], r[None]), {"out": out[None]})


def test_a_compiled_graph_has_no_branch_on_m():
    w = normal(16, 64)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: skinny_gemm(x, w), backend=backend, fullgraph=True, dynamic=True)
    for m in (2, 17, 33, 100):
        x = normal(m, 64)
        assert torch.equal(compiled(x), skinny_gemm(x, w))
    assert len(graphs) == 1
    assert [n.target for n in graphs[0].graph.nodes if n.op == "call_function"] == [torch.ops.lldecode.skinny_gemm.default]


X, W = normal(4, 64), normal(16, 64)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((X[0], W), "x: expected shape [M, K] or [H, M, K], got [64]"),
        ((X.float(), W.float()), "x: expected torch.bfloat16 or torch.float16, got torch.float32"),
        ((X, W.half()), "weight: expected torch.bfloat16 [16, 64] on cpu, got torch.float16 [16, 64] on cpu"),
        ((X, W[:, :32]), "weight: expected torch.bfloat16 [16, 64] on cpu, got torch.bfloat16 [16, 32] on cpu"),
        ((X, W[None]), "weight: expected torch.bfloat16 ['N', 64] on cpu, got torch.bfloat16 [1, 16, 64] on cpu"),
        ((X[None], W.expand(2, 16, 64)), "weight: expected torch.bfloat16 [1, 16, 64] on cpu, got torch.bfloat16 [2, 16, 64] on cpu"),
        ((X, W, normal(4, 15)), "residual: expected torch.bfloat16 [4, 16] on cpu, got torch.bfloat16 [4, 15] on cpu"),
        ((X, W, normal(16, 4).T), "residual: expected a last dimension of stride 1, got strides (1, 4)"),
        ((X, W, None, normal(4, 17)), "out: expected torch.bfloat16 [4, 16] on cpu, got torch.bfloat16 [4, 17] on cpu"),
        ((X, W, None, normal(16, 4).T), "out: expected a last dimension of stride 1, got strides (1, 4)"),
        ((X, W, None, normal(4, 16).half()), "out: expected torch.bfloat16 [4, 16] on cpu, got torch.float16 [4, 16] on cpu"),
        ((X, W.to("meta")), "weight: expected torch.bfloat16 [16, 64] on cpu, got torch.bfloat16 [16, 64] on meta"),
        ((X.to("meta"), W.to("meta")), "x: expected a CUDA or CPU tensor, got meta"),
    ],
)
def test_refuses(args, reason):
    x, w, residual, out = (*args, *(None,) * (4 - len(args)))
    with pytest.raises(ValueError) as e:
        skinny_gemm(x, w, residual, out=out)
    assert str(e.value) == reason


WHOLE = torch.empty(4, 64, dtype=BF16)


@pytest.mark.parametrize(
    ("x", "weight", "fine"),
    [
        (WHOLE, WHOLE, True),
        (torch.empty(4, 72, dtype=BF16)[:, :64], WHOLE, True),
        (torch.empty(4, 68, dtype=BF16)[:, :64], WHOLE, False),  # rows of 136 bytes
        (torch.empty(4, 60, dtype=BF16), WHOLE, False),  # 60 elements
        (torch.empty(4, 0, dtype=BF16), WHOLE, False),
        (torch.empty(4, 72, dtype=BF16)[:, 4:68], WHOLE, False),  # starts at 8 bytes
        (torch.empty(64, 4, dtype=BF16).T, WHOLE, False),  # columns
        (WHOLE, torch.empty(64, 16, dtype=BF16).T, True),  # n-major
        (WHOLE, torch.empty(64, 12, dtype=BF16).T, False),  # rows of 24 bytes
        (WHOLE, torch.empty(2, 64, 8, dtype=BF16).mT, True),
        (WHOLE, torch.empty(4, 68, dtype=BF16)[:, :64], False),
    ],
)
def test_alignment_is_checked(x, weight, fine):
    assert (op._misaligned(x, weight) is None) == fine


def test_a_reason_names_no_address():
    with_addresses = {op._misaligned(torch.empty(4, 60, dtype=BF16), WHOLE) for _ in range(3)}
    assert with_addresses == {
        "x: expected dense rows of a multiple of 8 elements, aligned to 16 bytes, got [4, 60], strides (60, 1), 0 bytes off"
    }


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 12, 32])
def test_graph_replay_and_the_same_bits(m):
    for n, k in ((2624, 6144), (160, 6144), (512, 2880)):
        x, w = normal(m, k, device="cuda"), normal(n, k, device="cuda", seed=1)
        graph_replay(lambda x, w: skinny_gemm(x, w), [x.clone(), w.clone()], [normal(m, k, device="cuda", seed=5), w])
        first = skinny_gemm(x, w)
        assert all(torch.equal(first, skinny_gemm(x, w)) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [Gemm(2624, 6144), Gemm(160, 6144), Gemm(512, 192, 8, True)], ids=str)
@pytest.mark.parametrize("m", [1, 8, 16, 32])
def test_pdl_changes_no_bit_and_every_candidate_is_right(shape, m):
    from lldecode.tune import operands
    from lldecode_skinny_gemm.tune import configs

    x, (w, *_) = operands(shape, 1)
    x = x[:, :m].contiguous()
    for cfg in configs(132, shape, m).values():
        outs = []
        for pdl in (True, False):
            out = poison(torch.empty(shape.batch, m, shape.n, dtype=BF16, device="cuda"))
            y = x.clone()  # a kernel that writes x stands before it
            op.run(dataclasses.replace(cfg, pdl=pdl), y, w, out)
            outs.append(out)
        assert torch.equal(*outs), cfg
        check(outs[0], x, w.mT)


@pytest.mark.gpu
def test_a_cold_kernel_inside_a_capture_takes_cublas(monkeypatch):
    from lldecode.jit import NotWarm
    from lldecode_skinny_gemm.kernel import KERNEL

    def cold(*args):
        raise NotWarm("cold")

    x, w = normal(4, 2048, device="cuda"), normal(2048, 2048, device="cuda", seed=1)
    monkeypatch.setattr(KERNEL, "get", cold)
    assert torch.equal(skinny_gemm(x, w), x @ w.T)
