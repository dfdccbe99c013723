"""The kernels: compiled for every architecture without a GPU, and run on one."""

import functools
import re
from collections.abc import Callable

import pytest
import torch

import lldecode_ll_bf16_router as router
from lldecode.testing import assert_close_to_oracle, cross_compile, graph_replay, opcheck, poison
from lldecode_ll_bf16_router import op, reference

BF16, FP32 = torch.bfloat16, torch.float32

# (k, rows, tokens, warps) and (k, n_tiles, m_tiles, cluster, warps): the largest of what dispatch picks, and tails of K.
LARGE = [(6144, 6, 1, 12), (8192, 8, 1, 16), (6144, 1, 1, 8, 8), (7168, 2, 4, 8, 14)]
TAILS = [(24, 4, 4, 1), (7176, 2, 4, 1, 16)]
COMPILED = [(shape, arch, True) for arch in ("sm_90a", "sm_100a", "sm_103a") for shape in LARGE]
COMPILED += [(shape, "sm_90a", True) for shape in TAILS] + [(shape, "sm_90a", False) for shape in LARGE[1:3]]


@pytest.mark.parametrize(("shape", "arch", "pdl"), COMPILED, ids=str)
def test_compiles(shape: tuple[int, ...], pdl: bool, arch: str) -> None:
    kernel = pytest.importorskip("lldecode_ll_bf16_router.kernel_dotprod" if len(shape) == 4 else "lldecode_ll_bf16_router.kernel_splitk")
    cls = kernel.Dotprod if len(shape) == 4 else kernel.SplitK
    compiled = cross_compile(f"{kernel.__name__}:compile", cls(*shape, FP32, pdl), arch)
    assert compiled.local_bytes == 0

    loads = re.findall(r"ld\.global\S*", compiled.ptx)
    assert loads and all(".v4.b32" in load for load in loads)
    assert ".nc" not in compiled.ptx
    code = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*)", compiled.sass)
    names = ("LDG", "ACQBULK", "PREEXIT", "STG", "EXIT")
    at = {name: [i for i, opcode in enumerate(code) if opcode.split(".")[0] == name] for name in names}
    assert all(".128" in code[i] for i in at["LDG"])
    assert ("griddepcontrol.wait" in compiled.ptx, "griddepcontrol.launch_dependents" in compiled.ptx) == (pdl, pdl)
    assert (len(at["ACQBULK"]), len(at["PREEXIT"])) == (pdl, pdl)
    if pdl:
        (wait,) = at["ACQBULK"]
        assert wait < min(at["STG"] + at["EXIT"])
        weights = 2 * shape[1] if cls.__name__ == "SplitK" else shape[1]
        early = sum(i < wait for i in at["LDG"])
        assert early and early % weights == 0  # whole steps of weights are in flight before the wait,
        assert len(at["LDG"]) > early  # and x is read after it
    if cls.__name__ == "SplitK" and shape[3] > 1:
        assert "barrier.cluster.wait" in compiled.ptx and "st.async" in compiled.ptx


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(m, k, device="cuda", generator=g).to(BF16)
    return x, torch.randn(n, k, device="cuda", generator=g).mul_(k**-0.5).to(BF16)


def check(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, got: torch.Tensor) -> None:
    oracle = reference.ll_bf16_router(x, weight, torch.float64, torch.float64)
    assert_close_to_oracle(got, oracle, reference.ll_bf16_router(x, weight, out_dtype))


