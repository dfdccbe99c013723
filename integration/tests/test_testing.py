"""The helpers must fail where a kernel is wrong."""

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lldecode import testing

KERNELS = """
import cutlass
from cutlass import Float32, Int32, cute


@cute.kernel
def add(mX: cute.Tensor, n: cutlass.Constexpr):
    i, _, _ = cute.arch.thread_idx()
    mX[i] = mX[i] + n


@cute.kernel
def gather(mX: cute.Tensor, mI: cute.Tensor):
    i, _, _ = cute.arch.thread_idx()
    rX = cute.make_rmem_tensor(64, Float32)
    # The indices are known at run time only, so the array cannot be in registers.
    for k in range(64):
        rX[mI[k]] = mX[k]
    mX[i] = rX[mI[i]]


@cute.jit
def launch_add(mX: cute.Tensor, n: cutlass.Constexpr, stream):
    add(mX, n).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def launch_gather(mX: cute.Tensor, mI: cute.Tensor, stream):
    gather(mX, mI).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


def fake(dtype):
    return cute.runtime.make_fake_compact_tensor(dtype, (64,), assumed_align=16)


def stream():
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


def in_registers(n):
    return cute.compile(launch_add, fake(Float32), n, stream(), options="--enable-tvm-ffi")


def in_local_memory(_):
    return cute.compile(launch_gather, fake(Float32), fake(Int32), stream(), options="--enable-tvm-ffi")


def broken(_):
    raise RuntimeError("no such tile")
"""

# Cross-compiling


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("kernels")
    (path / "testing_kernels.py").write_text(KERNELS)
    sys.path.insert(0, str(path))
    yield
    sys.path.remove(str(path))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_cross_compile(arch: str) -> None:
    compiled = testing.cross_compile("testing_kernels:in_registers", 3, arch)
    assert f".target {arch}" in compiled.ptx
    assert "0f40400000" in compiled.ptx, "3.0f, the config's constant"
    assert f".target\t{arch}" in compiled.sass and "FADD" in compiled.sass
    assert compiled.local_bytes == 0


def test_cross_compile_of_another_config() -> None:
    compiled = testing.cross_compile("testing_kernels:in_registers", 5, "sm_90a")
    assert "0f40A00000" in compiled.ptx


def test_local_bytes_shows_an_array_outside_registers() -> None:
    compiled = testing.cross_compile("testing_kernels:in_local_memory", 0, "sm_90a")
    assert compiled.local_bytes >= 64 * 4
    assert "STL" in compiled.sass and "STL" not in testing.cross_compile("testing_kernels:in_registers", 3, "sm_90a").sass


def test_cross_compile_names_the_error_and_goes_on() -> None:
    with pytest.raises(RuntimeError, match="testing_kernels:broken: 7: RuntimeError: no such tile"):
        testing.cross_compile("testing_kernels:broken", 7, "sm_90a")
    with pytest.raises(RuntimeError, match="no_such_module"):
        testing.cross_compile("no_such_module:x", 7, "sm_90a")
    assert testing.cross_compile("testing_kernels:in_registers", 7, "sm_90a").local_bytes == 0


