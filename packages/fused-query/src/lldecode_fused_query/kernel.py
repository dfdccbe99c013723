"""CuTe DSL kernel: every query of a DSA layer, rotated, quantized and packed in one launch.

A token's work is a list of warps: indexer rows first, then rotary parts, then latent parts of the MQA heads; a CTA takes
the next :data:`WARPS` of them, so any number of heads fits. Nothing is shared between warps: the maximum of an indexer
row is found by shuffles in half a warp. A warp issues all of its loads before it uses the first.

Rounding is that of exact arithmetic: a rotation or quotient keeps its rounding error, and its last bit is made odd where it
is inexact (round to odd), so that the rounding to fp8 or bf16 is the only one. Rotations are computed at a quarter of
their size, as they would overflow for the largest bf16 queries.
"""

import dataclasses
from typing import Any

import cutlass
import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint16, Uint32, cute
from cutlass.cute.arch import inline_ptx

from lldecode.jit import Kernel

NOPE, ROPE, INDEX_DIM = 512, 64, 128

# Of 2 to 16 warps a CTA and 1 to 4 heads a warp, on an H200: one head, and this, within 4 % of the best at every shape of bench.py.
WARPS = 4

# w0 + w1 = r0 * r1 + r2 * r3: two products and their errors, a two-sum, and what the last sum leaves over. A zero keeps its sign.
ROTATE = """{ .reg .f32 p, q, m, n, e, f, d, x, y, t, h; .reg .pred k;
mul.rn.f32 p, {$r0}, {$r1}; neg.f32 m, p; fma.rn.f32 e, {$r0}, {$r1}, m;
mul.rn.f32 q, {$r2}, {$r3}; neg.f32 n, q; fma.rn.f32 f, {$r2}, {$r3}, n;
add.rn.f32 d, p, q; sub.rn.f32 x, d, p; sub.rn.f32 y, d, x; sub.rn.f32 x, q, x; sub.rn.f32 y, p, y; add.rn.f32 t, x, y;
add.rn.f32 e, e, f; add.rn.f32 t, t, e; setp.ne.f32 k, t, 0f00000000; selp.f32 t, t, 0f80000000, k;
add.rn.f32 h, d, t; sub.rn.f32 x, h, d; sub.rn.f32 {$w1}, t, x; mov.f32 {$w0}, h; }"""

# w0 + w1 * a positive number = (r0 + r3) / r1, where r2 = 1 / r1. Beyond fp8's range the plain quotient is as good, and has a zero's sign.
DIVIDE = """{ .reg .f32 q, n, e, r; .reg .pred k;
mul.rn.f32 q, {$r0}, {$r2}; abs.f32 n, q; setp.lt.f32 k, n, 0f44000000; setp.gt.and.f32 k, n, 0f2f800000, k;
neg.f32 n, q; fma.rn.f32 e, n, {$r1}, {$r0}; add.rn.f32 e, e, {$r3}; fma.rn.f32 r, e, {$r2}, q;
neg.f32 n, r; fma.rn.f32 e, n, {$r1}, {$r0}; add.rn.f32 e, e, {$r3};
selp.f32 {$w0}, r, q, k; selp.f32 {$w1}, e, 0f00000000, k; }"""
DIVIDE_ONE = DIVIDE.replace("add.rn.f32 e, e, {$r3};", "")  # r3 = 0: a constant operand does not compile

# r0 + r1 rounded to odd: where r1 is not zero and r0 is even, r0's neighbour on the side of r1.
ROUND_TO_ODD = """{ .reg .pred k; .reg .b32 b, s;
setp.ne.f32 k, {$r1}, 0f00000000; mov.b32 b, {$r0}; mov.b32 s, {$r1}; xor.b32 s, s, b; shr.s32 s, s, 31; or.b32 s, s, 1; add.s32 s, b, s;
and.b32 b, b, 1; setp.eq.and.s32 k, b, 0, k; mov.b32 b, {$r0}; selp.b32 b, s, b, k; mov.b32 {$w0}, b; }"""

ABS_MAX = "{ .reg .f32 a; abs.f32 a, {$r1}; max.f32 {$w0}, {$r0}, a; }"

