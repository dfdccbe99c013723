"""What the two kernels share: the contract of their operands, 16-byte loads that stay where they are written."""

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.typing import BFloat16, Float32, Int32, Int64

DTYPES = {torch.float32: Float32, torch.bfloat16: BFloat16}


def compile_for(launch: Callable[..., None], k: int, out_dtype: torch.dtype) -> Any:
    """Compile ``launch(mX, mW, mY, stream)``: mX [M, k] and mW [N, k] bf16, each row 16-byte aligned, mY [M, N] contiguous."""

    def operand() -> Any:
        return cute.runtime.make_fake_tensor(BFloat16, (cute.sym_int(), k), (cute.sym_int64(divisibility=8), 1), assumed_align=16)

    y = cute.runtime.make_fake_compact_tensor(DTYPES[out_dtype], (cute.sym_int(), cute.sym_int()), stride_order=(1, 0), assumed_align=4)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, operand(), operand(), y, stream, options="--enable-tvm-ffi")


def registers(threads: int) -> int:
    """Registers of a thread that a CTA of `threads` leaves for operands and sums."""
    return min(255, 65536 // threads) - 24


def address(m: cute.Tensor, row: Any, k: Any) -> Any:
    """Address of element `k` of a row. Rows past the last are the last one, and what comes of them is never stored."""
    row = cutlass.min(row, m.shape[0] - 1)
    return m.iterator.toint() + (Int64(row) * m.stride[0] + k) * 2


def load(address: Any, offset: int, left: Any, hint: str) -> tuple[Any, ...]:
    """Eight bf16, in four registers, `offset` elements past `address`; zeros, and no access, if at most `offset` elements are `left`.

    A plain load: ptxas moves the non-coherent kind across griddepcontrol.wait. `left` is None where all are there; `hint` is for the L1.
    """
    ptx = f"ld.global.L1::{hint}.v4.b32 {{$0, $1, $2, $3}}, [$4 + {2 * offset}];"
    if left is None:
        return asm(ptx, "=r,=r,=r,=r,l", [Int32] * 4, address)
    zeros = "".join(f"mov.b32 ${i}, 0; " for i in range(4))
    ptx = f"{{ .reg .pred p; setp.gt.s32 p, $5, {offset}; {zeros} @p {ptx} }}"
    return asm(ptx, "=&r,=&r,=&r,=&r,l,r", [Int32] * 4, address, left)


def asm(ptx: str, constraints: str, types: Sequence[Any], *args: Any) -> tuple[Any, ...]:
    """Inline PTX that is not moved across other inline PTX, as ``cute.arch.inline_ptx`` may be."""
    struct = llvm.StructType.get_literal([t.mlir_type for t in types]) if types else None
    out = llvm.inline_asm(struct, [a.ir_value() for a in args], ptx, constraints, has_side_effects=True)
    return tuple(t(llvm.extractvalue(t.mlir_type, out, [i])) for i, t in enumerate(types))


def tree_sum(values: list[Any]) -> Any:
    """The sum, pairwise: a fixed order, and a chain as short as its rounding error is small."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)] + values[len(values) & ~1 :]
    return values[0]
