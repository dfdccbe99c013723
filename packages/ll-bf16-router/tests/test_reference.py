import pytest
import torch

from lldecode.testing import assert_close_to_oracle
from lldecode_ll_bf16_router import reference


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_matches_the_definition(out_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 24).bfloat16(), torch.randn(5, 24).bfloat16()
    definition = torch.stack([torch.stack([(a.double() * w.double()).sum() for w in weight]) for a in x])
    got = reference.ll_bf16_router(x, weight, out_dtype)
    assert_close_to_oracle(got, definition, torch.mm(x.float(), weight.float().T).to(out_dtype))


def test_accumulates_in_float32() -> None:
    # bf16 sums of these lose every 1 after the first 256.
    x = torch.ones(1, 1024, dtype=torch.bfloat16)
    assert reference.ll_bf16_router(x, x).item() == 1024


def test_oracle_is_float64() -> None:
    x = torch.tensor([[2.0**30, 1.0, -(2.0**30)]], dtype=torch.bfloat16)
    one = torch.ones(1, 3, dtype=torch.bfloat16)
    assert reference.ll_bf16_router(x, one, torch.float64, torch.float64).item() == 1