# ue8m0 scale of a row whose largest quarter is r0, and its inverse: 2^k for the least k >= -22 with 4 * r0 <= 1.75 * 2^(k + 8).
UE8M0 = """{ .reg .pred k; .reg .b32 b, s, i; .reg .f32 a;
max.f32 a, {$r0}, 0f00000000; mov.b32 b, a; setp.ge.s32 k, b, 0x7f800000;
add.s32 s, b, 0x1fffff; shr.s32 s, s, 23; sub.s32 s, s, 6; max.s32 s, s, 105; sub.s32 i, 254, s;
shl.b32 s, s, 23; selp.b32 s, 0x7f800000, s, k; mov.b32 {$w0}, s; shl.b32 i, i, 23; selp.b32 i, 0, i, k; mov.b32 {$w1}, i; }"""

TO_FP8X4 = """{ .reg .b16 x, y;
cvt.rn.satfinite.e4m3x2.f32 x, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 y, {$r3}, {$r2}; mov.b32 {$w0}, {x, y}; }"""


@dataclasses.dataclass(frozen=True)
class Config:
    """What one compiled function is for.

    Attributes:
        output: ``fp8`` packed and divided by q_scale, ``bf16`` packed, or ``rope``: the rotary part alone, in bf16.
        indexed: the layer has an indexer.
        interleave: RoPE layout of the indexer; that of the MQA query is always interleaved.
        positions, cos_sin: dtypes.
        align: bytes, a power of two up to 16 that divides every address and row stride of the inputs.
        pdl: launched as a programmatic dependent; the kernel then waits for its producers.
    """

    output: str
    indexed: bool
    interleave: bool
    positions: torch.dtype
    cos_sin: torch.dtype
    align: int
    pdl: bool


def _load(row: Any, n: int, at: Any) -> Any:
    """Registers with elements ``[n * at, n * at + n)`` of a row."""
    regs = cute.make_rmem_tensor(n, row.element_type)
    cute.autovec_copy(cute.local_tile(row, (n,), (at,)), regs)
    return regs


def _store(row: Any, at: Any, regs: Any) -> None:
    """A row of fp8 is written in the wider integers that registers hold."""
    row = cute.recast_tensor(row, regs.element_type)
    cute.autovec_copy(regs, cute.local_tile(row, (cute.size(regs),), (at,)))


def _floats(regs: Any) -> list[Any]:
    return [regs[i].to(Float32) for i in range(cute.size(regs))]


def _ptx(code: str, results: int, *args: Any) -> Any:
    return inline_ptx(code, write_only_types=[Float32] * results, read_only_args=list(args))


