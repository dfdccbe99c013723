"""The kernel that stands for what runs before a GEMM in a decode step with programmatic dependent launch: a norm, say."""

import triton
import triton.language as tl
from torch import Tensor

SPIN = 300
"""Dependent multiplications and additions before it writes: about 1 us, which is what a norm takes for its sum."""


@triton.jit
def neighbour_kernel(x_ptr, one, rows, k, stride_batch, stride_row, spin, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    value = one  # which the compiler does not know to be 1.0, and would then leave the loop out
    for _ in range(spin):
        value = value * 0.5 + 0.5
    row = tl.program_id(0)
    x_ptr += (row // rows).to(tl.int64) * stride_batch + (row % rows).to(tl.int64) * stride_row
    for start in range(0, k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(x_ptr + at, tl.zeros((BLOCK,), tl.float32) + value, mask=at < k)


def launch(x: Tensor) -> None:
    """Fill x ``[batch, M, K]``, rows dense, with ones, a CTA a row.

    Its dependent may start at once; it waits for the kernel before. It reads nothing: what a call has evicted from the L2 would count as
    the call's time.
    """
    batch, rows, k = x.shape
    neighbour_kernel[(batch * rows,)](x, 1.0, rows, k, x.stride(0), x.stride(1), SPIN, BLOCK=2048, launch_pdl=True)
