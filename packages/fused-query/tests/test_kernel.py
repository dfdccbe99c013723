"""The kernel as compiled for each architecture, and, run by the emulator, its results."""

import dataclasses
import re

import pytest
import torch

from lldecode.testing import cross_compile
from lldecode_fused_query import op
from lldecode_fused_query.kernel import Config

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
FP8 = Config("fp8", True, True, torch.int64, torch.float32, 16, True)
BF16 = Config("bf16", True, False, torch.int64, torch.bfloat16, 16, True)
ROPE = Config("rope", False, False, torch.int32, torch.float32, 2, False)


def build(cfg, arch="sm_90a"):
    return cross_compile("lldecode_fused_query.kernel:build", cfg, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("cfg", "wide_loads"), [(FP8, 2 + 3 + 4), (BF16, 2 + 1 + 1)], ids=["fp8", "bf16"])
def test_compiles(cfg, wide_loads, arch):
    got = build(cfg, arch)
    assert got.local_bytes == 0
    assert len(re.findall(r"LDG\.E\.128", got.sass)) == wide_loads  # of the latent, rotary and indexer warps
    assert f".target {arch}" in got.ptx
    wait, launch = got.ptx.index("griddepcontrol.wait"), got.ptx.index("griddepcontrol.launch_dependents")
    assert wait < launch < min(got.ptx.index("ld.global"), got.ptx.index("st.global"))
    assert not re.search(r"\b(bra|ret)\b", got.ptx[:wait])
    assert "ftz" not in got.ptx


def test_pdl_is_a_launch_attribute_and_a_wait_and_nothing_else():
    off = build(dataclasses.replace(FP8, pdl=False))
    assert "griddepcontrol" not in off.ptx

    def code(compiled):
        lines = compiled.ptx[compiled.ptx.index("\n{") :].splitlines()
        return [re.sub(r"kernel_cutlass\w*|%[a-z]+\d+", "", x) for x in lines if "griddepcontrol" not in x and "inline asm" not in x]

    assert code(off) == code(build(FP8))


@pytest.mark.parametrize("raw", [False, True], ids=["normal", "any-bits"])
@pytest.mark.parametrize(
    ("cfg", "shape", "kw"),
    [
        (FP8, (2, 3, 3), {}),
        (FP8, (1, 3, 1), {"q_scale": 0.37}),
        (FP8, (1, 1, 2), {"q_scale": 2.0**-9}),
        (dataclasses.replace(FP8, interleave=False), (1, 5, 3), {"q_scale": 1e-20}),
        (BF16, (2, 5, 9), {}),
        (ROPE, (2, 3, 0), {"shift": 1}),
    ],
)
def test_emulated_is_exact(cases, cfg, shape, kw, raw):
    case = cases.make_case(*shape, cfg.output, interleave=cfg.interleave, cos_sin=cfg.cos_sin, raw=raw, **kw)
    case.positions = case.positions.to(cfg.positions)
    padding = cases.as_bits(case.padding)
    cases.emulate(case, build(cfg).ptx)
    assert cases.differences(case, cases.run_reference(case)) == [0] * len(case.outputs)
    assert torch.equal(cases.as_bits(case.padding), padding)


