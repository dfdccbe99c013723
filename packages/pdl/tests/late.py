"""Kernels that provoke what programmatic dependent launch can get wrong."""

import triton
import triton.language as tl


@triton.jit
def late_copy_kernel(source_ptr, target_ptr, size, nanoseconds, BLOCK: tl.constexpr):
    """One program: lets its dependent start at once, sleeps, and only then reads and writes."""
    tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    for first in range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(target_ptr + i, tl.load(source_ptr + i, mask=i < size), mask=i < size)


@triton.jit
def late_wait_kernel(source_ptr, target_ptr, BLOCK: tl.constexpr):
    """The mistake: it reads what its producer writes before it waits."""
    i = tl.arange(0, BLOCK)
    x = tl.load(source_ptr + i)
    tl.extra.cuda.gdc_wait()
    tl.store(target_ptr + i, x)
