"""CuTe DSL kernel: every query of a DSA layer, rotated, quantized and packed in one launch.

A token's work is a list of warps: indexer rows first, then rotary parts, then latent parts of the MQA heads; a CTA takes
the next :data:`WARPS` of them, so any number of heads fits. Nothing is shared between warps: the maximum of an indexer
row is found by shuffles in a quarter of a warp. A warp issues all of its loads before it uses the first.

Rounding is that of exact arithmetic. A rotation in fp32 is off by at most 2u of itself, u = 2^-24, its reciprocal scale by 2u;
both ends of the interval that this leaves are rounded. Where they differ, or a row's maximum may lie on either side of a
scale's threshold, the value is in doubt: an fp64 comparison, in a branch of the warp, settles it.
"""

import dataclasses
import functools
import struct
from typing import Any

import cutlass
import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.arch import inline_ptx

from lldecode.jit import Kernel

NOPE, ROPE, INDEX_DIM = 512, 64, 128

# Of 2 to 16 on an H200 within 4 % of the best at every shape of bench.py; measured before rotations were fp32.
WARPS = 4

# r0 * r1 + r2 * r3, off by at most 2u of itself (Jeannerod, Louvet, Muller: "Further analysis of Kahan's algorithm"). Keeps a zero's sign;
# where a product overflows the result is infinite or NaN.
ROTATE = """{ .reg .f32 q, n, e, r;
mul.rn.f32 q, {$r2}, {$r3}; neg.f32 n, {$r2}; fma.rn.f32 e, n, {$r3}, q; fma.rn.f32 r, {$r0}, {$r1}, q; sub.rn.f32 {$w0}, r, e; }"""

# (r0 * r1 + r2 * r3) / r4, where r5 is about 1 / r4, as a number on the same side of, or at, every number of 12 bits: fp8 and bf16
# round it, and a scale's threshold compares to it, as to the quotient itself. fp64 holds each product, and a number of 12 bits times r4.
EXACT = """{ .reg .f64 a, c, q, s, l, h; .reg .f32 m, f; .reg .b32 b; .reg .pred k, j; cvt.f64.f32 q, {$r2}; cvt.f64.f32 s, {$r3};
mul.rn.f64 q, q, s; cvt.f64.f32 a, {$r0}; cvt.f64.f32 c, {$r1}; fma.rm.f64 l, a, c, q; fma.rp.f64 h, a, c, q; fma.rn.f64 q, a, c, q;
cvt.f64.f32 s, {$r5}; mul.rn.f64 q, q, s; cvt.rn.f32.f64 m, q; mul.rn.f32 m, m, 0f3f800008; mov.b32 b, m; and.b32 b, b, 0xfffff000;
mov.b32 m, b; cvt.f64.f32 q, m; cvt.f64.f32 s, {$r4}; mul.rn.f64 q, q, s; abs.f64 q, q; abs.f64 l, l; abs.f64 h, h; setp.lt.f64 k, l, q;
setp.lt.or.f64 k, h, q, k; setp.gt.f64 j, l, q; setp.gt.or.f64 j, h, q, j; selp.f32 f, 0f3f7ff800, 0f3f800000, k;
selp.f32 f, 0f3f800400, f, j; mul.rn.f32 {$w0}, m, f; }"""

# Four values times r4 in fp8, and a byte that is not 0 for each that is NaN or differs from that of minus the value times r5.
BOTH_FP8X4 = """{ .reg .f32 a, b, c, d; .reg .b16 x, y; .reg .b32 u, v; mul.rn.f32 a, {$r0}, {$r4}; mul.rn.f32 b, {$r1}, {$r4};
mul.rn.f32 c, {$r2}, {$r4}; mul.rn.f32 d, {$r3}, {$r4}; cvt.rn.satfinite.e4m3x2.f32 x, b, a; cvt.rn.satfinite.e4m3x2.f32 y, d, c;
mov.b32 u, {x, y}; mul.rn.f32 a, {$r0}, {$r5}; mul.rn.f32 b, {$r1}, {$r5}; mul.rn.f32 c, {$r2}, {$r5}; mul.rn.f32 d, {$r3}, {$r5};
cvt.rn.satfinite.e4m3x2.f32 x, b, a; cvt.rn.satfinite.e4m3x2.f32 y, d, c; mov.b32 v, {x, y}; xor.b32 v, v, u;
xor.b32 {$w1}, v, 0x80808080; mov.b32 {$w0}, u; }"""

