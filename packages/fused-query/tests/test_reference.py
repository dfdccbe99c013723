"""The reference against rational arithmetic: exact by another route."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lldecode_fused_query import reference

FP8_VALUES = [Fraction(v) for v in torch.arange(127, dtype=torch.uint8).view(reference.FP8).double().tolist()]

bf16_bits = st.integers(0, 0xFFFF).filter(lambda b: b & 0x7F80 != 0x7F80)
cosines = st.one_of(st.floats(-1, 1, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0**-60, 1 + 2.0**-23]))
scales = st.one_of(
    st.floats(2.0**-60, 2.0**60, width=32), st.integers(-60, 60).map(lambda e: 2.0**e), st.sampled_from([1.0, 0.37, 1 / 3, 448.0])
)


def bf16(bits):
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def nearest(x, values):
    """Index of the value nearest to a non-negative x; of two equally near the one with the even index."""
    return min(range(len(values)), key=lambda i: (abs(values[i] - x), i % 2))


def rotated(q, cos, sin, interleave=True):
    x = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    x[..., 0], x[..., 1 if interleave else 32] = q
    table = torch.zeros(1, 64)
    table[0, 0], table[0, 32] = cos, sin
    out = reference.rotate(x, table, interleave)
    return out[0, 0, 0], out[0, 0, 1 if interleave else 32], table


@settings(deadline=None, max_examples=400)
@given(bf16_bits, bf16_bits, cosines, cosines, scales, st.booleans())
@example(0x3F88, 0x3F80, 1.0, 2.0**-60, 1.0, True)  # a hair beside a midpoint
@example(0x3F88, 0x3F80, 1.0, -(2.0**-60), 1.0, False)
@example(0x7F7F, 0x7F7F, 1.0, -1.0, 2.0**60, True)
def test_a_rotated_quotient_is_rounded_once(a, b, cos, sin, scale, interleave):
    x, y = bf16(a), bf16(b)
    first, second, table = rotated((x, y), cos, sin, interleave)
    c, s, p, q, t = (Fraction(float(v)) for v in (table[0, 0], table[0, 32], x, y, torch.tensor(scale)))
    for got, exact in ((first, p * c - q * s), (second, q * c + p * s)):
        code = int(reference.to_fp8(got, torch.tensor(scale)).view(torch.uint8))
        assert code & 0x7F == nearest(abs(exact) / t, FP8_VALUES)
        assert exact == 0 or bool(code & 0x80) == (exact < 0)
        nearest_bf16 = float(reference.to_bf16(got))
        if math.isfinite(nearest_bf16):
            around = [torch.nextafter(reference.to_bf16(got), torch.tensor(w, dtype=torch.bfloat16)) for w in (-torch.inf, torch.inf)]
            miss = abs(Fraction(nearest_bf16) - exact)
            assert all(not v.isfinite() or abs(Fraction(float(v)) - exact) >= miss for v in around)


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.floats(0, 2.0**127, width=32), st.integers(-40, 127).map(lambda e: 1.75 * 2.0**e)), st.sampled_from([0, 1, -1]))
@example(0.0, 0)
@example(1e-4, 0)
@example(448 * 2.0**-22, 0)
@example(448 * 2.0**-22, 1)
def test_ue8m0_is_the_least_power_of_two_that_holds_the_row(amax, nudge):
    amax = math.nextafter(amax, math.inf if nudge > 0 else 0.0) if nudge else amax
    scale = float(reference.ue8m0(torch.tensor(amax, dtype=torch.float64)))
    assert math.frexp(scale)[0] == 0.5
    held = max(Fraction(amax), Fraction(1e-4))
    assert held <= 448 * Fraction(scale)
    assert held > 224 * Fraction(scale)


def test_every_fp8_value_midpoint_and_power_of_two():
    values = torch.tensor([float(v) for v in FP8_VALUES], dtype=torch.float64)
    one = torch.ones(())
    assert torch.equal(reference.to_fp8(values, one).view(torch.uint8), torch.arange(127, dtype=torch.uint8))
    midpoints = (values[1:] + values[:-1]) / 2
    even = torch.arange(126) + torch.arange(126) % 2
    assert torch.equal(reference.to_fp8(midpoints, one).view(torch.uint8), even.to(torch.uint8))
    assert torch.equal(reference.to_fp8(midpoints * (1 + 2**-50), one).view(torch.uint8), torch.arange(1, 127, dtype=torch.uint8))
    assert torch.equal(reference.to_fp8(-midpoints * (1 - 2**-50), one).view(torch.uint8), torch.arange(128, 254, dtype=torch.uint8))


@pytest.mark.parametrize("interleave", [True, False])
def test_rows_at_the_ends_of_the_range(interleave):
    rows = torch.zeros(5, 1, 128, dtype=torch.bfloat16)
    rows[1] = torch.finfo(torch.bfloat16).max
    rows[2] = 2.0**-133
    rows[3, 0, 70] = torch.nan
    rows[4, 0, 3] = torch.inf
    table = torch.cat([torch.full((5, 32), 0.8), torch.full((5, 32), 0.6)], -1)
    q, w = reference.index_query(rows, table, torch.ones(5, 1, dtype=torch.bfloat16), 1.0, 1.0, interleave)
    q = q.float()[:, 0]
    assert not q[0].any() and not q[2].any() and w[0] == w[2] == 2.0**-22
    assert q[1].isfinite().all() and w[1].isfinite() and q[1].max() > 224  # 1.4 times bf16's largest number
    assert q[3].isnan().nonzero().flatten().tolist() == [70]
    assert q[4].isnan().any() and w[4].isinf()


def test_nan_stays_nan_in_every_output():
    q_pe = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    nope = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    q_pe[..., 5] = nope[..., 7] = torch.nan
    table = torch.full((1, 64), 0.5)
    for scale in (torch.ones(()), None):
        got = reference.mqa_query(q_pe, table, nope, scale).float()[0, 0]
        assert got.isnan().nonzero().flatten().tolist() == [7, 516, 517]
    assert reference.mqa_query(q_pe, table, nope, torch.tensor(torch.nan)).float().isnan().all()


def test_values_beyond_the_range_saturate():
    x = torch.tensor([449.0, 1e30, torch.inf, -464.0001, -torch.inf], dtype=torch.float64)
    assert reference.to_fp8(x, torch.ones(())).float().tolist() == [448, 448, 448, -448, -448]
