"""CUDA-core router GEMM: a CTA holds a few weight rows in registers and takes their dot products with a few tokens."""

import dataclasses
from typing import Any

import torch
from cutlass import cute
from cutlass.cute.typing import Float32, Int32
from cutlass.cutlass_dsl import const_expr, range_constexpr, select_

from lldecode.jit import Kernel
from lldecode_ll_bf16_router import kernel_common as common


@dataclasses.dataclass(frozen=True)
class Dotprod:
    """One compiled kernel, for any M and N.

    Attributes:
        k: row length, a multiple of 8.
        rows: weight rows of a CTA.
        tokens: tokens of a CTA; rows * tokens <= 32.
        warps: warps that share the K of a CTA.
    """

    k: int
    rows: int
    tokens: int
    warps: int
    out_dtype: torch.dtype
    pdl: bool

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, stream: Any) -> None:
        grid = (cute.ceil_div(mW.shape[0], self.rows), cute.ceil_div(mX.shape[0], self.tokens), 1)
        block = (32 * self.warps, 1, 1)
        # Without a minimum of blocks ptxas saves registers by sinking loads to their first use, one latency after the other.
        self.kernel(mX, mW, mY).launch(grid=grid, block=block, stream=stream, min_blocks_per_mp=1, use_pdl=self.pdl)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        tile_n, tile_m, _ = cute.arch.block_idx()
        warp, lane = tidx // 32, tidx % 32
        threads, outputs = 32 * self.warps, self.rows * self.tokens
        sPartial = cute.make_tensor(
            cute.arch.alloc_smem(Float32, self.warps * outputs), cute.make_layout((self.warps, outputs), stride=(outputs, 1))
        )
        if const_expr(self.pdl):
            # Safe this early: a kernel that launches on this signal waits for the end of this grid before it reads our output.
            cute.arch.griddepcontrol_launch_dependents()

        steps = -(-self.k // (8 * threads))
        left = None if 8 * threads * steps == self.k else self.k - 8 * tidx
        pW = [common.address(mW, tile_n * self.rows + r, 8 * tidx) for r in range(self.rows)]
        pX = [common.address(mX, tile_m * self.tokens + m, 8 * tidx) for m in range(self.tokens)]
        # Steps whose operands are all in registers, and all in flight, at once.
        operands = self.rows + self.tokens
        batch = max(1, (common.registers(threads) - outputs - 2 * operands) // (4 * operands))
        acc = [Float32(0.0)] * outputs
        for first in range_constexpr(0, steps, batch):
            offsets = [8 * threads * s for s in range(first, min(first + batch, steps))]
            rW = [[common.load(p, o, left, "no_allocate") for p in pW] for o in offsets]
            if const_expr(self.pdl and first == 0):
                cute.arch.griddepcontrol_wait()
            rX = [[common.load(p, o, left, "no_allocate") for p in pX] for o in offsets]
            for step_w, step_x in zip(rW, rX, strict=True):
                fW, fX = [_floats(w) for w in step_w], [_floats(x) for x in step_x]
                for m in range_constexpr(self.tokens):
                    for r in range_constexpr(self.rows):
                        for w, x in zip(fW[r], fX[m], strict=True):
                            acc[m * self.rows + r] += w * x

        total, o, repeat = _reduce_warp(acc, lane)
        if lane % repeat == 0 and o < outputs:
            sPartial[warp, o] = total
        cute.arch.sync_threads()
        if tidx < outputs:
            total = common.tree_sum([sPartial[w, tidx] for w in range(self.warps)])
            m, n = tile_m * self.tokens + tidx // self.rows, tile_n * self.rows + tidx % self.rows
            if m < mY.shape[0] and n < mY.shape[1]:
                mY[m, n] = total.to(mY.element_type)


def _floats(v: tuple[Any, ...]) -> list[Any]:
    """The bf16 pairs of four registers as fp32: bf16 is the upper half of an fp32."""
    return [common.asm("mov.b32 $0, $1;", "=f,r", [Float32], bits)[0] for pair in v for bits in (pair << 16, pair & -65536)]


def _reduce_warp(values: list[Any], lane: Any) -> tuple[Any, Any, int]:
    """Sum each of `values` over the warp, halving the list with each exchange instead of exchanging all of it five times.

    Returns:
        One of the sums, its index (which may be past the end), and how many neighbouring lanes return the same one.
    """
    width, index = 32, Int32(0)
    values = values + [Float32(0.0)] * ((1 << (len(values) - 1).bit_length()) - len(values))
    while len(values) > 1:
        half, width = len(values) // 2, width // 2
        upper = lane & width != 0
        index += select_(upper, half, 0)
        keep = [select_(upper, b, a) for a, b in zip(values[:half], values[half:], strict=True)]
        give = [select_(upper, a, b) for a, b in zip(values[:half], values[half:], strict=True)]
        values = [k + cute.arch.shuffle_sync_bfly(v, width) for k, v in zip(keep, give, strict=True)]
    repeat = width
    while width > 1:
        width //= 2
        values = [values[0] + cute.arch.shuffle_sync_bfly(values[0], width)]
    return values[0], index, repeat


def compile(cfg: Dotprod) -> Any:
    """The function ``f(x, weight, y)`` of a config."""
    return common.compile_for(cfg, cfg.k, cfg.out_dtype)


KERNEL = Kernel("ll-bf16-router-dotprod", compile, [__file__, common.__file__])
