"""The kernel that stands for what runs before a GEMM in a decode step with programmatic dependent launch: a norm, say."""

from typing import Any

from torch import Tensor

from lldecode.jit import Kernel

SPIN = 80
"""Dependent multiplications and additions before it writes, so that it goes on for about 2 us, as a small norm does."""

THREADS = 128


def compile(_: None) -> Any:
    """``f(x, one, spin)``"""
    import cutlass
    from cutlass import BFloat16, Float32, Int32, cute

    @cute.kernel
    def kernel(mX: cute.Tensor, one: Float32, spin: Int32) -> None:
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        value = one  # not a constant: the compiler would leave the loop out
        for _ in cutlass.range(spin, unroll=1):
            value = value * Float32(0.5) + Float32(0.5)
        row, batch, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(thread, mX.shape[2], THREADS):
            mX[batch, row, i] = value.to(BFloat16)

    @cute.jit
    def launch(mX: cute.Tensor, one: Float32, spin: Int32, stream: Any) -> None:
        kernel(mX, one, spin).launch(grid=(mX.shape[1], mX.shape[0], 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    shape, strides = tuple(cute.sym_int() for _ in range(3)), (cute.sym_int64(), cute.sym_int64(), 1)
    x = cute.runtime.make_fake_tensor(BFloat16, shape, strides, assumed_align=2)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, x, Float32(0.0), Int32(0), stream, options="--enable-tvm-ffi")


KERNEL = Kernel("neighbour", compile, [__file__])


def launch(x: Tensor) -> None:
    """Fill bf16 x ``[batch, M, K]``, rows dense, with ones, a CTA a row; on a CPU plain torch does.

    Its dependent may start at once; it waits for the kernel before. It reads nothing: what a call has evicted from the L2 would count as
    the call's time.
    """
    if x.is_cuda:
        KERNEL.get(None, x.device)(x, 1.0, SPIN)
    else:
        x.fill_(1.0)