# The same for two values in bf16; also in doubt below 2^-111, where the error of fp32 is no longer relative.
BOTH_BF16X2 = """{ .reg .f32 a, b; .reg .b32 u, v, t; mul.rn.f32 a, {$r0}, {$r2}; mul.rn.f32 b, {$r1}, {$r2}; cvt.rn.bf16x2.f32 u, b, a;
mul.rn.f32 a, {$r0}, {$r3}; mul.rn.f32 b, {$r1}, {$r3}; cvt.rn.bf16x2.f32 v, b, a; xor.b32 v, v, u; xor.b32 v, v, 0x80008000;
and.b32 t, u, 0x7fff7fff; add.s32 t, t, 0x78007800; not.b32 t, t; and.b32 t, t, 0x80008000; or.b32 {$w1}, v, t; mov.b32 {$w0}, u; }"""

ABS_MAX = "{ .reg .f32 a, b; abs.f32 a, {$r0}; abs.f32 b, {$r1}; max.f32 {$w0}, a, b; }"

# ue8m0 scale of a row whose largest quarter is r0, and its inverse: 2^k for the least k >= -22 with 4 * r0 <= 1.75 * 2^(k + 8).
UE8M0 = """{ .reg .pred k; .reg .b32 b, s, i; .reg .f32 a; max.f32 a, {$r0}, 0f00000000; mov.b32 b, a; setp.ge.s32 k, b, 0x7f800000;
add.s32 s, b, 0x1fffff; shr.s32 s, s, 23; sub.s32 s, s, 6; max.s32 s, s, 105; sub.s32 i, 254, s; shl.b32 s, s, 23;
selp.b32 s, 0x7f800000, s, k; mov.b32 {$w0}, s; shl.b32 i, i, 23; selp.b32 i, 0, i, k; mov.b32 {$w1}, i; }"""

TO_FP8X4 = """{ .reg .b16 x, y;
cvt.rn.satfinite.e4m3x2.f32 x, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 y, {$r3}, {$r2}; mov.b32 {$w0}, {x, y}; }"""
TO_BF16X2 = "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};"


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