def test_cross_compile_imports_what_became_importable_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testing.cross_compile("testing_kernels:in_registers", 3, "sm_90a")
    (tmp_path / "later_kernels.py").write_text("from testing_kernels import in_registers\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert testing.cross_compile("later_kernels:in_registers", 3, "sm_90a").local_bytes == 0


def test_nvdisasm_comes_from_the_locked_package() -> None:
    files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    assert Path(testing._nvdisasm()) in {Path(str(f.locate())) for f in files}


# The error bound


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A right result, the float64 oracle, and plain torch's result, of a product whose sums round."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    oracle = a.double() @ b.double()
    return oracle.to(dtype), oracle, a @ b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_results_pass(dtype: torch.dtype) -> None:
    got, oracle, baseline = case(dtype)
    testing.assert_close_to_oracle(got, oracle, baseline)
    testing.assert_close_to_oracle(baseline, oracle, baseline)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_wrong_element_fails_and_is_named(dtype: torch.dtype) -> None:
    got, oracle, baseline = case(dtype)
    got[3, 5] += 20 * torch.finfo(dtype).eps * oracle.abs().max()
    with pytest.raises(AssertionError, match=r"worst of \d+ of 4096 elements at \(3, 5\): oracle .* torch .* got "):
        testing.assert_close_to_oracle(got, oracle, baseline)


def test_small_error_everywhere_fails_by_norm() -> None:
    """Each element is within its bound, but all of them together are not."""
    oracle = torch.ones(1000, dtype=torch.float64)
    baseline = oracle.float()
    baseline[0] += 1e-3
    got = oracle.float() + 1e-4
    with pytest.raises(AssertionError, match="norm of the error"):
        testing.assert_close_to_oracle(got, oracle, baseline)


def test_small_elements_have_a_small_bound() -> None:
    """The bound of an element scales with that element, not with the largest."""
    oracle = torch.tensor([1000.0] * 100 + [1e-3], dtype=torch.float64)
    got = oracle.float()
    got[-1] = 2e-3
    with pytest.raises(AssertionError, match=r"error of an element.*at \(100,\)"):
        testing.assert_close_to_oracle(got, oracle, oracle.float())


@pytest.mark.parametrize("elements", [100, 1], ids=["by norm", "by element"])
def test_error_of_twice_plain_torch_is_the_limit(elements: int) -> None:
    oracle = torch.ones(100, dtype=torch.float64)
    baseline, right, wrong = (oracle.float() for _ in range(3))
    baseline += 1e-3
    right[:elements] -= 1.99e-3
    wrong[:elements] -= 2.01e-3
    testing.assert_close_to_oracle(right, oracle, baseline)
    with pytest.raises(AssertionError):
        testing.assert_close_to_oracle(wrong, oracle, baseline)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_one_unit_in_the_last_place_passes_where_torch_is_exact(dtype: torch.dtype) -> None:
    oracle = torch.ones(8, dtype=torch.float64)
    step = torch.finfo(dtype).eps
    testing.assert_close_to_oracle((oracle + step).to(dtype), oracle, oracle.to(dtype))
    with pytest.raises(AssertionError):
        testing.assert_close_to_oracle((oracle + 2 * step).to(dtype), oracle, oracle.to(dtype))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("oracle", "got"),
    [(1.0, NAN), (1.0, INF), (NAN, 1.0), (INF, 1.0), (INF, -INF), (NAN, INF), (INF, NAN), (1e300, 65504.0)],
    ids=str,
)
def test_nan_and_infinity_must_agree(oracle: float, got: float) -> None:
    values = [torch.tensor([0.5, x, 2.0], dtype=torch.float64) for x in (oracle, got)]
    want = values[0].half()
    testing.assert_close_to_oracle(want.clone(), values[0], want)
    with pytest.raises(AssertionError, match=r"NaN or infinity; worst of 1 of 3 elements at \(1,\)"):
        testing.assert_close_to_oracle(values[1].half(), values[0], want)


def test_overflow_of_torch_excuses_nothing() -> None:
    oracle = torch.ones(4, dtype=torch.float64)
    baseline = torch.tensor([INF, 1, 1, 1], dtype=torch.half)
    with pytest.raises(AssertionError):
        testing.assert_close_to_oracle(torch.full((4,), 2.0, dtype=torch.half), oracle, baseline)


def test_integers_are_exact() -> None:
    want = torch.arange(6).reshape(2, 3)
    testing.assert_close_to_oracle(want.clone(), want, want)
    got = want.clone()
    got[1, 2] += 1
    with pytest.raises(AssertionError, match=r"integers differ; worst of 1 of 6 elements at \(1, 2\)"):
        testing.assert_close_to_oracle(got, want, want)


def test_shape_and_dtype_must_agree() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(AssertionError, match="shape"):
        testing.assert_close_to_oracle(x.T, x.double(), x)
    with pytest.raises(AssertionError, match="dtype"):
        testing.assert_close_to_oracle(x.half(), x.double(), x)


def test_empty_passes() -> None:
    x = torch.zeros(0, 3)
    testing.assert_close_to_oracle(x, x.double(), x)


# Poison


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_poisoned_floats_are_nan(dtype: torch.dtype) -> None:
    assert testing.poison(torch.zeros(3, 4, dtype=dtype)).double().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_poisoned_integers_are_0xab(dtype: torch.dtype) -> None:
    assert testing.poison(torch.zeros(3, 4, dtype=dtype)).view(torch.uint8).eq(0xAB).all()


def test_poison_stays_in_the_view() -> None:
    x = torch.zeros(3, 4)
    testing.poison(x[:, 1:3])
    assert x.isnan().sum() == 6 and not x[:, [0, 3]].isnan().any()