@pytest.mark.parametrize("q_scale", [1.0, 1 / 1.0625, 1 / 1.1875, 1 / 1.3125, 1 / 1.4375])
@pytest.mark.parametrize("cfg", [FP8, dataclasses.replace(FP8, output="bf16", interleave=False)], ids=["fp8", "bf16"])
def test_a_hair_beside_a_midpoint_is_not_a_tie(cases, cfg, q_scale):
    """Where rounding to fp32 first gives the midpoint itself, which then goes to the even neighbour."""
    case = cases.make_case(2, 2, 2, cfg.output, interleave=cfg.interleave, q_scale=q_scale)
    midpoints = (1 + torch.arange(16) / 8 + 1 / 16) if cfg.output == "fp8" else (1 + torch.arange(16) / 128 + 1 / 256)
    case.cos_sin.fill_(2.0**-60)[:, :32] = 1
    case.cos_sin[case.positions[0], 32:] *= -1
    for x, pair in ((case.q_pe, True), (case.index_q, cfg.interleave)):
        first, second = (x[..., 0:64:2], x[..., 1:64:2]) if pair else (x[..., :32], x[..., 32:64])
        first.copy_(midpoints.repeat(2) * 16)
        second.copy_(first)
    if cfg.output == "bf16":  # bf16 queries hold no midpoint of bf16: the sum of two does
        case.cos_sin[:, :32], case.q_pe[..., 0::2], case.q_pe[..., 1::2] = 1 + 2.0**-8, 1.0, 2.0**-60
        case.cos_sin[:, 32:] = case.cos_sin[:, 32:].sign()
    case.ql_nope.copy_(torch.cat([midpoints, 1 / 2 ** torch.arange(16)]).repeat(16))
    cases.emulate(case, build(cfg).ptx)
    assert cases.differences(case, cases.run_reference(case)) == [0] * len(case.outputs)


def test_a_product_that_fp32_rounds_to_a_midpoint_is_not_a_tie(cases):
    case = cases.make_case(1, 1, 1, interleave=True)
    midpoints = 1 + torch.arange(32) % 16 / 8 + 1 / 16
    case.cos_sin.zero_()[:, :32] = midpoints / 3
    for x in (case.q_pe, case.index_q):
        x.zero_()[..., 0:64:2] = 3 * 2.0**4
        x[..., 1:64:2] = -3 * 2.0**3
    cases.emulate(case, build(FP8).ptx)
    assert cases.differences(case, cases.run_reference(case)) == [0, 0, 0]


def plant(x, pair, interleave, first, second):
    """Two elements of rows that rotate with each other."""
    x[..., 2 * pair if interleave else pair], x[..., 2 * pair + 1 if interleave else 32 + pair] = first, second


@pytest.mark.parametrize("cfg", [FP8, dataclasses.replace(FP8, output="bf16", interleave=False)], ids=["fp8", "bf16"])
def test_a_single_lane_in_doubt(cases, cfg):
    """Its warp settles it; without that the result is wrong, and without the lane no warp is in doubt."""
    tie = 1.0625 if cfg.output == "fp8" else 1.0

    def case(doubtful):
        case = cases.make_case(1, 4, 4, cfg.output, interleave=cfg.interleave)
        table = case.cos_sin[case.positions[0]]
        table[7], table[32 + 7] = (1, 2.0**-60) if cfg.output == "fp8" else (1 + 2.0**-8, 2.0**-60)
        plant(case.q_pe, 7, True, 1.5, 1.5)
        plant(case.index_q, 7, cfg.interleave, 1.5, 1.5)
        if doubtful:  # just under the midpoint, and just over
            plant(case.q_pe[0, 2], 7, True, tie, tie)
            plant(case.index_q[0, 1], 7, cfg.interleave, 1.0625 / table[7], 1.0625 / table[7])
        return case

    ptx = build(cfg).ptx
    plain, settled, fast = case(False), case(True), case(True)
    assert cases.emulate(plain, ptx) == 0
    assert cases.differences(plain, cases.run_reference(plain)) == [0, 0, 0]
    assert cases.emulate(settled, ptx) == (2 if cfg.output == "fp8" else 1)
    expected = cases.run_reference(settled)
    assert cases.differences(settled, expected) == [0, 0, 0]
    cases.emulate(fast, ptx, doubt=False)
    assert cases.differences(fast, expected) == [1, int(cfg.output == "fp8"), 0]


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize(("sign", "doubt"), [(1, True), (0, True), (-1, True), (1, False)])
def test_a_maximum_at_the_threshold_of_the_scale(cases, interleave, sign, doubt):
    """1.75 * 2^4 takes a scale of 2^-4, what is greater by less than fp32 tells takes 2^-3."""
    case = cases.make_case(1, 1, 4, interleave=interleave)
    case.cos_sin[:, 9], case.cos_sin[:, 32 + 9] = 1, -sign * 2.0**-60
    plant(case.q_pe, 9, True, 1, 0)
    plant(case.index_q, 9, interleave, 1, 0)
    plant(case.index_q[0, 2], 9, interleave, 28, 1)
    case.index_weights.fill_(1)
    votes = cases.emulate(case, build(dataclasses.replace(FP8, interleave=interleave)).ptx, doubt)
    expected = cases.run_reference(case)
    scale = expected[2][0, 2] / (case.scales["softmax_scale"] * case.scales["head_scale"])
    assert scale.item() == pytest.approx(2.0**-3 if sign > 0 else 2.0**-4)
    weights = int((case.idx_weights_out != expected[2]).sum())
    assert (votes, weights) == ((2, 0) if doubt else (0, 1))