def run_on_poison(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The caching allocator hands the freed, poisoned block to the next output of that size."""
    like = call()
    block = poison(torch.empty_like(like)).data_ptr()
    out = call()
    assert out.data_ptr() == block
    return out


SHAPES = [(n, k) for n in (1, 3, 63, 129, 256) for k in (8, 24, 520, 2880, 7176)] + [(256, 6144), (384, 7168), (256, 4096), (128, 2880)]


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [FP32, BF16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matches_reference(n: int, k: int, out_dtype: torch.dtype) -> None:
    for m in (1, 2, 3, 8, 17, 32):
        # Small outputs are drawn often enough that the largest error of the baseline means something.
        draws = [operands(m, n, k, seed) for seed in range(max(1, min(64, 1024 // (m * n))))]
        got = [run_on_poison(functools.partial(router.ll_bf16_router, x, w, out_dtype)) for x, w in draws]
        oracle = [reference.ll_bf16_router(x, w, torch.float64, torch.float64) for x, w in draws]
        baseline = [reference.ll_bf16_router(x, w, out_dtype) for x, w in draws]
        assert_close_to_oracle(torch.cat(got), torch.cat(oracle), torch.cat(baseline))


@pytest.mark.gpu
def test_every_m() -> None:
    x, weight = operands(32, 384, 7168)
    for m in range(33):
        got = router.ll_bf16_router(x[:m], weight, pdl=True)
        assert got.shape == (m, 384) and got.dtype == FP32
        if m:
            check(x[:m], weight, FP32, got)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 4, 32])
def test_strided_rows(m: int) -> None:
    x, weight = operands(m, 256, 6144)
    wide_x, wide_w = (
        torch.full((m, 6144 + 136), float("nan"), device="cuda", dtype=BF16),
        torch.full((256, 6152), float("nan"), device="cuda", dtype=BF16),
    )
    wide_x[:, 128:-8], wide_w[:, 8:] = x, weight
    got = router.ll_bf16_router(wide_x[:, 128:-8], wide_w[:, 8:])
    assert torch.equal(got, router.ll_bf16_router(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(3, 63, 8), (1, 256, 6144), (5, 256, 7176), (20, 63, 2880)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_stay_in_their_row(m: int, n: int, k: int, value: float) -> None:
    x, weight = operands(m, n, k)
    clean = router.ll_bf16_router(x, weight)
    for row in {0, m // 2, m - 1}:
        bad = x.clone()
        bad[row, k - 1] = value
        got = router.ll_bf16_router(bad, weight)
        others = torch.arange(m, device="cuda") != row
        assert torch.equal(got[others], clean[others])
        assert torch.equal(got[row], (value * weight[:, k - 1]).float()) if value == value else got[row].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "out_dtype", "pdl"), [(0, FP32, False), (1, FP32, True), (5, BF16, False)])
def test_op_contract(m: int, out_dtype: torch.dtype, pdl: bool) -> None:
    opcheck(torch.ops.lldecode.ll_bf16_router.default, (*operands(m, 63, 520), out_dtype, pdl))


@pytest.mark.gpu
def test_empty_launches_nothing() -> None:
    x, weight = operands(0, 256, 6144)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = router.ll_bf16_router(x, weight, BF16)
        torch.cuda.synchronize()
    assert out.shape == (0, 256) and out.dtype == BF16
    assert not [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
def test_refuses_a_misaligned_view() -> None:
    _, weight = operands(4, 256, 6144)
    view = torch.empty(4 * 6144 + 8, device="cuda", dtype=BF16)[1 : 1 + 4 * 6144].view(4, 6144)
    with pytest.raises(ValueError, match="x: expected 16-byte aligned data, got a view that is 2 bytes off"):
        router.ll_bf16_router(view, weight)


@pytest.mark.gpu
def test_refuses_a_cold_kernel_inside_a_capture() -> None:
    x, weight = operands(9, 17, 5136)  # no other test compiles this one
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        reason = op.supports(x, weight, FP32)
        torch.empty(1, device="cuda").zero_()
    assert reason and "before a CUDA graph is captured" in reason
    op.warmup(17, 5136, FP32, x.device, ms=[9])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert op.supports(x, weight, FP32) is None
        router.ll_bf16_router(x, weight)


@pytest.mark.gpu
def test_warmup_covers_every_m(monkeypatch: pytest.MonkeyPatch) -> None:
    op.warmup(256, 6144, BF16, torch.device("cuda"), pdl=True)
    monkeypatch.setattr(op, "_compile", lambda plan: pytest.fail(f"compiled {plan} after the warm-up"))
    x, weight = operands(32, 256, 6144)
    for m in range(1, 33):
        router.ll_bf16_router(x[:m], weight, BF16, pdl=True)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("m", [1, 4, 32])
def test_graph_replay(m: int, pdl: bool) -> None:
    graph_replay(functools.partial(router.ll_bf16_router, pdl=pdl), operands(m, 256, 6144), operands(m, 256, 6144, seed=1))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 32])
def test_deterministic(m: int) -> None:
    x, weight = operands(m, 384, 7168)
    first = router.ll_bf16_router(x, weight, pdl=True)
    for _ in range(200):
        assert torch.equal(router.ll_bf16_router(x, weight, pdl=True), first)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 4, 16, 32])
def test_pdl_bitwise(m: int) -> None:
    """The late-wait detector: with PDL the kernel starts while a slow producer has yet to write x and to read the old output."""
    x, weight = operands(m, 256, 6144)
    expected = router.ll_bf16_router(x, weight)
    stale = torch.full_like(x, float("nan"))
    for _ in range(20):
        stale.fill_(float("nan"))
        torch.cuda._sleep(200_000)
        stale.copy_(x)
        outs = [router.ll_bf16_router(stale, weight, pdl=True) for _ in range(8)]
        assert all(torch.equal(out, expected) for out in outs)
    # Each launched early by the one before, whose output it reads.
    square = torch.randn(1024, 1024, device="cuda").mul_(1 / 32).to(BF16)
    chains = {}
    for pdl in (False, True):
        y = x[:, :1024].contiguous()
        for _ in range(50):
            y = router.ll_bf16_router(y, square, BF16, pdl)
        chains[pdl] = y
    assert torch.equal(chains[True], chains[False])


@pytest.mark.gpu
def test_reads_the_current_stream_at_each_launch() -> None:
    x, weight = operands(4, 256, 6144)
    expected = router.ll_bf16_router(x, weight)
    late, side = torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        got = router.ll_bf16_router(late, weight)
    side.synchronize()
    assert torch.equal(got, expected)
