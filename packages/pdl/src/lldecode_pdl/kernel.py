"""Triton kernels that may start before their producers have finished (programmatic dependent launch), and their launches.

The order in every program: let the dependent kernel start, load weights (no kernel of a decode step writes them), wait for the
kernels before this one, and only then touch what they wrote or still read. No program ends without the wait, so that a
later kernel that waits for this one has also waited for everything before it. An empty grid is not launched by Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MLA_TILE: tl.constexpr = tl.constexpr(128)
"""Latent elements that share one fp32 scale in the ``fp8_ds_mla`` layout."""

# The kernels take many arguments, which stand in groups.
# fmt: off


@triton.jit
def _start_dependents(USE_PDL: tl.constexpr):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _wait_for_producers(USE_PDL: tl.constexpr):
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _load(ptr, mask=None):
    return tl.load(ptr, mask=mask, other=None if mask is None else 0.0).to(tl.float32)


@triton.jit
def _rms_norm(x, weight, eps, SIZE: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x) / SIZE + eps) * weight


@triton.jit
def _fp8_bytes(x, scale):
    return tl.div_rn(x, scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _magnitude(x):
    return tl.where(x == x, tl.abs(x), 0.0)  # NaN stays NaN as a value and must not decide the scale of the others


@triton.jit
def _ue8m0_scale(amax):
    # 448 is 1.75 * 2**8, so amax / 448 rounds up to amax's own power of two, or to the next where its mantissa exceeds 1.75.
    bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)
    return (((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _norm_q(token, q_ptr, q_stride, w_ptr, eps, out_ptr, out_stride, DIM: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < DIM
    w = _load(w_ptr + i, mask)
    _wait_for_producers(USE_PDL)
    # Before slot and cache are looked at: the projections that follow read every row, padded ones and a profile run's too.
    x = _load(q_ptr + token * q_stride + i, mask)
    tl.store(out_ptr + token * out_stride + i, _rms_norm(x, w, eps, DIM), mask=mask)


@triton.jit
def _cache_kv(
    token, pos_ptr, slot_ptr, kv_ptr, kv_stride, w_ptr, eps, pe_ptr, pe_stride, cos_sin_ptr, cos_sin_stride,
    cache_ptr, slots, block_stride, entry_stride, scale_ptr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, DS_MLA: tl.constexpr, USE_PDL: tl.constexpr,
):
    tile = tl.arange(0, DIM // MLA_TILE)[:, None]
    i = tile * MLA_TILE + tl.arange(0, MLA_TILE)[None, :]
    w = _load(w_ptr + i)
    _wait_for_producers(USE_PDL)
    if slot_ptr is not None:
        slot, pos = tl.load(slot_ptr + token).to(tl.int64), tl.load(pos_ptr + token).to(tl.int64)
        if (slot >= 0) & (slot < slots):
            # every load before the first reduction, whose barrier would hold it back
            pair = tl.arange(0, HALF) * 2
            pe = pe_ptr + token * pe_stride + pair
            cos_sin = cos_sin_ptr + pos * cos_sin_stride + tl.arange(0, HALF)
            x, x1, x2, cos, sin = _load(kv_ptr + token * kv_stride + i), _load(pe), _load(pe + 1), _load(cos_sin), _load(cos_sin + HALF)
            scale = 1.0 if DS_MLA else tl.load(scale_ptr)
            x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
            latent = _rms_norm(x, w, eps, DIM)
            entry = cache_ptr + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * entry_stride
            if DS_MLA:
                tile_scale = tl.maximum(tl.max(_magnitude(latent), axis=1, keep_dims=True) * (1.0 / 448.0), 1.1754944e-38)
                tl.store(entry + i, _fp8_bytes(latent, tile_scale))
                tl.store((entry + DIM).to(tl.pointer_type(tl.float32)) + tile, tile_scale)
                rope = (entry + DIM + DIM // MLA_TILE * 4).to(tl.pointer_type(tl.bfloat16)) + pair
                tl.store(rope, x1.to(tl.bfloat16))
                tl.store(rope + 1, x2.to(tl.bfloat16))
            else:
                tl.store(entry + i, _fp8_bytes(latent, scale))
                tl.store(entry + DIM + pair, _fp8_bytes(x1, scale))
                tl.store(entry + DIM + pair + 1, _fp8_bytes(x2, scale))


@triton.jit
def _cache_index_k(
    token, pos_ptr, slot_ptr, k_ptr, k_stride, w_ptr, b_ptr, eps, cos_sin_ptr, cos_sin_stride, cache_ptr, slots, block_stride,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, INTERLEAVE: tl.constexpr, USE_PDL: tl.constexpr,
):
    # The two halves of the RoPE part and two of the rest: reductions over their sum stay inside a warp where HALF is 32.
    i = tl.arange(0, HALF)
    i1 = i * (2 if INTERLEAVE else 1)
    i2 = i1 + (1 if INTERLEAVE else HALF)
    i3, i4 = i + 2 * HALF, i + 3 * HALF
    w1, w2, w3, w4 = _load(w_ptr + i1), _load(w_ptr + i2), _load(w_ptr + i3), _load(w_ptr + i4)
    b1, b2, b3, b4 = _load(b_ptr + i1), _load(b_ptr + i2), _load(b_ptr + i3), _load(b_ptr + i4)
    _wait_for_producers(USE_PDL)
    if slot_ptr is not None:
        slot, pos = tl.load(slot_ptr + token).to(tl.int64), tl.load(pos_ptr + token).to(tl.int64)
        if (slot >= 0) & (slot < slots):
            row, cos_sin = k_ptr + token * k_stride, cos_sin_ptr + pos * cos_sin_stride + i
            x1, x2, x3, x4 = _load(row + i1), _load(row + i2), _load(row + i3), _load(row + i4)
            cos, sin = _load(cos_sin), _load(cos_sin + HALF)
            mean = tl.sum(x1 + x2 + x3 + x4) / (4 * HALF)
            x1, x2, x3, x4 = x1 - mean, x2 - mean, x3 - mean, x4 - mean
            rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2 + x3 * x3 + x4 * x4) / (4 * HALF) + eps)
            x1, x2, x3, x4 = x1 * rstd * w1 + b1, x2 * rstd * w2 + b2, x3 * rstd * w3 + b3, x4 * rstd * w4 + b4
            x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
            amax = tl.maximum(tl.maximum(_magnitude(x1), _magnitude(x2)), tl.maximum(_magnitude(x3), _magnitude(x4)))
            scale = _ue8m0_scale(tl.max(amax))
            block, offset = cache_ptr + (slot // BLOCK_SIZE) * block_stride, slot % BLOCK_SIZE
            values = block + offset * (4 * HALF)
            tl.store(values + i1, _fp8_bytes(x1, scale))
            tl.store(values + i2, _fp8_bytes(x2, scale))
            tl.store(values + i3, _fp8_bytes(x3, scale))
            tl.store(values + i4, _fp8_bytes(x4, scale))
            tl.store((block + BLOCK_SIZE * 4 * HALF).to(tl.pointer_type(tl.float32)) + offset, scale)


@triton.jit
def fused_norm_rope_kernel(
    pos_ptr, slot_ptr,
    q_ptr, q_stride, q_w_ptr, q_eps, q_out_ptr, q_out_stride,
    kv_ptr, kv_stride, kv_w_ptr, kv_eps, pe_ptr, pe_stride, cos_sin_ptr, cos_sin_stride,
    mla_ptr, mla_slots, mla_block_stride, mla_entry_stride, mla_scale_ptr,
    k_ptr, k_stride, k_w_ptr, k_b_ptr, k_eps, k_cos_sin_ptr, k_cos_sin_stride,
    k_cache_ptr, k_slots, k_block_stride,
    topk_ptr, topk_stride,
    Q_DIM: tl.constexpr, Q_BLOCK: tl.constexpr,
    MLA_BLOCK_SIZE: tl.constexpr, KV_DIM: tl.constexpr, KV_HALF: tl.constexpr, DS_MLA: tl.constexpr,
    K_BLOCK_SIZE: tl.constexpr, K_HALF: tl.constexpr, INTERLEAVE: tl.constexpr,
    TOPK: tl.constexpr, TOPK_BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Grid (tokens, 4), or (tokens, 2) without an indexer: one program each for q, kv, indexer k and the top-k row of a token."""
    _start_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    role = tl.program_id(1)
    if role == 0:
        _norm_q(token, q_ptr, q_stride, q_w_ptr, q_eps, q_out_ptr, q_out_stride, Q_DIM, Q_BLOCK, USE_PDL)
    elif role == 1:
        _cache_kv(
            token, pos_ptr, slot_ptr, kv_ptr, kv_stride, kv_w_ptr, kv_eps, pe_ptr, pe_stride, cos_sin_ptr, cos_sin_stride,
            mla_ptr, mla_slots, mla_block_stride, mla_entry_stride, mla_scale_ptr,
            MLA_BLOCK_SIZE, KV_DIM, KV_HALF, DS_MLA, USE_PDL,
        )
    elif k_ptr is None:
        _wait_for_producers(USE_PDL)
    elif role == 2:
        _cache_index_k(
            token, pos_ptr, slot_ptr, k_ptr, k_stride, k_w_ptr, k_b_ptr, k_eps, k_cos_sin_ptr, k_cos_sin_stride,
            k_cache_ptr, k_slots, k_block_stride, K_BLOCK_SIZE, K_HALF, INTERLEAVE, USE_PDL,
        )
    else:
        _wait_for_producers(USE_PDL)  # the attention of the layer before may still read the buffer
        i = tl.arange(0, TOPK_BLOCK)
        tl.store(topk_ptr + token * topk_stride + i, -1, mask=i < TOPK)