@pytest.mark.parametrize("interleave", [True, False])
def test_every_lane_of_a_row_follows_its_scale(cases, interleave):
    """Fp32 puts the maximum on the threshold, exact arithmetic above it: another lane was sure only at the smaller scale."""
    case = cases.make_case(1, 1, 4, interleave=interleave)
    for pair in (9, 20):
        case.cos_sin[:, pair], case.cos_sin[:, 32 + pair] = 1, -(2.0**-60)
        plant(case.q_pe, pair, True, 1, 0)
        plant(case.index_q, pair, interleave, 1, 0)
    plant(case.index_q[0, 2], 9, interleave, 28, 1)
    plant(case.index_q[0, 2], 20, interleave, 2.0**-13, 1)
    case.index_weights.fill_(1)
    cases.emulate(case, build(dataclasses.replace(FP8, interleave=interleave)).ptx)
    assert cases.differences(case, cases.run_reference(case)) == [0, 0, 0]


@pytest.mark.parametrize("interleave", [True, False])
def test_every_lane_of_a_row_whose_maximum_overflows_fp32_follows_its_scale(cases, interleave):
    """1.4 times bf16's largest takes a scale of 2^120; beside it, what is a hair above a midpoint of that scale."""
    case = cases.make_case(1, 1, 4, interleave=interleave)
    largest = torch.finfo(torch.bfloat16).max
    for pair, cos, sin in ((9, 0.8, 0.6), (20, 1, -(2.0**-60))):
        case.cos_sin[:, pair], case.cos_sin[:, 32 + pair] = cos, sin
        plant(case.q_pe, pair, True, 1, 0)
    plant(case.index_q[0, 2], 9, interleave, largest, -largest)
    plant(case.index_q[0, 2], 20, interleave, 17 * 2.0**120, 2.0**100)
    case.index_weights.fill_(1)
    cases.emulate(case, build(dataclasses.replace(FP8, interleave=interleave)).ptx)
    expected = cases.run_reference(case)
    scale = expected[2][0, 2] / (case.scales["softmax_scale"] * case.scales["head_scale"])
    assert scale.item() == pytest.approx(2.0**120)
    assert cases.differences(case, expected) == [0, 0, 0]


@pytest.mark.parametrize(("interleave", "largest", "votes"), [(True, 29.0, 0), (False, 28.0, 2)])
def test_only_the_maximum_of_a_row_makes_its_scale_doubtful(cases, interleave, largest, votes):
    """A rotation on a threshold beside another element that is larger, or as large as fp32 makes the rotation."""
    case = cases.make_case(1, 1, 4, interleave=interleave)
    case.cos_sin[:, 9], case.cos_sin[:, 32 + 9] = 1, -(2.0**-60)
    plant(case.q_pe, 9, True, 1, 0)
    plant(case.index_q, 9, interleave, 1, 0)
    plant(case.index_q[0, 2], 9, interleave, 28, 1)
    case.index_q[0, 2, 77] = largest
    case.index_weights.fill_(1)
    assert cases.emulate(case, build(dataclasses.replace(FP8, interleave=interleave)).ptx) == votes
    assert cases.differences(case, cases.run_reference(case)) == [0, 0, 0]


