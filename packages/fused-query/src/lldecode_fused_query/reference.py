"""Semantics in plain torch: results of exact arithmetic, rounded once. Slow; runs anywhere.

fp64 holds each product of a bf16 query and an fp32 cosine exactly, and a two-sum the error of their sum; rounding a number
to odd first makes the rounding that follows the only one (Boldo, Melquiond: "Emulation of FMA and correctly rounded sums").
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


def _round_to_odd(x: Tensor, error: Tensor) -> Tensor:
    """x + error, where error is what rounding left over: x if its last bit is set or nothing is left, else its neighbour."""
    even = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32) & 1 == 0
    neighbour = torch.nextafter(x, torch.where(error > 0, torch.inf, -torch.inf).to(x))
    return torch.where(even & ((error > 0) | (error < 0)) & x.isfinite(), neighbour, x)


def rotate(x: Tensor, cos_sin: Tensor, interleave: bool) -> Tensor:
    """Rotary embedding of all elements of x ``[T, heads, rope]`` by cos_sin ``[T, rope]``, in fp64 rounded to odd."""
    cos, sin = cos_sin.double()[:, None].chunk(2, -1)
    first, second = x.double().unflatten(-1, (-1, 2) if interleave else (2, -1)).unbind(-1 if interleave else -2)

    def turn(p: Tensor, q: Tensor) -> Tensor:
        total = p + q
        of_q = total - p
        return _round_to_odd(total, (p - (total - of_q)) + (q - of_q))

    turned = turn(first * cos, -second * sin), turn(second * cos, first * sin)
    return torch.stack(turned, -1 if interleave else -2).flatten(-2)


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in float8_e4m3fn: the nearest value, ties to even, saturating at 448; NaN stays NaN.

    The nearest value is looked up among the midpoints of the format times the scale, which fp64 holds exactly.

    Args:
        x: fp64, rounded to odd.
        scale: fp32, one element.
    """
    values = torch.arange(127, dtype=torch.uint8, device=x.device).view(FP8).double()
    midpoints = (values[:-1] + values[1:]) / 2 * scale.double().abs()
    code = torch.bucketize(x.abs(), midpoints)  # of the greater neighbour, at a midpoint of the lesser
    tie = (code < 126) & (x.abs() == midpoints[code.clamp(max=125)])
    code = torch.where((x / scale).isnan(), 0x7F, code + (tie & (code % 2 == 1)))
    return (code | (x.signbit() ^ scale.signbit()) * 0x80).to(torch.uint8).view(FP8)


def to_bf16(x: Tensor) -> Tensor:
    """fp64, rounded to odd, to bf16, rounded once."""
    single = x.float()
    return _round_to_odd(single, x - single.double()).to(torch.bfloat16)


def ue8m0(amax: Tensor) -> Tensor:
    """``2^ceil(log2(max(amax, 1e-4) / 448))`` in fp32, by the exponent: no logarithm is rounded. Infinity stays infinity."""
    mantissa, exponent = torch.frexp(amax.double().clamp(min=1e-4))  # 448 = 0.875 * 2^9
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - 9 + (mantissa > 0.875))
    return torch.where(amax.isinf(), torch.inf, scale).float()


def mqa_query(q_pe: Tensor, cos_sin: Tensor, ql_nope: Tensor | None, q_scale: Tensor | None) -> Tensor:
    """The MQA query ``[T, H, 512 + 64]`` in fp8 with a scale, in bf16 without; only its rotated part without `ql_nope`."""
    rope = rotate(q_pe, cos_sin, interleave=True)
    if ql_nope is None:
        return to_bf16(rope)
    if q_scale is None:
        return torch.cat([ql_nope, to_bf16(rope)], -1)
    return to_fp8(torch.cat([ql_nope.double(), rope], -1), q_scale)


def index_query(
    index_q: Tensor, cos_sin: Tensor, index_weights: Tensor, softmax_scale: float, head_scale: float, interleave: bool
) -> tuple[Tensor, Tensor]:
    """The indexer's query ``[T, I, 128]`` in fp8, and its weights ``[T, I]`` in fp32 with the query's scale folded in.

    A NaN does not take part in the maximum that sets its row's scale.
    """
    rope, rest = index_q.split([cos_sin.shape[-1], index_q.shape[-1] - cos_sin.shape[-1]], -1)
    row = torch.cat([rotate(rope, cos_sin, interleave), rest.double()], -1)
    scale = ue8m0(torch.where(row.isnan(), 0, row.abs()).amax(-1))
    unit = torch.ones((), device=row.device)
    return to_fp8(row / scale[..., None], unit), index_weights.float() * softmax_scale * head_scale * scale
