"""The op on a CPU: contract, refusals, dispatch. No GPU, no compiler."""

from collections.abc import Callable

import pytest
import torch

import lldecode_ll_bf16_router as router
from lldecode.testing import opcheck
from lldecode_ll_bf16_router import op, reference

BF16 = torch.bfloat16


def operands(m: int = 3, n: int = 5, k: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(m + n + k)
    return torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16)


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """Same values, two bytes past a 16-byte boundary."""
    storage = torch.empty(t.numel() + 8, dtype=t.dtype, device=t.device)
    return storage[1 : 1 + t.numel()].view(t.shape).copy_(t)


@pytest.mark.parametrize("out_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("m", [0, 1, 3, 32])
def test_cpu_is_the_reference(m: int, out_dtype: torch.dtype) -> None:
    x, weight = operands(m)
    got = router.ll_bf16_router(x, weight, out_dtype)
    assert got.shape == (m, 5) and got.dtype == out_dtype
    assert torch.equal(got, reference.ll_bf16_router(x, weight, out_dtype))


@pytest.mark.parametrize("out_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("m", [0, 3])
def test_op_contract(m: int, pdl: bool, out_dtype: torch.dtype) -> None:
    opcheck(torch.ops.lldecode.ll_bf16_router.default, (*operands(m), out_dtype, pdl))


REFUSED: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.dtype]]]] = {
    "x dtype": ("x: expected dtype", lambda x, w: (x.half(), w, torch.float32)),
    "weight dtype": ("weight: expected dtype", lambda x, w: (x, w.float(), torch.float32)),
    "out dtype": ("out_dtype: expected", lambda x, w: (x, w, torch.float16)),
    "x dimensions": ("expected two dimensions", lambda x, w: (x[0], w, torch.float32)),
    "weight dimensions": ("expected two dimensions", lambda x, w: (x, w[None], torch.float32)),
    "M": ("x: expected at most 32 rows, got 33", lambda x, w: (x.new_zeros(33, 24), w, torch.float32)),
    "N": ("weight: expected shape", lambda x, w: (x, w[:0], torch.float32)),
    "K": ("weight: expected shape", lambda x, w: (x[:, :20], w[:, :20].contiguous(), torch.float32)),
    "K of zero": ("weight: expected shape", lambda x, w: (x[:, :0], w[:, :0], torch.float32)),
    "K of x": ("x: expected shape", lambda x, w: (x[:, :16], w, torch.float32)),
    "column stride of x": ("x: expected a last stride of 1", lambda x, w: (x.new_zeros(24, 3).T, w, torch.float32)),
    "row stride of x": ("x: expected a last stride of 1", lambda x, w: (x.new_zeros(3, 28)[:, :24], w, torch.float32)),
    "row stride of weight": ("weight: expected a last stride of 1", lambda x, w: (x, w.new_zeros(5, 28)[:, :24], torch.float32)),
    "alignment of x": ("x: expected 16-byte aligned", lambda x, w: (misaligned(x), w, torch.float32)),
    "alignment of weight": ("weight: expected 16-byte aligned", lambda x, w: (x, misaligned(w), torch.float32)),
    "two devices": ("weight: expected device cpu, got meta", lambda x, w: (x, w.to("meta"), torch.float32)),
    "another kind of device": ("x: expected a CUDA or CPU tensor, got meta", lambda x, w: (x.to("meta"), w.to("meta"), torch.float32)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    reason, change = REFUSED[case]
    x, weight = operands()
    assert op.supports(x, weight, torch.float32) is None
    args = change(x, weight)
    assert reason in (op.supports(*args) or "")
    if all(t.device.type == "cpu" for t in args[:2]):
        with pytest.raises(ValueError, match=reason.split(":")[0]):
            router.ll_bf16_router(*args)


class FakeDevice:
    """What ``_cold`` asks torch and the compiler, answered without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], capturing: bool, unavailable: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        monkeypatch.setattr("lldecode.jit.unavailable", lambda: unavailable)

    def cold(self) -> str | None:
        return op._cold(torch.device("cuda", 0))


@pytest.mark.parametrize("capability", [(8, 0), (9, 1), (10, 1), (11, 0), (12, 0)])
def test_refuses_an_unproven_architecture(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    assert "compute capability 9.0, 10.0, 10.3" in (FakeDevice(monkeypatch, capability, False, None).cold() or "")
    with pytest.raises(ValueError, match="compute capability"):
        op.warmup(256, 6144, torch.float32, torch.device("cuda", 0))


@pytest.mark.parametrize("capability", op.ARCHS)
def test_accepts_a_proven_architecture(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    assert FakeDevice(monkeypatch, capability, False, None).cold() is None


def test_refuses_to_compile_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "before a CUDA graph is captured" in (FakeDevice(monkeypatch, (9, 0), True, None).cold() or "")


def test_refuses_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FakeDevice(monkeypatch, (9, 0), False, "nvidia-cutlass-dsl is not installed").cold() == "nvidia-cutlass-dsl is not installed"


@pytest.mark.parametrize(
    ("n", "k", "out_dtype", "device"), [(0, 8, torch.float32, "cuda"), (1, 8, torch.float64, "cuda"), (1, 8, BF16, "cpu")]
)
def test_warmup_refuses(n: int, k: int, out_dtype: torch.dtype, device: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        op.warmup(n, k, out_dtype, torch.device(device))


@pytest.mark.parametrize("n", [1, 3, 63, 128, 256, 384, 2000, 151_936])
@pytest.mark.parametrize("k", [8, 24, 512, 520, 2880, 6144, 7168, 7176, 65_536])
def test_every_shape_has_a_launchable_config(n: int, k: int) -> None:
    for capability in op.ARCHS:
        for m in range(1, op.MAX_M + 1):
            kind, tile, cluster, warps = op.dispatch(m, n, k, capability)
            assert 1 <= warps <= 16 and 1 <= cluster <= 8
            assert ((kind, cluster) == ("dotprod", 1) and 1 <= tile * min(m, 4) <= 32) or (kind == "splitk" and tile in (16, 32))


def test_measured_tables_end_at_the_largest_batch() -> None:
    for rows in op._MEASURED.values():
        ups = [up_to for up_to, _ in rows]
        assert ups == sorted(ups) and ups[-1] == op.MAX_M
