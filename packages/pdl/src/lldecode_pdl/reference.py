"""The semantics in plain torch: what the ops do on a CPU, and the oracle of the tests."""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

FP8 = torch.float8_e4m3fn
MLA_TILE = 128
"""Latent elements that share one fp32 scale in the ``fp8_ds_mla`` layout."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32 RMSNorm over the last dimension."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, cos_sin: Tensor, interleave: bool) -> Tensor:
    """RoPE on the leading elements of fp32 x ``[T, D]`` by cos_sin ``[T, rope]``: adjacent pairs, or (NeoX) the two halves."""
    cos, sin = cos_sin.float().chunk(2, -1)
    rope, rest = x.split([cos_sin.shape[-1], x.shape[-1] - cos_sin.shape[-1]], -1)
    x1, x2 = (rope[..., 0::2], rope[..., 1::2]) if interleave else rope.chunk(2, -1)
    pair = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return torch.cat([torch.stack(pair, -1).flatten(-2) if interleave else torch.cat(pair, -1), rest], -1)


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """e4m3 bytes of x / scale, rounded to nearest even and saturated; NaN stays NaN."""
    return (x / scale).clamp(-448.0, 448.0).to(FP8).view(torch.uint8)


def amax(x: Tensor) -> Tensor:
    """Largest magnitude over the last dimension, kept; NaN is left out."""
    return x.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)


def ue8m0_scale(largest: Tensor) -> Tensor:
    """The power of two at or above ``max(largest, 1e-4) / 448`` in exact arithmetic, fp32."""
    mantissa, exponent = torch.frexp(largest.clamp(min=1e-4, max=torch.finfo(torch.float32).max))  # mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(largest), exponent - 9 + (mantissa > 0.875))


# fmt: off
def fused_norm_rope(
    q_out: Tensor, positions: Tensor, q_c: Tensor, q_weight: Tensor, q_eps: float, kv_c: Tensor, kv_weight: Tensor, kv_eps: float,
    k_pe: Tensor, cos_sin_cache: Tensor, index_k: Tensor | None, index_k_weight: Tensor | None, index_k_bias: Tensor | None,
    index_k_eps: float, index_cos_sin_cache: Tensor | None, topk_indices: Tensor | None, slot_mapping: Tensor | None,
    indexer_k_cache: Tensor | None, mla_kv_cache: Tensor | None, mla_kv_cache_dtype: str, mla_k_scale: Tensor | None,
    index_rope_interleave: bool,
) -> None:
    """Everything between the A projections and the B projections of a DSA layer, for T tokens.

    Writes the normalized query latent; normalizes, rotates, quantizes and caches both kinds of key; clears the top-k rows to -1.
    The query is written for every row. Nothing is cached for a row whose slot is negative or past the cache, nor, without slots
    (a profile run), for any. A layer without an indexer passes None for everything of the indexer, and its top-k rows are left.

    Args:
        q_out: ``[T, q]``, written.
        positions: integers ``[T]``.
        q_c, q_weight: ``[T, q]`` and ``[q]``.
        kv_c, kv_weight: ``[T, latent]`` and ``[latent]``.
        k_pe: ``[T, rope]``, rotated in adjacent pairs.
        cos_sin_cache, index_cos_sin_cache: ``[positions, rope]`` and ``[positions, d / 2]``, cosines then sines.
        index_k, index_k_weight, index_k_bias: ``[T, d]``, ``[d]``, ``[d]``; the first half is rotated.
        topk_indices: int32 ``[>= T, topk]``; its first T rows are written.
        slot_mapping: integers ``[>= T]``.
        indexer_k_cache: bytes ``[blocks, block size, d + 4]``, written: a block holds the e4m3 values of its tokens, then their
            fp32 scales, powers of two.
        mla_kv_cache: bytes ``[blocks, block size, width]``, written: ``fp8`` e4m3 latent and rope over `mla_k_scale`;
            ``fp8_ds_mla`` e4m3 latent, its fp32 scale per 128 elements, bf16 rope.
        mla_k_scale: fp32 scalar.
    """
    # fmt: on
    q_out.copy_(rms_norm(q_c, q_weight, q_eps))
    if index_k is not None and topk_indices is not None:
        topk_indices[: len(q_c)] = -1
    if slot_mapping is None or mla_kv_cache is None:
        return
    slot_mapping = slot_mapping[: len(q_c)]

    rows, slots = _valid(slot_mapping, mla_kv_cache)
    latent = rms_norm(kv_c[rows], kv_weight, kv_eps)
    rope = rotate(k_pe[rows].float(), cos_sin_cache[positions[rows]], interleave=True)
    cache = mla_kv_cache.view(torch.uint8)
    if mla_kv_cache_dtype == "fp8_ds_mla":
        tiles = latent.unflatten(-1, (-1, MLA_TILE))
        scale = (amax(tiles) * (1.0 / 448.0)).clamp(min=torch.finfo(torch.float32).tiny)
        entry = torch.cat([to_fp8(tiles, scale).flatten(1), scale.flatten(1).view(torch.uint8), rope.bfloat16().view(torch.uint8)], -1)
    else:
        assert mla_k_scale is not None
        entry = to_fp8(torch.cat([latent, rope], -1), mla_k_scale)
    cache[slots // cache.shape[1], slots % cache.shape[1]] = entry

    if index_k is not None and indexer_k_cache is not None:
        assert index_k_weight is not None and index_k_bias is not None and index_cos_sin_cache is not None
        rows, slots = _valid(slot_mapping, indexer_k_cache)
        k = layer_norm(index_k[rows].float(), index_k.shape[1:], index_k_weight.float(), index_k_bias.float(), index_k_eps)
        k = rotate(k, index_cos_sin_cache[positions[rows]], index_rope_interleave)
        scale = ue8m0_scale(amax(k))
        (_, size, width), cache = indexer_k_cache.shape, indexer_k_cache.view(torch.uint8).flatten(1)
        block, offset = (slots // size)[:, None], (slots % size)[:, None]
        cache[block, offset * (width - 4) + torch.arange(width - 4)] = to_fp8(k, scale)
        cache[block, size * (width - 4) + offset * 4 + torch.arange(4)] = scale.view(torch.uint8)


def _valid(slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    rows = ((slots >= 0) & (slots < cache.shape[0] * cache.shape[1])).nonzero()[:, 0]
    return rows, slots[rows].long()


def fused_eh_norm(positions: Tensor, embeds: Tensor, hidden: Tensor, enorm_weight: Tensor, hnorm_weight: Tensor, eps: float) -> Tensor:
    """Input of an MTP layer's projection: ``[enorm(embeds) | hnorm(hidden)]``.

    Args:
        positions: integers ``[T]``; the embedding at position 0 counts as zero.
        embeds, hidden: ``[T, H]``.
        enorm_weight, hnorm_weight: ``[H]``.

    Returns:
        ``[T, 2 H]`` in the dtype of `embeds`.
    """
    embeds_ = embeds.masked_fill((positions == 0)[:, None], 0)
    return torch.cat([rms_norm(embeds_, enorm_weight, eps), rms_norm(hidden, hnorm_weight, eps)], -1).to(embeds.dtype)


# fmt: off
def convert_req_index(
    req_id: Tensor, block_table: Tensor, token_indices: Tensor, block_size: int, workspace_request_ids: Tensor | None,
    workspace_starts: Tensor | None, counts: Tensor | None,
) -> Tensor:
    """Positions within a request to slots of the paged cache.

    Args:
        req_id: int32 ``[T]``, a row of `block_table` for each token.
        block_table: int32 ``[requests, blocks]``.
        token_indices: int32 ``[T, topk]``; negative where there is none.
        block_size: tokens of a block.
        workspace_request_ids: int32 ``[T]``; where it is not negative, the row becomes offsets into the prefill workspace
            instead, from ``workspace_starts[id]`` (int32) on.
        counts: int32 ``[T]``; where given, written: how many of a row's slots are not -1.

    Returns:
        int32 ``[T, topk]``, -1 where the position is negative or past the table.
    """
    # fmt: on
    block = token_indices // block_size
    valid = (token_indices >= 0) & (block < block_table.shape[1])
    page = block_table[req_id.long()].gather(1, block.where(valid, 0).long())
    slot = page * block_size + token_indices % block_size
    if workspace_request_ids is not None and workspace_starts is not None:
        start = workspace_starts[workspace_request_ids.clamp(min=0).long()]
        slot = torch.where(workspace_request_ids[:, None] >= 0, start[:, None] + token_indices, slot)
    if counts is not None:
        counts.copy_(valid.sum(1))
    return slot.where(valid, -1).to(torch.int32)