def _fp8(values: list[Any]) -> Any:
    """Registers with a multiple of four values in fp8, four in each, rounded to nearest, saturating."""
    out = cute.make_rmem_tensor(len(values) // 4, Uint32)
    for i in range(len(values) // 4):
        out[i] = inline_ptx(TO_FP8X4, write_only_types=[Uint32], read_only_args=values[4 * i : 4 * i + 4])
    return out


def _bf16(values: list[Any]) -> Any:
    out = cute.make_rmem_tensor(len(values), BFloat16)
    for i, value in enumerate(values):
        out[i] = value.to(BFloat16)
    return out


def _rotate(x: list[Any], cos: list[Any], sin: list[Any], interleave: bool) -> list[tuple[Any, Any]]:
    """A quarter of two rotated pairs, in the order of `x`, each value as a pair of fp32 numbers whose sum it is."""
    (a, c), (b, d) = (x[0::2], x[1::2]) if interleave else (x[:2], x[2:])
    first = [_ptx(ROTATE, 2, p, cos[i], q, -sin[i]) for i, (p, q) in enumerate(((a, b), (c, d)))]
    second = [_ptx(ROTATE, 2, q, cos[i], p, sin[i]) for i, (p, q) in enumerate(((a, b), (c, d)))]
    return [first[0], second[0], first[1], second[1]] if interleave else [*first, *second]


def _quarter_cos_sin(row: Any, part: Any) -> list[list[Any]]:
    """Of the two pairs of lane `part`."""
    return [[x * 0.25 for x in _floats(_load(row, 2, at))] for at in (part, ROPE // 4 + part)]


@cute.jit
def _quantize(values: list[tuple[Any, Any]], scale: Float32, out: cute.Tensor) -> None:
    """Write sums of two numbers (or of one and None), divided by a scale, as fp8."""
    bits = scale.bitcast(Int32)
    # a power of two, away from the ends so that neither its inverse nor a quotient that matters overflows
    if (bits & 0x7FFFFF) == 0 and bits > (27 << 23) and bits < (227 << 23):
        inverse = ((254 << 23) - bits).bitcast(Float32)
        cute.autovec_copy(_fp8([(high if low is None else _ptx(ROUND_TO_ODD, 1, high, low)) * inverse for high, low in values]), out)
    else:
        inverse = 1.0 / scale
        quotients = [
            _ptx(DIVIDE_ONE, 2, high, scale, inverse) if low is None else _ptx(DIVIDE, 2, high, scale, inverse, low) for high, low in values
        ]
        cute.autovec_copy(_fp8([_ptx(ROUND_TO_ODD, 1, *quotient) for quotient in quotients]), out)


class _FusedQuery:
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    # fmt: off
    @cute.jit
    def __call__(
        self, mPositions: cute.Tensor, mQPe: cute.Tensor, mCosSin: cute.Tensor, mNope: Any, mScale: Any, mOut: cute.Tensor,
        mIndexQ: Any, mIndexCosSin: Any, mWeights: Any, mIndexOut: Any, mWeightsOut: Any,
        softmax_scale: Float32, head_scale: Float32, stream: Any,
    ) -> None:
        heads = mQPe.shape[1]
        index_warps = cute.ceil_div(mIndexQ.shape[1], 2) if cutlass.const_expr(self.cfg.indexed) else 0
        rope_warps = cute.ceil_div(heads, 2)
        nope_warps = 0 if cutlass.const_expr(self.cfg.output == "rope") else heads
        ctas = cute.ceil_div(index_warps + rope_warps + nope_warps, WARPS)
        self.kernel(
            mPositions, (mQPe, mCosSin, mNope, mScale, mOut), (mIndexQ, mIndexCosSin, mWeights, mIndexOut, mWeightsOut),
            softmax_scale, head_scale, Int32(index_warps), Int32(index_warps + rope_warps),
        ).launch(grid=(mPositions.shape[0], ctas, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=self.cfg.pdl)

    @cute.kernel
    def kernel(
        self, mPositions: cute.Tensor, mqa: tuple[Any, ...], index: tuple[Any, ...], softmax_scale: Float32, head_scale: Float32,
        rope_begin: Int32, nope_begin: Int32,
    ) -> None:
        token, cta, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cta * WARPS + thread // 32
        if cutlass.const_expr(self.cfg.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        position = mPositions[token]
        if warp >= nope_begin:
            if cutlass.const_expr(self.cfg.output != "rope"):
                self._nope(mqa, token, warp - nope_begin)
        elif warp >= rope_begin:
            self._rope(mqa, token, position, warp - rope_begin)
        else:
            if cutlass.const_expr(self.cfg.indexed):
                self._index(index, token, position, warp, softmax_scale, head_scale)
    # fmt: on

    @cute.jit
    def _index(self, index: tuple[Any, ...], token: Int32, position: Any, warp: Int32, softmax_scale: Float32, head_scale: Float32) -> None:
        """Half a warp takes a row: each lane two rotated pairs and four other elements."""
        mQ, mCosSin, mWeights, mOut, mWeightsOut = index
        lane, last = cute.arch.lane_idx(), mQ.shape[1] - 1
        head, part = 2 * warp + lane // 16, lane % 16
        at = [part] if self.cfg.interleave else [part, 16 + part]
        row = mQ[token, cutlass.min(head, last), None]  # no load needs a branch
        rotary = [_load(row, 4 // len(at), i) for i in at]
        rest = _load(row, 4, 16 + part)
        weight = mWeights[token, cutlass.min(head, last)].to(Float32) * softmax_scale * head_scale
        cos, sin = _quarter_cos_sin(mCosSin[position, None], part)
        pairs = _rotate([x for regs in rotary for x in _floats(regs)], cos, sin, self.cfg.interleave)
        turned, other = [_ptx(ROUND_TO_ODD, 1, *pair) for pair in pairs], _floats(rest)
        amax = turned[0]
        for value in [*turned, *(x * 0.25 for x in other)]:
            amax = _ptx(ABS_MAX, 1, amax, value)
        scale, inverse = _ptx(UE8M0, 2, cute.arch.warp_reduction(amax, cute.arch.fmax, threads_in_group=16))
        fp8 = _fp8([*(x * (4.0 * inverse) for x in turned), *(x * inverse for x in other)])
        if head <= last:
            out = mOut[token, head, None]
            if cutlass.const_expr(self.cfg.interleave):
                _store(out, part, cute.local_tile(fp8, (1,), (0,)))
            else:
                for i in cutlass.range_constexpr(2):
                    pair = cute.make_rmem_tensor(1, Uint16)
                    pair[0] = (fp8[0] >> (16 * i)).to(Uint16)
                    _store(out, 16 * i + part, pair)
            _store(out, 16 + part, cute.local_tile(fp8, (1,), (1,)))
            if part == 0:
                mWeightsOut[token, head] = weight * scale

    @cute.jit
    def _rope(self, mqa: tuple[Any, ...], token: Int32, position: Any, warp: Int32) -> None:
        """Half a warp takes the rotary part of a head: each lane two pairs."""
        mQPe, mCosSin, _, mScale, mOut = mqa
        lane, last = cute.arch.lane_idx(), mQPe.shape[1] - 1
        head, part = 2 * warp + lane // 16, lane % 16
        loaded = _load(mQPe[token, cutlass.min(head, last), None], 4, part)
        scale = mScale[0] * 0.25 if cutlass.const_expr(self.cfg.output == "fp8") else None
        cos, sin = _quarter_cos_sin(mCosSin[position, None], part)
        values = _rotate(_floats(loaded), cos, sin, interleave=True)
        if cutlass.const_expr(self.cfg.output == "fp8"):
            result = cute.make_rmem_tensor(1, Uint32)
            _quantize(values, scale, result)
        else:
            result = cute.recast_tensor(_bf16([_ptx(ROUND_TO_ODD, 1, *value) * 4.0 for value in values]), Uint32)
        if head <= last:
            _store(mOut[token, head, None], part if cutlass.const_expr(self.cfg.output == "rope") else NOPE // 4 + part, result)

    @cute.jit
    def _nope(self, mqa: tuple[Any, ...], token: Int32, head: Int32) -> None:
        """A warp takes the latent part of a head: each lane twice eight elements."""
        _, _, mNope, mScale, mOut = mqa
        last, lane = mNope.shape[1] - 1, cute.arch.lane_idx()
        row = mNope[token, cutlass.min(head, last), None]
        loaded = [_load(row, 8, at) for at in (lane, 32 + lane)]
        if cutlass.const_expr(self.cfg.output == "fp8"):
            result = cute.make_rmem_tensor(4, Uint32)
            _quantize([(x, None) for regs in loaded for x in _floats(regs)], mScale[0], result)
            loaded = [cute.local_tile(result, (2,), (i,)) for i in range(2)]
        if head <= last:
            for i in cutlass.range_constexpr(2):
                _store(mOut[token, head, None], 32 * i + lane, loaded[i])


# fmt: off
def build(cfg: Config) -> Any:
    """Compile for a config."""
    types = {torch.int32: Int32, torch.int64: Int64, torch.float32: Float32, torch.bfloat16: BFloat16}

    def tensor(dtype: Any, *shape: Any, align: int = cfg.align) -> Any:
        width = dtype.width // 8
        strides = [cute.sym_int64(divisibility=max(1, align // width)) for _ in shape[1:]]
        return cute.runtime.make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=max(align, width))

    tokens, heads, index_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
    packed, fp8 = cfg.output != "rope", cfg.output == "fp8"
    table = [tensor(types[cfg.cos_sin], cute.sym_int(), ROPE) for _ in range(2)]
    mqa = (
        tensor(types[cfg.positions], tokens, align=1), tensor(BFloat16, tokens, heads, ROPE), table[0],
        tensor(BFloat16, tokens, heads, NOPE) if packed else None, tensor(Float32, 1, align=1) if fp8 else None,
        tensor(Float8E4M3FN if fp8 else BFloat16, tokens, heads, NOPE + ROPE if packed else ROPE, align=16),
    )
    index = (
        tensor(BFloat16, tokens, index_heads, INDEX_DIM), table[1], tensor(BFloat16, tokens, index_heads, align=1),
        tensor(Float8E4M3FN, tokens, index_heads, INDEX_DIM, align=16), tensor(Float32, tokens, index_heads, align=1),
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    args = *mqa, *(index if cfg.indexed else [None] * len(index)), Float32(0.0), Float32(0.0), stream
    return cute.compile(_FusedQuery(cfg), *args, options="--enable-tvm-ffi")
# fmt: on


KERNEL = Kernel("fused-query", build, [__file__])
