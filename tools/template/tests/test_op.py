import pytest
import torch

from lldecode.testing import assert_close_to_oracle, opcheck
from lldecode_example_noun import op, reference


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 17), (2, 3, 129)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matches_reference(shape, dtype):
    x = torch.randn(shape).to(dtype)
    assert_close_to_oracle(op.example_noun(x), 2 * x.double(), reference.example_noun(x))


def test_op_contract():
    opcheck(torch.ops.lldecode.example_noun.default, (torch.randn(3, 17),))


def test_refuses_integers():
    with pytest.raises(ValueError, match=r"x: expected a floating-point dtype, got torch\.int32"):
        op.example_noun(torch.ones(3, dtype=torch.int32))