def _row(x: Any, *at: Any) -> Any:
    """``x[*at, ...]`` as a row; a stride in bytes has 31 bits, so that a coordinate takes one instruction."""
    address = x.iterator.toint()
    for i, stride in zip(at, x.stride, strict=False):
        step = Int32(stride) * (x.element_type.width // 8)
        address = inline_ptx("mad.wide.s32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int64], read_only_args=[Int32(i), step, address])
    pointer = cute.make_ptr(x.element_type, address, cute.AddressSpace.gmem, assumed_align=x.iterator.alignment)
    return cute.make_tensor(pointer, cute.make_layout(x.shape[-1]))


def _tile(row: Any, n: int, at: Any, skip: int) -> Any:
    """Elements ``[n * (skip + at), n * (skip + at + 1))`` of a row; `skip` becomes part of an instruction."""
    tile = cute.local_tile(row, (n,), (at,))
    return cute.make_tensor(tile.iterator + n * skip, tile.layout)


def _load(row: Any, n: int, at: Any, skip: int = 0) -> Any:
    regs = cute.make_rmem_tensor(n, row.element_type)
    cute.autovec_copy(_tile(row, n, at, skip), regs)
    return regs


def _store(row: Any, regs: Any, at: Any, skip: int = 0) -> None:
    """A row of fp8 is written in the wider integers that registers hold."""
    cute.autovec_copy(regs, _tile(cute.recast_tensor(row, regs.element_type), cute.size(regs), at, skip))


def _floats(regs: Any) -> list[Any]:
    if regs.element_type is Float32:
        return [regs[i] for i in range(cute.size(regs))]
    words = cute.recast_tensor(regs, Uint32)
    return [half.bitcast(Float32) for i in range(cute.size(words)) for half in (words[i] << 16, words[i] & Uint32(0xFFFF0000))]


def _ptx(code: str, results: int, *args: Any) -> Any:
    return inline_ptx(code, write_only_types=[Float32] * results, read_only_args=list(args))


def _constant(x: float) -> Any:
    """In a register: inline PTX takes no constants."""
    return _ptx(f"mov.f32 {{$w0}}, 0f{struct.pack('>f', x).hex()};", 1)


def _abs_max(values: list[Any]) -> Any:
    return functools.reduce(lambda a, b: _ptx(ABS_MAX, 1, a, b), values)


def _row_max(*values: Any) -> Any:
    """Of a row that eight lanes share, from each lane's largest absolute values."""
    return cute.arch.warp_reduction(cute.arch.fmax(*values), cute.arch.fmax, threads_in_group=8)


def _packed(code: str, values: list[Any], inverse: Any = None, margin: float = 0) -> list[Any]:
    """Registers with words of four values in fp8 or two in bf16; with an inverse, of the values times it, and, in further
    registers, where a relative error of `margin` matters.
    """
    ends = [] if inverse is None else [inverse * (1 + margin), inverse * (margin - 1)]
    n, results = (2 if "bf16x2" in code else 4), 1 + len(ends) // 2
    out = [cute.make_rmem_tensor(len(values) // n, Uint32) for _ in range(results)]
    for i in range(len(values) // n):
        words = inline_ptx(code, write_only_types=[Uint32] * results, read_only_args=[*values[n * i : n * i + n], *ends])
        for regs, word in zip(out, words if ends else [words], strict=True):
            regs[i] = word
    return out


def _terms(x: list[Any], cos: list[Any], sin: list[Any], interleave: bool) -> list[tuple[Any, ...]]:
    """What rotates pairs, in the order of `x`: (p, c, q, s) for p * c + q * s."""
    pairs = list(zip(*((x[0::2], x[1::2]) if interleave else (x[:4], x[4:])), cos, sin, strict=True))
    first, second = [(p, c, q, -s) for p, q, c, s in pairs], [(q, c, p, s) for p, q, c, s in pairs]
    return [t for pair in zip(first, second, strict=True) for t in pair] if interleave else first + second


def _any(words: Any) -> Any:
    """Whether a bit is set in any lane of the warp."""
    return cute.arch.vote_any_sync(functools.reduce(lambda a, b: a | b, [words[i] for i in range(cute.size(words))]) != 0)


@cute.jit
def _settled(values: list[Any], terms: list[tuple[Any, ...]], doubt: cute.Tensor, scale: Float32, inverse: Float32) -> list[Any]:
    """The values, those in doubt replaced by what rounds as terms / scale does."""
    out, bits = cute.make_rmem_tensor(len(values), Float32), 32 * cute.size(doubt) // len(values)
    for i in cutlass.range_constexpr(len(values)):
        out[i] = values[i]
        if (doubt[bits * i // 32] & Uint32(((1 << bits) - 1) << (bits * i % 32))) != 0:
            out[i] = _ptx(EXACT, 1, *terms[i], scale, inverse)
    return [out[i] for i in range(len(values))]


@cute.jit
def _quantize(values: list[Any], terms: list[tuple[Any, ...]], scale: Float32) -> cute.Tensor:
    """In fp8: terms, of which the values are an fp32 approximation, divided by a scale."""
    inverse = _ptx("rcp.approx.f32 {$w0}, {$r0};", 1, scale)
    out, doubt = _packed(BOTH_FP8X4, values, inverse, 2.0**-21)
    if scale < 2.0**-100 or scale > 2.0**100:  # an inverse or a quotient may be out of range
        doubt.fill(Uint32(0xFFFFFFFF))
    if _any(doubt):
        cute.autovec_copy(_packed(TO_FP8X4, _settled([x * inverse for x in values], terms, doubt, scale, inverse))[0], out)
    return out


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
        index_warps = cute.ceil_div(mIndexQ.shape[1], 4) if cutlass.const_expr(self.cfg.indexed) else 0
        rope_warps = cute.ceil_div(heads, 4)
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
        if warp >= nope_begin:
            if cutlass.const_expr(self.cfg.output != "rope"):
                self._nope(mqa, token, warp - nope_begin)
        elif warp >= rope_begin:
            self._rope(mqa, token, warp - rope_begin, mPositions[token])
        else:
            if cutlass.const_expr(self.cfg.indexed):
                self._index(index, token, warp, mPositions[token], softmax_scale, head_scale)
    # fmt: on

    @cute.jit
    def _index(self, index: tuple[Any, ...], token: Int32, warp: Int32, position: Any, softmax_scale: Float32, head_scale: Float32) -> None:
        """A quarter of a warp takes a row: each lane four rotated pairs and eight other elements."""
        mQ, mCosSin, mWeights, mOut, mWeightsOut = index
        lane, last = cute.arch.lane_idx(), mQ.shape[1] - 1
        head, part = 4 * warp + lane // 8, lane % 8
        skips = [0] if self.cfg.interleave else [0, 8]
        row = _row(mQ, token, cutlass.min(head, last))  # no load needs a branch
        rotary = [_load(row, 8 // len(skips), part, skip) for skip in skips]
        rest = _floats(_load(row, 8, part, 8))
        weight = _row(mWeights, token)[cutlass.min(head, last)].to(Float32) * softmax_scale * head_scale
        cos, sin = [_floats(_load(_row(mCosSin, position), 4, part, skip)) for skip in (0, 8)]
        terms = _terms([x for regs in rotary for x in _floats(regs)], cos, sin, self.cfg.interleave)
        turned = [_ptx(ROTATE, 1, *t) for t in terms]
        turned_max, rest_max = _abs_max(turned) * 0.25, _abs_max(rest) * 0.25
        row_max, result = _row_max(turned_max, rest_max), cute.make_rmem_tensor(2, Float32)
        result[0], result[1] = _ptx(UE8M0, 2, row_max)
        out, doubt = _packed(BOTH_FP8X4, turned, result[1], 2.0**-22)
        bits = turned_max.bitcast(Int32)
        # The row's largest, within 8 ulp of a threshold of the scale or past fp32: every lane is in doubt, as each rounded for this scale.
        if cute.arch.vote_any_sync((((bits + 0x200008) & 0x7FFFFF) < 16) & (bits + 8 >= row_max.bitcast(Int32)) | (result[1] == 0)):
            doubt.fill(Uint32(0xFFFFFFFF))
        if _any(doubt):
            quarters = _settled([x * 0.25 for x in turned], terms, doubt, _constant(4.0), _constant(0.25))
            result[0], result[1] = _ptx(UE8M0, 2, _row_max(_abs_max(quarters), rest_max))
            cute.autovec_copy(_packed(TO_FP8X4, [x * (4.0 * result[1]) for x in quarters])[0], out)
        if head <= last:
            row_out = _row(mOut, token, head)
            for i in cutlass.range_constexpr(len(skips)):
                _store(row_out, cute.local_tile(out, (2 // len(skips),), (i,)), part, skips[i])
            _store(row_out, _packed(TO_FP8X4, [x * result[1] for x in rest])[0], part, 8)
            if part == 0:
                _row(mWeightsOut, token)[head] = weight * result[0]

    @cute.jit
    def _rope(self, mqa: tuple[Any, ...], token: Int32, warp: Int32, position: Any) -> None:
        """A quarter of a warp takes the rotary part of a head: each lane four pairs."""
        mQPe, mCosSin, _, mScale, mOut = mqa
        lane, last = cute.arch.lane_idx(), mQPe.shape[1] - 1
        head, part = 4 * warp + lane // 8, lane % 8
        loaded = _floats(_load(_row(mQPe, token, cutlass.min(head, last)), 8, part))
        cos, sin = [_floats(_load(_row(mCosSin, position), 4, part, skip)) for skip in (0, 8)]
        terms = _terms(loaded, cos, sin, interleave=True)
        values = [_ptx(ROTATE, 1, *t) for t in terms]
        if cutlass.const_expr(self.cfg.output == "fp8"):
            out = _quantize(values, terms, mScale[0])
        else:
            one = _constant(1.0)
            out, doubt = _packed(BOTH_BF16X2, values, one, 2.0**-22)
            if _any(doubt):
                cute.autovec_copy(_packed(TO_BF16X2, _settled(values, terms, doubt, one, one))[0], out)
        if head <= last:
            _store(_row(mOut, token, head), out, part, 0 if cutlass.const_expr(self.cfg.output == "rope") else NOPE // 8)

    @cute.jit
    def _nope(self, mqa: tuple[Any, ...], token: Int32, head: Int32) -> None:
        """A warp takes the latent part of a head: each lane twice eight elements."""
        _, _, mNope, mScale, mOut = mqa
        last, lane = mNope.shape[1] - 1, cute.arch.lane_idx()
        row = _row(mNope, token, cutlass.min(head, last))
        loaded = [_load(row, 8, lane, skip) for skip in (0, 32)]
        if cutlass.const_expr(self.cfg.output == "fp8"):
            scale, values = mScale[0], [x for regs in loaded for x in _floats(regs)]
            bits, result = scale.bitcast(Int32), cute.make_rmem_tensor(4, Uint32)
            if (bits & 0x7FFFFF) == 0 and bits < (254 << 23):  # a power of two with an inverse
                inverse = ((254 << 23) - bits).bitcast(Float32)
                cute.autovec_copy(_packed(TO_FP8X4, [x * inverse for x in values])[0], result)
            else:
                cute.autovec_copy(_quantize(values, [(x, _constant(1.0), _constant(0.0), _constant(0.0)) for x in values], scale), result)
            loaded = [cute.local_tile(result, (2,), (i,)) for i in range(2)]
        if head <= last:
            for i in cutlass.range_constexpr(2):
                _store(_row(mOut, token, head), loaded[i], lane, 32 * i)


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