def test_poisoned_bool() -> None:
    assert testing.poison(torch.zeros(3, dtype=torch.bool)).all()


# Graph replay


class Graph:
    """Stands in for a CUDA graph: a replay runs what the test says."""

    replay: Callable[[], None]


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    class NoStream:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    for name in ("Stream", "current_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: NoStream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return Graph


class Doubled:
    """Doubles x into a new tensor and counts in n."""

    def __init__(self, x: torch.Tensor, n: torch.Tensor) -> None:
        self.x, self.n = x, n
        self.outs: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor, n: torch.Tensor, scale: float) -> torch.Tensor:
        n += 1
        self.outs.append(x * scale)
        return self.outs[-1]


def test_graph_that_reads_its_inputs_passes(graph: type[Graph]) -> None:
    fn = Doubled(torch.ones(3), torch.zeros(1))

    def replay(_: Any) -> None:
        fn.n += 1
        fn.outs[1].copy_(fn.x * 2)

    graph.replay = replay
    testing.graph_replay(fn, [fn.x, fn.n, 2.0], [torch.full((3,), 7.0), torch.full((1,), 4.0), 2.0])


def test_graph_with_stale_data_fails(graph: type[Graph]) -> None:
    fn = Doubled(torch.ones(3), torch.zeros(1))

    def replay(_: Any) -> None:
        fn.n += 1
        fn.outs[1].copy_(torch.full((3,), 2.0))

    graph.replay = replay
    with pytest.raises(AssertionError, match="replayed output 0"):
        testing.graph_replay(fn, [fn.x, fn.n, 2.0], [torch.full((3,), 7.0), torch.full((1,), 4.0), 2.0])


def test_graph_that_writes_nothing_fails(graph: type[Graph]) -> None:
    """Also where what was there before is right."""
    fn = Doubled(torch.ones(3), torch.zeros(1))

    def replay(_: Any) -> None:
        fn.n += 1

    graph.replay = replay
    with pytest.raises(AssertionError, match="replayed output 0"):
        testing.graph_replay(fn, [fn.x, fn.n, 0.0], [torch.full((3,), 7.0), torch.full((1,), 4.0), 0.0])


def test_graph_that_misses_an_input_it_writes_fails(graph: type[Graph]) -> None:
    fn = Doubled(torch.ones(3), torch.zeros(1))
    graph.replay = lambda _: fn.outs[1].copy_(fn.x * 2)
    with pytest.raises(AssertionError, match="replayed input 1"):
        testing.graph_replay(fn, [fn.x, fn.n, 2.0], [torch.full((3,), 7.0), torch.full((1,), 4.0), 2.0])


@pytest.mark.gpu
def test_gpu_graph_replay() -> None:
    x, out = torch.ones(64, device="cuda"), torch.empty(64, device="cuda")
    testing.graph_replay(lambda x: x * 2 + 1, [x], [torch.full_like(x, 7)])
    testing.graph_replay(lambda x, out: out.copy_(x), [x, out], [torch.full_like(x, 7), torch.zeros_like(x)])

    calls: list[int] = []

    def counts(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    with pytest.raises(AssertionError, match="replayed output 0"):
        testing.graph_replay(counts, [x], [torch.full_like(x, 7)])


# The op contract


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_opcheck() -> None:
    op = torch.library.custom_op("lldecode_testing::right", add_one, mutates_args=())
    op.register_fake(torch.empty_like)
    testing.opcheck(op, [torch.zeros(3)])


def test_opcheck_finds_a_wrong_fake() -> None:
    op = torch.library.custom_op("lldecode_testing::wrong_fake", add_one, mutates_args=())
    op.register_fake(lambda x: x.new_empty(x.shape[0] + 1))
    with pytest.raises(Exception, match=r"wrong_fake|fake|shape|size"):
        testing.opcheck(op, [torch.zeros(3)])


def test_opcheck_finds_a_hidden_write() -> None:
    def fill(x: torch.Tensor) -> torch.Tensor:
        x.zero_()
        return x + 1

    op = torch.library.custom_op("lldecode_testing::hidden_write", fill, mutates_args=())
    op.register_fake(torch.empty_like)
    with pytest.raises(Exception, match=r"mutat|schema|Argument"):
        testing.opcheck(op, [torch.ones(3)])