@triton.jit
def fused_eh_norm_kernel(
    pos_ptr, embeds_ptr, embeds_stride, hidden_ptr, hidden_stride, enorm_ptr, hnorm_ptr, eps, out_ptr, out_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Grid (tokens, 2): one program for each half of a row."""
    _start_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < DIM
    out = out_ptr + token * out_stride + i
    if tl.program_id(1) == 0:
        w = _load(enorm_ptr + i, mask)
        _wait_for_producers(USE_PDL)
        x = tl.where(tl.load(pos_ptr + token) == 0, 0.0, _load(embeds_ptr + token * embeds_stride + i, mask))
        tl.store(out, _rms_norm(x, w, eps, DIM), mask=mask)
    else:
        w = _load(hnorm_ptr + i, mask)
        _wait_for_producers(USE_PDL)
        x = _load(hidden_ptr + token * hidden_stride + i, mask)
        tl.store(out + DIM, _rms_norm(x, w, eps, DIM), mask=mask)


@triton.jit
def convert_req_index_kernel(
    req_ptr, table_ptr, table_stride, table_blocks, index_ptr, index_stride, out_ptr, count_ptr, workspace_req_ptr, workspace_start_ptr,
    BLOCK_SIZE: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Grid (tokens,): a program owns a whole row, so that counting needs neither atomics nor a cleared buffer."""
    _start_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < TOPK
    _wait_for_producers(USE_PDL)
    req = tl.load(req_ptr + token).to(tl.int64)
    index = tl.load(index_ptr + token * index_stride + i, mask=mask, other=-1)
    block = index // BLOCK_SIZE
    valid = (index >= 0) & (block < table_blocks)
    slot = tl.load(table_ptr + req * table_stride + block, mask=valid, other=0) * BLOCK_SIZE + index % BLOCK_SIZE
    if workspace_req_ptr is not None:
        prefill = tl.load(workspace_req_ptr + token)
        start = tl.load(workspace_start_ptr + prefill, mask=prefill >= 0, other=0)
        slot = tl.where(prefill >= 0, start + index, slot)
    tl.store(out_ptr + token * TOPK + i, tl.where(valid, slot, -1), mask=mask)
    if count_ptr is not None:
        tl.store(count_ptr + token, tl.sum(valid.to(tl.int32)))


def _rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    return x, 0 if x is None else x.stride(0)


def _paged(cache: Tensor | None) -> tuple[Tensor | None, int, int, int]:
    """Its bytes, its slots, and the strides of a block and of an entry."""
    return (None, 0, 0, 0) if cache is None else (cache.view(torch.uint8), cache.shape[:2].numel(), cache.stride(0), cache.stride(1))


def _options(pdl: bool) -> dict[str, bool]:
    # Triton's interpreter does not know launch_pdl.
    return {"USE_PDL": True, "launch_pdl": True} if pdl else {"USE_PDL": False}


def fused_norm_rope(
    q_out: Tensor, positions: Tensor, q_c: Tensor, q_weight: Tensor, q_eps: float, kv_c: Tensor, kv_weight: Tensor, kv_eps: float,
    k_pe: Tensor, cos_sin_cache: Tensor, index_k: Tensor | None, index_k_weight: Tensor | None, index_k_bias: Tensor | None,
    index_k_eps: float, index_cos_sin_cache: Tensor | None, topk_indices: Tensor | None, slot_mapping: Tensor | None,
    indexer_k_cache: Tensor | None, mla_kv_cache: Tensor | None, mla_kv_cache_dtype: str, mla_k_scale: Tensor | None,
    index_rope_interleave: bool, pdl: bool,
) -> None:
    """Arguments as :func:`lldecode_pdl.reference.fused_norm_rope`; `pdl` launches with programmatic dependent launch."""
    topk = 0 if topk_indices is None else topk_indices.shape[1]
    fused_norm_rope_kernel[(len(q_c), 2 if index_k is None else 4)](
        positions, None if mla_kv_cache is None else slot_mapping, *_rows(q_c), q_weight, q_eps, *_rows(q_out),
        *_rows(kv_c), kv_weight, kv_eps, *_rows(k_pe), *_rows(cos_sin_cache), *_paged(mla_kv_cache), mla_k_scale,
        *_rows(index_k), index_k_weight, index_k_bias, index_k_eps, *_rows(index_cos_sin_cache), *_paged(indexer_k_cache)[:3],
        *_rows(topk_indices), Q_DIM=q_c.shape[1], Q_BLOCK=triton.next_power_of_2(q_c.shape[1]), DS_MLA=mla_kv_cache_dtype == "fp8_ds_mla",
        MLA_BLOCK_SIZE=0 if mla_kv_cache is None else mla_kv_cache.shape[1], KV_DIM=kv_c.shape[1], KV_HALF=k_pe.shape[1] // 2,
        K_BLOCK_SIZE=0 if indexer_k_cache is None else indexer_k_cache.shape[1], K_HALF=0 if index_k is None else index_k.shape[1] // 4,
        INTERLEAVE=index_rope_interleave, TOPK=topk, TOPK_BLOCK=triton.next_power_of_2(topk), **_options(pdl),
    )


def fused_eh_norm(
    positions: Tensor, embeds: Tensor, hidden: Tensor, enorm_weight: Tensor, hnorm_weight: Tensor, eps: float, pdl: bool
) -> Tensor:
    """Arguments as :func:`lldecode_pdl.reference.fused_eh_norm`; `pdl` launches with programmatic dependent launch."""
    tokens, dim = embeds.shape
    out = embeds.new_empty(tokens, 2 * dim)
    fused_eh_norm_kernel[(tokens, 2)](
        positions, *_rows(embeds), *_rows(hidden), enorm_weight, hnorm_weight, eps, *_rows(out),
        DIM=dim, BLOCK=triton.next_power_of_2(dim), num_warps=8, **_options(pdl),
    )
    return out


def convert_req_index(
    req_id: Tensor, block_table: Tensor, token_indices: Tensor, block_size: int, workspace_request_ids: Tensor | None,
    workspace_starts: Tensor | None, counts: Tensor | None, pdl: bool,
) -> Tensor:
    """Arguments as :func:`lldecode_pdl.reference.convert_req_index`; `pdl` launches with programmatic dependent launch."""
    tokens, topk = token_indices.shape
    out = token_indices.new_empty(tokens, topk)
    convert_req_index_kernel[(tokens,)](
        req_id, *_rows(block_table), block_table.shape[1], *_rows(token_indices), out, counts, workspace_request_ids, workspace_starts,
        BLOCK_SIZE=block_size, TOPK=topk, BLOCK=triton.next_power_of_2(topk), num_warps=8, **_options(pdl),
    )
    return out
