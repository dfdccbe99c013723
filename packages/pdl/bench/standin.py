"""Stand-ins for the neighbours of the norm + RoPE kernel in a layer: a small-batch GEMM and the query kernel, both with and without PDL.

They are here because a benchmark of this feature imports no other; they follow the same order as its kernels, and load their
first weights before the wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x_ptr, x_stride, x_batch, w_ptr, w_stride_n, w_stride_k, w_batch, out_ptr, out_stride, out_batch, M, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    m, k = tl.arange(0, 16), tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.program_id(1).to(tl.int64)
    w_ptrs = w_ptr + batch * w_batch + n[:, None] * w_stride_n + k[None, :] * w_stride_k
    x_ptrs = x_ptr + batch * x_batch + m[None, :] * x_stride + k[:, None]
    w = tl.load(w_ptrs, mask=n[:, None] < N, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_N, 16), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + first, mask=m[None, :] < M, other=0.0)
        following = tl.load(w_ptrs + (first + BLOCK_K) * w_stride_k, mask=(n[:, None] < N) & (first + BLOCK_K < K), other=0.0)
        acc = tl.dot(w, x, acc)
        w = following
    out = out_ptr + batch * out_batch + m[None, :] * out_stride + n[:, None]
    tl.store(out, acc, mask=(m[None, :] < M) & (n[:, None] < N))


def linear(x: Tensor, weight: Tensor, out: Tensor, pdl: bool) -> None:
    """out ``[M, N]`` = x ``[M, K]`` times weight ``[N, K]`` transposed, or with a leading batch and weight ``[B, K, N]``; M <= 16."""
    if batched := x.ndim == 3:
        weight = weight.transpose(1, 2)
    (n, k), m = weight.shape[-2:], x.shape[-2]
    block_n, block_k = (64, 64) if batched else (16, 1024)
    grid = (triton.cdiv(n, block_n), len(x) if batched else 1)
    linear_kernel[grid](
        x, x.stride(-2), x.stride(0) if batched else 0, weight, weight.stride(-2), weight.stride(-1), weight.stride(0) if batched else 0,
        out, out.stride(-2), out.stride(0) if batched else 0, m, n,
        K=k, BLOCK_N=block_n, BLOCK_K=block_k, USE_PDL=pdl, num_warps=4 if batched else 8, num_stages=1,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def query_kernel(
    pos_ptr, cos_sin_ptr, pe_ptr, pe_stride, pe_head, nope_ptr, nope_stride, nope_head, out_ptr,
    k_ptr, w_ptr, w_stride, k_out_ptr, w_out_ptr, HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, pos = tl.arange(0, 32), tl.load(pos_ptr + token)
    cos, sin = tl.load(cos_sin_ptr + pos * 64 + i), tl.load(cos_sin_ptr + pos * 64 + 32 + i)
    if head < HEADS:
        pe, out = pe_ptr + token * pe_stride + head * pe_head + 2 * i, out_ptr + (token * HEADS + head) * 576
        x1, x2 = tl.load(pe).to(tl.float32), tl.load(pe + 1).to(tl.float32)
        n = tl.arange(0, 512)
        tl.store(out + n, tl.load(nope_ptr + token * nope_stride + head * nope_head + n))
        tl.store(out + 512 + 2 * i, x1 * cos - x2 * sin)
        tl.store(out + 513 + 2 * i, x2 * cos + x1 * sin)
    else:
        head -= HEADS
        row, rest = (token * INDEX_HEADS + head) * 128, 64 + tl.arange(0, 64)
        x1, x2 = tl.load(k_ptr + row + 2 * i).to(tl.float32), tl.load(k_ptr + row + 2 * i + 1).to(tl.float32)
        x3, weight = tl.load(k_ptr + row + rest).to(tl.float32), tl.load(w_ptr + token * w_stride + head).to(tl.float32)
        r1, r2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        scale = tl.maximum(tl.maximum(tl.max(tl.abs(r1)), tl.max(tl.abs(r2))), tl.maximum(tl.max(tl.abs(x3)), 1e-4)) / 448.0
        tl.store(k_out_ptr + row + 2 * i, (r1 / scale).to(tl.float8e4nv))
        tl.store(k_out_ptr + row + 2 * i + 1, (r2 / scale).to(tl.float8e4nv))
        tl.store(k_out_ptr + row + rest, (x3 / scale).to(tl.float8e4nv))
        tl.store(w_out_ptr + token * INDEX_HEADS + head, weight * scale)


def query(
    positions: Tensor, cos_sin: Tensor, q_pe: Tensor, ql_nope: Tensor, index_q: Tensor, weights: Tensor, out: Tensor, q_out: Tensor,
    w_out: Tensor, pdl: bool,
) -> None:  # fmt: skip
    """Rotate both queries, pack one and quantize the other: q_pe ``[T, H, 64]``, ql_nope ``[T, H, 512]``, index_q ``[T, I, 128]``."""
    tokens, heads, _ = q_pe.shape
    query_kernel[(tokens, heads + index_q.shape[1])](
        positions, cos_sin, q_pe, q_pe.stride(0), q_pe.stride(1), ql_nope, ql_nope.stride(0), ql_nope.stride(1), out,
        index_q, weights, weights.stride(0), q_out, w_out, HEADS=heads, INDEX_HEADS=index_q.shape[1], USE_PDL=pdl, num_warps=1,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")
