"""Decode through GLM-5.2 or DeepSeek-V3.2 layers and their MTP draft, one tensor-parallel rank's share: what ``lldecode ablate`` measures.

In plain torch. Each step is a module function with the name and arguments of the call that vLLM 0.26.0 makes there
(``vllm/models/deepseek_v32/nvidia``), looked up at each call, so that a feature patches ``lldecode.layer:<function>`` with
the wrapper it uses in vLLM. Steps that vLLM reaches through its forward context take the needed tensors instead. Nothing
synchronizes with the host, so that a step can be captured in a CUDA graph.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
BLOCK_SIZE = 64
"""Tokens of a block in the paged caches."""
DS_MLA_TILE = 128
"""Latent elements that share one fp32 scale in the ``fp8_ds_mla`` cache."""


@dataclasses.dataclass(frozen=True)
class Dims:
    """Dimensions of one rank's share, under the names of the Hugging Face config.

    Attributes:
        num_heads: attention heads of this rank.
        moe_intermediate_size: of this rank, for routed and shared experts alike.
        index_topk_freq: one layer in this many has an indexer; the others reuse its top-k.
        vocab_size: of this rank.
        index_share_for_mtp_iteration: the model was trained to reuse the first draft step's top-k in those after it.
        indexer_rope_interleave: adjacent pairs rotate (GLM-5.2) rather than the two halves (DeepSeek-V3.2).
        router_dtype: of the router logits.
        kv_cache_dtype: ``fp8_ds_mla`` (fp8 latent with a scale per 128, bf16 RoPE part, bf16 query) or ``fp8`` (one
            scale, packed fp8 query): what vLLM uses on SM90 and on SM100.
    """

    name: str
    hidden_size: int
    num_heads: int
    q_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_topk_freq: int
    indexer_rope_interleave: bool
    n_group: int
    topk_group: int
    rms_norm_eps: float
    rope_theta: float
    router_dtype: torch.dtype
    vocab_size: int
    index_share_for_mtp_iteration: bool
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 256
    routed_scaling_factor: float = 2.5
    kv_cache_dtype: str = "fp8_ds_mla"

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in ("fp8_ds_mla", "fp8"):
            raise ValueError(f'kv_cache_dtype: expected "fp8_ds_mla" or "fp8", got {self.kv_cache_dtype!r}')

    @property
    def scale(self) -> float:
        """Softmax scale of the attention."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5

    @property
    def cache_width(self) -> int:
        """Bytes of a token in the MLA cache."""
        if self.kv_cache_dtype == "fp8":
            return self.kv_lora_rank + self.qk_rope_head_dim
        return self.kv_lora_rank + 4 * (self.kv_lora_rank // DS_MLA_TILE) + 2 * self.qk_rope_head_dim

    def scaled(self) -> "Dims":
        """The same layer, small enough for a CPU; what kernels require exactly (latent, RoPE and indexer head) is kept."""
        return dataclasses.replace(
            self,
            name=f"{self.name}-scaled",
            hidden_size=512,
            num_heads=4,
            q_lora_rank=256,
            qk_nope_head_dim=64,
            v_head_dim=64,
            index_n_heads=8,
            index_topk=128,
            n_routed_experts=32,
            moe_intermediate_size=64,
            vocab_size=512,
        )


GLM52 = Dims(
    name="glm52",
    hidden_size=6144,
    num_heads=8,
    q_lora_rank=2048,
    qk_nope_head_dim=192,
    v_head_dim=256,
    index_n_heads=32,
    index_topk_freq=4,
    indexer_rope_interleave=True,
    n_group=1,
    topk_group=1,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    router_dtype=torch.float32,
    vocab_size=154880 // 8,
    index_share_for_mtp_iteration=True,
)
DSV32 = Dims(
    name="dsv32",
    hidden_size=7168,
    num_heads=16,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    v_head_dim=128,
    index_n_heads=64,
    index_topk_freq=1,
    indexer_rope_interleave=False,
    n_group=8,
    topk_group=4,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    router_dtype=torch.bfloat16,
    vocab_size=129280 // 8,
    index_share_for_mtp_iteration=False,
)
MODELS = {d.name: d for d in (GLM52, DSV32)}


@dataclasses.dataclass(frozen=True)
class Indexer:
    """Weights and cache of a layer's lightning indexer.

    Attributes:
        k_cache: uint8 ``[blocks, BLOCK_SIZE, head_dim + 4]``; a block holds the fp8 values of its tokens, then their fp32 scales.
    """

    wq_b: Tensor
    wk_weights_proj: Tensor
    k_norm_weight: Tensor
    k_norm_bias: Tensor
    k_cache: Tensor


@dataclasses.dataclass(frozen=True)
class Layer:
    """Weights ``[out, in]`` and caches of one decoder layer.

    Attributes:
        W_UK_T, W_UV: the absorbed halves of ``kv_b_proj``, ``[heads, nope, latent]`` and ``[heads, latent, v]``.
        kv_cache: uint8 ``[blocks, BLOCK_SIZE, dims.cache_width]``.
        indexer: None where the layer reuses the previous top-k.
    """

    dims: Dims
    input_layernorm: Tensor
    fused_qkv_a_proj: Tensor
    q_a_layernorm: Tensor
    kv_a_layernorm: Tensor
    q_b_proj: Tensor
    W_UK_T: Tensor
    W_UV: Tensor
    o_proj: Tensor
    post_attention_layernorm: Tensor
    gate: Tensor
    e_score_correction_bias: Tensor
    w13: Tensor
    w2: Tensor
    shared_gate_up_proj: Tensor
    shared_down_proj: Tensor
    kv_cache: Tensor
    indexer: Indexer | None


@dataclasses.dataclass(frozen=True)
class Mtp:
    """Weights ``[out, in]`` of the layer that drafts (multi-token prediction): embedding, projection, one decoder layer, LM head.

    Attributes:
        norm: of the draft's hidden state, before the head and before it is the next step's input.
        embed_tokens, head: ``[vocab_size, hidden_size]``.
        block: has an indexer.
    """

    embed_tokens: Tensor
    enorm: Tensor
    hnorm: Tensor
    eh_proj: Tensor
    block: Layer
    norm: Tensor
    head: Tensor


@dataclasses.dataclass(frozen=True)
class State:
    """Input and metadata of one decode step of a batch, shared by its layers.

    Attributes:
        hidden, residual: ``[batch, hidden_size]``; the residual is None where the first layer starts from `hidden` alone.
        tokens: int64 ``[batch]``; the sampled tokens from which a draft starts.
        positions, slot_mapping: int64 ``[batch]``; the slot is where the token's keys go in the caches.
        seq_lens, req_id: int32 ``[batch]``.
        block_table: int32 ``[batch, blocks of a request]``.
        topk_indices: int32 ``[batch, index_topk]``, written by a layer with an indexer and read by those after it.
        cos_sin_cache: ``[positions, rope]``, cosines then sines.
        q_scale, k_scale: fp32 scalars of the fp8 query and of the ``fp8`` cache.
        on_topk: called in each layer with `topk_indices` before the attention reads it, to record or replace the selection.
    """

    hidden: Tensor
    residual: Tensor | None
    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    req_id: Tensor
    block_table: Tensor
    topk_indices: Tensor
    cos_sin_cache: Tensor
    q_scale: Tensor
    k_scale: Tensor
    on_topk: Callable[[Tensor], None] | None = None

    def head(self, batch: int) -> "State":
        """The first `batch` requests; views of the same tensors."""
        whole = ("cos_sin_cache", "q_scale", "k_scale", "on_topk")
        cut = {f.name: getattr(self, f.name)[:batch] for f in dataclasses.fields(self) if f.name not in whole}
        return dataclasses.replace(self, **cut)


class Out(NamedTuple):
    """What one layer computed.

    Attributes:
        hidden, residual: ``[batch, hidden_size]``.
        router_logits: ``[batch, experts]``.
        topk_ids: int32 ``[batch, num_experts_per_tok]``.
    """

    hidden: Tensor
    residual: Tensor
    router_logits: Tensor
    topk_ids: Tensor


class Draft(NamedTuple):
    """What one draft step computed.

    Attributes:
        tokens: int64 ``[batch]``, the next step's input.
        hidden: ``[batch, hidden_size]``, normed, the next step's other input.
        logits: ``[batch, vocab_size]``.
        out: of its decoder layer.
    """

    tokens: Tensor
    hidden: Tensor
    logits: Tensor
    out: Out


def build(
    dims: Dims,
    batch: int,
    context: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    layers: int = 1,
    spec: int = 0,
    seed: int = 0,
) -> tuple[list[Layer], State]:
    """Random, seeded layers with filled caches, and the state of `batch` requests that decode their token number `context`.

    Request ``i`` is ``i`` tokens shorter than `context`, and the caches' blocks are dealt out in random order, with room for `spec`
    draft steps (:func:`build_draft`).

    Raises:
        ValueError: a count is not positive, or `context` is not larger than `batch`.
    """
    for name, value, least in (("batch", batch, 1), ("layers", layers, 1), ("context", context, batch + 1)):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    make = _Maker(dims, torch.device(device), dtype, seed)
    state = make.state(batch, context, context + max(0, spec - 1))
    return [make.layer(state, with_indexer=i % dims.index_topk_freq == 0) for i in range(layers)], state


def build_draft(dims: Dims, state: State, spec: int, *, seed: int = 1) -> tuple[Mtp, list[State]]:
    """A random, seeded draft layer, and the state of each of `spec` draft steps after `state`, whose `build` made room for them.

    Step ``i`` is at the position ``i`` after the state's, and step 0 at the same, as in vLLM. The steps share a top-k buffer.
    """
    make = _Maker(dims, state.hidden.device, state.hidden.dtype, seed)
    topk = torch.full_like(state.topk_indices, -1)
    states = []
    for i in range(spec):
        positions = state.positions + i
        slots = _slots(state.block_table, positions)
        states.append(dataclasses.replace(state, positions=positions, slot_mapping=slots, seq_lens=state.seq_lens + i, topk_indices=topk))
    return make.mtp(state), states


def _slots(block_table: Tensor, positions: Tensor) -> Tensor:
    return block_table.gather(1, positions[:, None] // BLOCK_SIZE)[:, 0].long() * BLOCK_SIZE + positions % BLOCK_SIZE


class _Maker:
    def __init__(self, dims: Dims, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.dims, self.device, self.dtype = dims, device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return out.normal_(mean, std, generator=self.generator)

    def weight(self, *shape: int) -> Tensor:
        return self.normal(*shape, std=shape[-1] ** -0.5)

    def norm(self, size: int) -> Tensor:
        return self.normal(size, mean=1.0, std=0.1)

    def state(self, batch: int, context: int, room: int) -> State:
        d, dev = self.dims, self.device
        blocks = math.ceil(room / BLOCK_SIZE)
        block_table = torch.randperm(batch * blocks, generator=self.generator, device=dev).to(torch.int32).view(batch, blocks)
        req_id = torch.arange(batch, dtype=torch.int32, device=dev)
        seq_lens = context - req_id
        positions = seq_lens.long() - 1
        inv_freq = d.rope_theta ** (-torch.arange(0, d.qk_rope_head_dim, 2, device=dev) / d.qk_rope_head_dim)
        angles = torch.arange(room, device=dev)[:, None] * inv_freq
        return State(
            hidden=self.normal(batch, d.hidden_size),
            residual=self.normal(batch, d.hidden_size),
            tokens=positions % d.vocab_size,
            positions=positions,
            slot_mapping=_slots(block_table, positions),
            seq_lens=seq_lens,
            req_id=req_id,
            block_table=block_table,
            topk_indices=torch.full((batch, d.index_topk), -1, dtype=torch.int32, device=dev),
            cos_sin_cache=torch.cat([angles.cos(), angles.sin()], -1).to(self.dtype),
            q_scale=torch.ones((), device=dev),
            k_scale=torch.ones((), device=dev),
        )

    def layer(self, state: State, with_indexer: bool) -> Layer:
        d, w = self.dims, self.weight
        qk, inter = d.qk_nope_head_dim + d.qk_rope_head_dim, d.moe_intermediate_size
        blocks = state.block_table.numel()
        slots = torch.arange(blocks * BLOCK_SIZE, device=self.device)
        kv_cache = torch.empty(blocks, BLOCK_SIZE, d.cache_width, dtype=torch.uint8, device=self.device)
        latent, rope = self.normal(len(slots), d.kv_lora_rank), self.normal(len(slots), d.qk_rope_head_dim)
        _write_mla(kv_cache, slots, latent.float(), rope.float(), d.kv_cache_dtype, state.k_scale)
        indexer = None
        if with_indexer:
            k_cache = torch.empty(blocks, BLOCK_SIZE, d.index_head_dim + 4, dtype=torch.uint8, device=self.device)
            _write_index_k(k_cache, slots, self.normal(len(slots), d.index_head_dim).float())
            indexer = Indexer(
                wq_b=w(d.index_n_heads * d.index_head_dim, d.q_lora_rank),
                wk_weights_proj=w(d.index_head_dim + d.index_n_heads, d.hidden_size),
                k_norm_weight=self.norm(d.index_head_dim),
                k_norm_bias=self.normal(d.index_head_dim, std=0.1),
                k_cache=k_cache,
            )
        return Layer(
            dims=d,
            input_layernorm=self.norm(d.hidden_size),
            fused_qkv_a_proj=w(d.q_lora_rank + d.kv_lora_rank + d.qk_rope_head_dim, d.hidden_size),
            q_a_layernorm=self.norm(d.q_lora_rank),
            kv_a_layernorm=self.norm(d.kv_lora_rank),
            q_b_proj=w(d.num_heads * qk, d.q_lora_rank),
            W_UK_T=self.normal(d.num_heads, d.qk_nope_head_dim, d.kv_lora_rank, std=d.qk_nope_head_dim**-0.5),
            W_UV=self.normal(d.num_heads, d.kv_lora_rank, d.v_head_dim, std=d.kv_lora_rank**-0.5),
            o_proj=w(d.hidden_size, d.num_heads * d.v_head_dim),
            post_attention_layernorm=self.norm(d.hidden_size),
            gate=w(d.n_routed_experts, d.hidden_size),
            e_score_correction_bias=self.normal(d.n_routed_experts, std=0.1, dtype=torch.float32),
            w13=w(d.n_routed_experts, 2 * inter, d.hidden_size),
            w2=w(d.n_routed_experts, d.hidden_size, inter),
            shared_gate_up_proj=w(2 * inter, d.hidden_size),
            shared_down_proj=w(d.hidden_size, inter),
            kv_cache=kv_cache,
            indexer=indexer,
        )

    def mtp(self, state: State) -> Mtp:
        d = self.dims
        return Mtp(
            embed_tokens=self.normal(d.vocab_size, d.hidden_size),
            enorm=self.norm(d.hidden_size),
            hnorm=self.norm(d.hidden_size),
            eh_proj=self.weight(d.hidden_size, 2 * d.hidden_size),
            block=self.layer(state, with_indexer=True),
            norm=self.norm(d.hidden_size),
            head=self.weight(d.vocab_size, d.hidden_size),
        )


def poison(layer: Layer, state: State) -> None:
    """Fill with NaN what the next step must write to the layer's caches."""
    layer.kv_cache.flatten(0, 1)[state.slot_mapping] = 0xFF
    if layer.indexer is not None:
        for part in _index_k_parts(layer.indexer.k_cache):
            part[state.slot_mapping // BLOCK_SIZE, state.slot_mapping % BLOCK_SIZE] = 0xFF


def written(layer: Layer, state: State) -> dict[str, Tensor]:
    """What the last step wrote to the layer's caches, dequantized: ``kv`` and, where it has an indexer, ``index_k``."""
    d = layer.dims
    out = {"kv": read_mla(layer.kv_cache, state.slot_mapping, d.kv_lora_rank, d.kv_cache_dtype, state.k_scale)}
    if layer.indexer is not None:
        out["index_k"] = read_index_k(layer.indexer.k_cache, state.slot_mapping)
    return out


def step(layers: list[Layer], state: State) -> list[Out]:
    """One decode step through `layers`, each fed by the one before."""
    outs: list[Out] = []
    hidden, residual = state.hidden, state.residual
    for layer in layers:
        outs.append(decoder_layer(layer, state, hidden, residual))
        hidden, residual = outs[-1].hidden, outs[-1].residual
    return outs


def propose(mtp: Mtp, states: list[State], hidden: Tensor) -> list[Draft]:
    """One draft step for each of `states`, the first from its tokens and the target's `hidden` ``[batch, hidden_size]``.

    In vLLM the first step also covers the tokens that the target has just verified; here it is one token a request, as the others.
    """
    first = draft_step(mtp, states[0], states[0].tokens, hidden)
    return [first, *multi_step_decode(mtp, states[1:], first.tokens, first.hidden)]


def multi_step_decode(mtp: Mtp, states: list[State], tokens: Tensor, hidden: Tensor) -> list[Draft]:
    """The draft steps after the first, each fed by the one before."""
    drafts: list[Draft] = []
    for state in states:
        drafts.append(draft_step(mtp, state, tokens, hidden))
        tokens, hidden = drafts[-1].tokens, drafts[-1].hidden
    return drafts


def draft_step(mtp: Mtp, state: State, tokens: Tensor, hidden: Tensor) -> Draft:
    eps = mtp.block.dims.rms_norm_eps
    joined = fused_eh_norm(state.positions, F.embedding(tokens, mtp.embed_tokens), hidden, mtp.enorm, mtp.hnorm, eps)
    (out,) = step([mtp.block], dataclasses.replace(state, hidden=linear(joined, mtp.eh_proj), residual=None))
    hidden, _ = fused_add_rms_norm(out.hidden, out.residual, mtp.norm, eps)
    logits = linear(hidden, mtp.head)
    return Draft(logits.argmax(-1), hidden, logits, out)


def decoder_layer(layer: Layer, state: State, hidden: Tensor, residual: Tensor | None) -> Out:
    eps = layer.dims.rms_norm_eps
    if residual is None:
        hidden, residual = F.rms_norm(hidden, hidden.shape[-1:], layer.input_layernorm, eps), hidden
    else:
        hidden, residual = fused_add_rms_norm(hidden, residual, layer.input_layernorm, eps)
    hidden = attention(layer, state, hidden)
    hidden, residual = fused_add_rms_norm(hidden, residual, layer.post_attention_layernorm, eps)
    hidden, router_logits, topk_ids = moe(layer, hidden)
    return Out(hidden, residual, router_logits, topk_ids)


def attention(layer: Layer, state: State, hidden: Tensor) -> Tensor:
    d, indexer = layer.dims, layer.indexer
    qkv_lora = linear(hidden, layer.fused_qkv_a_proj)
    q_c, kv_c, k_pe = qkv_lora.split([d.q_lora_rank, d.kv_lora_rank, d.qk_rope_head_dim], -1)
    index_k = index_weights = None
    if indexer is not None:
        index_k, index_weights = linear(hidden, indexer.wk_weights_proj).split([d.index_head_dim, d.index_n_heads], -1)
    q_c = fused_norm_rope(
        state.positions,
        q_c,
        layer.q_a_layernorm,
        d.rms_norm_eps,
        kv_c,
        layer.kv_a_layernorm,
        d.rms_norm_eps,
        k_pe,
        state.cos_sin_cache,
        index_k,
        indexer.k_norm_weight if indexer else None,
        indexer.k_norm_bias if indexer else None,
        1e-6,
        state.cos_sin_cache if indexer else None,
        state.topk_indices,
        slot_mapping=state.slot_mapping,
        indexer_k_cache=indexer.k_cache if indexer else None,
        mla_kv_cache=layer.kv_cache,
        mla_kv_cache_dtype=d.kv_cache_dtype,
        mla_k_scale=state.k_scale,
        has_indexer=indexer is not None,
        index_rope_interleave=d.indexer_rope_interleave,
    )
    q = linear(q_c, layer.q_b_proj).unflatten(-1, (d.num_heads, -1))
    q_nope, q_pe = q.split([d.qk_nope_head_dim, d.qk_rope_head_dim], -1)
    ql_nope = bmm(q_nope.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
    index_q = linear(q_c, indexer.wq_b).unflatten(-1, (d.index_n_heads, -1)) if indexer else None
    packed = d.kv_cache_dtype == "fp8"
    index_q_fp8, index_weights_out, mqa_q = fused_q(
        state.positions,
        q_pe,
        state.cos_sin_cache,
        index_q,
        state.cos_sin_cache if indexer else None,
        ql_nope,
        state.q_scale,
        index_weights,
        d.index_head_dim**-0.5 if indexer else 0.0,
        d.index_n_heads**-0.5 if indexer else 0.0,
        has_indexer=indexer is not None,
        index_rope_interleave=d.indexer_rope_interleave,
        quantize_mqa=packed,
    )
    if indexer is not None:
        sparse_attn_indexer(index_q_fp8, index_weights_out, indexer.k_cache, state.seq_lens, state.block_table, state.topk_indices)
    if state.on_topk is not None:
        state.on_topk(state.topk_indices)
    slots = triton_convert_req_index_to_global_index(
        state.req_id, state.block_table, state.topk_indices, BLOCK_SIZE=BLOCK_SIZE, NUM_TOPK_TOKENS=d.index_topk
    )
    query = mqa_q if packed else (ql_nope, mqa_q)
    latent = forward_mqa(query, layer.kv_cache, slots, d.scale, d.kv_lora_rank, d.kv_cache_dtype, state.q_scale, state.k_scale)
    output = hidden.new_empty(hidden.shape[0], d.num_heads, d.v_head_dim)
    bmm(latent.transpose(0, 1), layer.W_UV, out=output.transpose(0, 1))
    return linear(output.flatten(1), layer.o_proj)


def moe(layer: Layer, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = layer.dims
    router_logits = router_gemm(hidden, layer.gate, d.router_dtype)
    topk_weights, topk_ids = grouped_topk(
        hidden,
        router_logits,
        d.num_experts_per_tok,
        True,
        d.n_group,
        d.topk_group,
        "sigmoid",
        d.routed_scaling_factor,
        layer.e_score_correction_bias,
    )
    routed = fused_experts(hidden, layer.w13, layer.w2, topk_weights, topk_ids)
    shared = linear(silu_and_mul(linear(hidden, layer.shared_gate_up_proj)), layer.shared_down_proj)
    return routed + shared, router_logits, topk_ids


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum), both of x's shape and dtype."""
    residual = x + residual
    return F.rms_norm(residual, residual.shape[-1:], weight, eps), residual


def fused_eh_norm(
    positions: Tensor, inputs_embeds: Tensor, previous_hidden: Tensor, enorm_w: Tensor, hnorm_w: Tensor, eps: float
) -> Tensor:
    """Both inputs ``[M, N]`` of a draft step, normalized side by side ``[M, 2 N]``; the embedding at position 0 counts as zero."""
    embeds = inputs_embeds.masked_fill((positions == 0)[:, None], 0)
    return torch.cat([_rms_norm(embeds, enorm_w, eps), _rms_norm(previous_hidden, hnorm_w, eps)], -1).to(inputs_embeds.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x ``[M, K]`` times weight ``[N, K]``, transposed."""
    return F.linear(x, weight)


def bmm(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x ``[heads, M, K]`` times weight ``[heads, K, N]``; x and `out` may be transposed views."""
    return torch.bmm(x, weight) if out is None else torch.bmm(x, weight, out=out)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)


def _rope(x: Tensor, cos_sin: Tensor, interleave: bool) -> Tensor:
    """Rotate the leading RoPE elements of x ``[M, ..., D]`` by cos_sin ``[M, ..., rope]``, in fp32."""
    cos, sin = cos_sin.float().chunk(2, -1)
    rotated, rest = x.float().split([cos_sin.shape[-1], x.shape[-1] - cos_sin.shape[-1]], -1)
    first, second = rotated.unflatten(-1, (-1, 2) if interleave else (2, -1)).unbind(-1 if interleave else -2)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1 if interleave else -2)
    return torch.cat([turned.flatten(-2), rest], -1)


def _ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values and their fp32 scale ``[..., 1]``: the power of two at or above ``max(amax, 1e-4) / 448``."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
    # adding a full mantissa carries into the exponent unless the mantissa is zero
    scale = ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
    return (x / scale).to(FP8), scale


def _index_k_parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of an indexer cache as bytes: values ``[blocks, BLOCK_SIZE, head_dim]`` and scales ``[blocks, BLOCK_SIZE, 4]``."""
    values, scales = cache.flatten(1).split([cache.shape[1] * (cache.shape[2] - 4), cache.shape[1] * 4], 1)
    return values.unflatten(1, (cache.shape[1], -1)), scales.unflatten(1, (cache.shape[1], 4))


def _write_index_k(cache: Tensor, slots: Tensor, k: Tensor) -> None:
    fp8, scale = _ue8m0(k)
    values, scales = _index_k_parts(cache)
    block, offset = slots // cache.shape[1], slots % cache.shape[1]
    values[block, offset] = fp8.view(torch.uint8)
    scales[block, offset] = scale.view(torch.uint8)


def read_index_k(cache: Tensor, slots: Tensor) -> Tensor:
    """Indexer keys in fp32, ``[*slots.shape, head_dim]``."""
    values, scales = _index_k_parts(cache)
    block, offset = slots // cache.shape[1], slots % cache.shape[1]
    return values[block, offset].view(FP8).float() * scales[block, offset].view(torch.float32)


def _write_mla(cache: Tensor, slots: Tensor, latent: Tensor, rope: Tensor, kv_cache_dtype: str, k_scale: Tensor) -> None:
    if kv_cache_dtype == "fp8":
        row = (torch.cat([latent, rope], -1) / k_scale).to(FP8).view(torch.uint8)
    else:
        tiles = latent.unflatten(-1, (-1, DS_MLA_TILE))
        scale = (tiles.abs().amax(-1, keepdim=True) / 448.0).clamp(min=torch.finfo(torch.float32).tiny)
        parts = (tiles / scale).flatten(1).to(FP8), scale.flatten(1), rope.to(torch.bfloat16)
        row = torch.cat([p.view(torch.uint8) for p in parts], -1)
    cache.flatten(0, 1)[slots] = row


def read_mla(cache: Tensor, slots: Tensor, kv_lora_rank: int, kv_cache_dtype: str, k_scale: Tensor) -> Tensor:
    """Cached keys ``[*slots.shape, latent + rope]`` in bf16, as an attention kernel dequantizes them."""
    row = cache.flatten(0, 1)[slots]
    if kv_cache_dtype == "fp8":
        return (row.view(FP8).float() * k_scale).to(torch.bfloat16)
    scales = 4 * (kv_lora_rank // DS_MLA_TILE)
    fp8, scale, rope = row.split([kv_lora_rank, scales, row.shape[-1] - kv_lora_rank - scales], -1)
    tiles = fp8.contiguous().view(FP8).float().unflatten(-1, (-1, DS_MLA_TILE))
    latent = (tiles * scale.contiguous().view(torch.float32)[..., None]).flatten(-2).to(torch.bfloat16)
    return torch.cat([latent, rope.contiguous().view(torch.bfloat16)], -1)


def fused_norm_rope(
    positions: Tensor,
    q_c: Tensor,
    q_rms_norm_w: Tensor,
    q_rms_eps: float,
    kv_c: Tensor,
    kv_rms_norm_w: Tensor,
    kv_rms_eps: float,
    k_pe: Tensor,
    k_rope_cos_sin_cache: Tensor,
    index_k: Tensor | None,
    index_k_layer_norm_w: Tensor | None,
    index_k_layer_norm_bias: Tensor | None,
    index_k_layer_norm_eps: float,
    index_k_rope_cos_sin_cache: Tensor | None,
    topk_indices_buffer: Tensor,
    slot_mapping: Tensor,
    indexer_k_cache: Tensor | None,
    mla_kv_cache: Tensor,
    mla_kv_cache_dtype: str,
    mla_k_scale: Tensor,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
) -> Tensor:
    """Normalize the query latent; normalize, rotate, quantize and cache both kinds of key; clear the top-k buffer.

    Every slot must be valid: a decode step of this module has no padding.

    Returns:
        The normalized query latent, of q_c's shape and dtype.
    """
    k_pe = _rope(k_pe, k_rope_cos_sin_cache[positions], interleave=True)
    _write_mla(mla_kv_cache, slot_mapping, _rms_norm(kv_c, kv_rms_norm_w, kv_rms_eps), k_pe, mla_kv_cache_dtype, mla_k_scale)
    if has_indexer:
        assert index_k is not None and index_k_layer_norm_w is not None and index_k_layer_norm_bias is not None
        assert index_k_rope_cos_sin_cache is not None and indexer_k_cache is not None
        affine = index_k_layer_norm_w.float(), index_k_layer_norm_bias.float()
        k = F.layer_norm(index_k.float(), index_k.shape[-1:], *affine, index_k_layer_norm_eps)
        _write_index_k(indexer_k_cache, slot_mapping, _rope(k, index_k_rope_cos_sin_cache[positions], index_rope_interleave))
        topk_indices_buffer[: len(positions)].fill_(-1)
    return _rms_norm(q_c, q_rms_norm_w, q_rms_eps).to(q_c.dtype)


def fused_q(
    positions: Tensor,
    q_pe: Tensor,
    q_pe_cos_sin_cache: Tensor,
    index_q: Tensor | None,
    index_q_cos_sin_cache: Tensor | None,
    ql_nope: Tensor,
    q_scale: Tensor,
    index_weights: Tensor | None,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    quantize_mqa: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Rotate both queries, quantize what is used as fp8, and fold the indexer's query scale into its weights.

    Returns:
        fp8 indexer query ``[M, index heads, head_dim]`` and fp32 weights ``[M, index heads]`` (None without an indexer), and
        the packed fp8 query ``[M, heads, latent + rope]``, or the rotated q_pe where `quantize_mqa` is off.
    """
    mqa_q = _rope(q_pe, q_pe_cos_sin_cache[positions][:, None], interleave=True)
    mqa_q = (torch.cat([ql_nope.float(), mqa_q], -1) / q_scale).to(FP8) if quantize_mqa else mqa_q.to(q_pe.dtype)
    if not has_indexer:
        return None, None, mqa_q
    assert index_q is not None and index_q_cos_sin_cache is not None and index_weights is not None
    index_q_fp8, scale = _ue8m0(_rope(index_q, index_q_cos_sin_cache[positions][:, None], index_rope_interleave))
    weights = index_weights.float() * scale[..., 0] * index_weights_softmax_scale * index_weights_head_scale
    return index_q_fp8, weights, mqa_q


def sparse_attn_indexer(
    index_q_fp8: Tensor | None,
    index_weights: Tensor | None,
    indexer_k_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices_buffer: Tensor,
) -> None:
    """Write each request's best positions to the buffer, which the caller cleared to -1; their order is not defined."""
    assert index_q_fp8 is not None and index_weights is not None
    offsets = torch.arange(BLOCK_SIZE, device=seq_lens.device)
    slots = (block_table.long()[..., None] * BLOCK_SIZE + offsets).flatten(1)
    scores = torch.bmm(index_q_fp8.float(), read_index_k(indexer_k_cache, slots).transpose(1, 2)).relu_()
    logits = torch.bmm(index_weights[:, None], scores)[:, 0]
    logits.masked_fill_(torch.arange(slots.shape[1], device=slots.device) >= seq_lens[:, None], -torch.inf)
    best = logits.topk(min(topk_indices_buffer.shape[1], slots.shape[1]), sorted=False)
    topk_indices_buffer[: len(seq_lens), : best.indices.shape[1]] = best.indices.where(best.values > -torch.inf, -1).to(torch.int32)


def triton_convert_req_index_to_global_index(
    req_id: Tensor, block_table: Tensor, token_indices: Tensor, BLOCK_SIZE: int = 64, NUM_TOPK_TOKENS: int = 2048
) -> Tensor:
    """Positions ``[M, NUM_TOPK_TOKENS]`` of a request, or -1, to slots of the paged cache, or -1; int32."""
    position = token_indices.clamp(min=0)
    block = block_table[req_id].gather(1, (position // BLOCK_SIZE).long())
    return (block * BLOCK_SIZE + position % BLOCK_SIZE).where(token_indices >= 0, -1)


def forward_mqa(
    q: Tensor | tuple[Tensor, Tensor],
    kv_cache: Tensor,
    slots: Tensor,
    scale: float,
    kv_lora_rank: int,
    kv_cache_dtype: str,
    q_scale: Tensor,
    k_scale: Tensor,
) -> Tensor:
    """Attention of each token over its own selected slots.

    Args:
        q: packed ``[M, heads, latent + rope]``, fp8 to be scaled by `q_scale` or bf16, or the bf16 parts (ql_nope, q_pe).
        slots: int32 ``[M, topk]``, -1 where there is none.

    Returns:
        bf16 ``[M, heads, latent]``.
    """
    packed = torch.cat(q, -1) if isinstance(q, tuple) else q
    query = packed if packed.dtype == torch.bfloat16 else (packed.float() * q_scale).to(torch.bfloat16)
    keys = read_mla(kv_cache, slots.clamp(min=0), kv_lora_rank, kv_cache_dtype, k_scale)
    scores = torch.bmm(query, keys.transpose(1, 2)).float() * scale
    weights = scores.masked_fill(slots[:, None] < 0, -torch.inf).softmax(-1).to(keys.dtype)
    return torch.bmm(weights, keys[..., :kv_lora_rank])


def router_gemm(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Router logits of x ``[M, K]`` and weight ``[N, K]``, accumulated in fp32: vLLM's ``GateLinear`` without its own kernels."""
    if out_dtype == x.dtype:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=out_dtype)
    return F.linear(x.to(out_dtype), weight.to(out_dtype))


def grouped_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str,
    routed_scaling_factor: float,
    e_score_correction_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """fp32 weights and int32 experts, ``[M, topk]`` each, chosen by biased score within the best groups."""
    if scoring_func != "sigmoid":
        raise ValueError(f'scoring_func: expected "sigmoid", got {scoring_func!r}')
    scores = gating_output.float().sigmoid()
    choice = scores + e_score_correction_bias
    if num_expert_group > 1:
        groups = choice.unflatten(-1, (num_expert_group, -1))
        best = groups.topk(2, sorted=False).values.sum(-1).topk(topk_group, sorted=False).indices
        dropped = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        choice = groups.masked_fill(dropped[..., None], -torch.inf).flatten(-2)
    ids = choice.topk(topk, sorted=False).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, ids.to(torch.int32)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def fused_experts(hidden: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Weighted sum over each token's experts: one grouped GEMM each way over the tokens sorted by expert."""
    tokens, topk = topk_ids.shape
    experts, order = topk_ids.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(len(w13), dtype=experts.dtype, device=experts.device), right=True).to(torch.int32)
    x = silu_and_mul(F.grouped_mm(hidden[order // topk], w13.transpose(1, 2), offs=ends))
    y = torch.empty(tokens * topk, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
    y[order] = F.grouped_mm(x, w2.transpose(1, 2), offs=ends)
    return (y.unflatten(0, (tokens, topk)) * topk_weights[..., None]).sum(1).to(hidden.dtype)