def test_a_rotation_that_cancels(cases):
    """p * c - q * s with products that differ in their last bits: the error of an fp32 product is all that is left, or much of it."""
    case = cases.make_case(1, 4, 4)
    g = torch.Generator().manual_seed(1)
    case.cos_sin[:, :32] = torch.rand(50, 32, generator=g) + 1
    case.cos_sin[:, 32:] = case.cos_sin[:, :32] * (1 + torch.randint(-64, 64, (50, 32), generator=g) * 2.0**-23)
    for x in (case.q_pe, case.index_q):
        x[..., 1:64:2] = x[..., 0:64:2]
    case.q_scale.fill_(2.0**-22)
    cases.emulate(case, build(FP8).ptx, doubt=False)
    expected = cases.run_reference(case)
    assert (case.mqa_output[..., 512::2] == expected[0][..., 512::2]).float().mean() > 0.99
    cases.emulate(case, build(FP8).ptx)
    assert cases.differences(case, expected) == [0, 0, 0]


def test_subnormal_results_are_exact(cases):
    """2.5 units of the smallest bf16, and a hair: fp32 cannot tell it from the midpoint."""
    case = cases.make_case(1, 4, 0, "rope")
    case.cos_sin[:, :32], case.cos_sin[:, 32:] = 5 / 16 * (1 + 2.0**-20), 0
    case.q_pe.fill_(2.0**-130)
    case.positions = case.positions.int()
    cases.emulate(case, build(dataclasses.replace(ROPE, align=16)).ptx)
    assert case.mqa_output.unique().tolist() == [3 * 2.0**-133]


@pytest.mark.parametrize("q_scale", [1.5 * 2.0**-126, 2.0**127, 2.0**-126, *((m - 2.0**-23) * 2.0**127 for m in (1.25, 1.5, 1.75, 1.875))])
def test_scales_at_the_ends(cases, q_scale):
    case = cases.make_case(1, 4, 0, q_scale=q_scale, raw=True)
    midpoints = 2.0 ** -torch.arange(8)[:, None] * (1 + torch.arange(16) / 8 + 1 / 16)
    case.ql_nope[0, 3, :128] = (midpoints.double() * q_scale).flatten()
    cfg = dataclasses.replace(FP8, indexed=False, interleave=False)
    cases.emulate(case, build(cfg).ptx)
    assert cases.differences(case, cases.run_reference(case)) == [0]


@pytest.mark.parametrize("q_scale", [1.0, 3.0])
def test_a_zero_keeps_its_sign(cases, q_scale):
    case = cases.make_case(2, 2, 2, q_scale=q_scale)
    case.cos_sin[:, :32], case.cos_sin[:, 32:] = 0.8, 0.6
    for x in (case.q_pe, case.ql_nope, case.index_q):
        x.zero_()
        x[..., ::2] = -0.0
        x[..., 3::4] = -(2.0**-133)  # rotates and divides to what underflows
    cases.emulate(case, build(FP8).ptx)
    expected = cases.run_reference(case)
    assert {0x00, 0x80} <= set(expected[0].view(torch.uint8).flatten().tolist())
    assert cases.differences(case, expected) == [0, 0, 0]


@pytest.mark.parametrize("interleave", [True, False])
def test_the_largest_and_the_smallest_numbers(cases, interleave):
    cfg = dataclasses.replace(FP8, interleave=interleave)
    case = cases.make_case(2, 1, 4, interleave=interleave, q_scale=2.0**100)
    case.cos_sin[:, :32], case.cos_sin[:, 32:] = 0.8, 0.6
    for x in (case.q_pe, case.ql_nope, case.index_q):
        x[0], x[1] = torch.finfo(torch.bfloat16).max, 2.0**-133
        x[:, :, 1::2] *= -1
    case.index_q[:, 3] = 0
    cases.emulate(case, build(cfg).ptx)
    expected = cases.run_reference(case)
    assert expected[1].float().abs().max() > 224
    assert cases.differences(case, expected) == [0, 0, 0]


def test_the_config_says_what_the_inputs_allow(cases):
    for shift, align in ((0, 16), (4, 8), (2, 4), (1, 2)):
        case = cases.make_case(2, 4, 4, shift=shift)
        cfg = op._config_of(case.call)
        assert cfg == Config("fp8", True, True, torch.int64, torch.float32, align, False)
