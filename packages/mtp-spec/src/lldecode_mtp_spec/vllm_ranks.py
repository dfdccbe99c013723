"""Seams in vLLM 0.26.0 where a draft step meets the other tensor-parallel ranks: the all-reduce before the final norm, and the argmax.

Every choice here depends on shapes and the environment alone, so that all ranks make the same one.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lldecode.feature import ABSENT, Patch, decline
from lldecode_mtp_spec.vllm_hooks import patch

LOCAL_ARGMAX = "LLDECODE_MTP_SPEC_LOCAL_ARGMAX"
"""Environment variable: the smallest batch whose greedy draft tokens come from one argmax a rank; 0 is never, the default is 64.

Measured on two H200s: the gather of the logits grows with the batch, the local argmax hardly does (bench/results/h200-top-tokens.csv).
"""


def local_argmax_batch() -> int:
    """The value of :data:`LOCAL_ARGMAX`.

    Raises:
        ValueError: it is not a whole number.
    """
    text = os.environ.get(LOCAL_ARGMAX, "").strip() or "64"
    if not text.isdecimal():
        raise ValueError(f"{LOCAL_ARGMAX}: expected a batch size, or 0 for never, got {text!r}")
    return int(text)


def invalid_local_argmax() -> str | None:
    """Why the value of :data:`LOCAL_ARGMAX` is not one, or None."""
    try:
        local_argmax_batch()
    except ValueError as e:
        return str(e)
    return None


def _can_use_flashinfer(original: Callable[..., tuple[bool, int]]) -> Callable[..., tuple[bool, int]]:
    @functools.wraps(original)
    def can_use_flashinfer(hidden_states: Tensor, tp_size: int) -> tuple[bool, int]:
        from vllm.model_executor.layers import fused_allreduce_gemma_rms_norm as held

        ok, max_token_num = original(hidden_states, tp_size)
        if not ok:
            return ok, max_token_num
        tokens, hidden = hidden_states.shape
        # The process has one workspace, sized by whoever asked first.
        workspace = held.get_fi_ar_workspace(
            world_size=tp_size,
            rank=held.get_tensor_model_parallel_rank(),
            max_token_num=max_token_num,
            hidden_dim=hidden,
            dtype=hidden_states.dtype,
            group=held.get_tp_group().device_group,
        )
        if workspace.is_buffer_size_sufficient(tp_size=tp_size, num_tokens=tokens, hidden_dim=hidden, dtype=hidden_states.dtype):
            return ok, max_token_num
        decline("mtp-spec", f"all-reduce + norm: FlashInfer's workspace is too small for the batch, of hidden size {hidden}")
        return False, 0

    return can_use_flashinfer


def _layer_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any,
        input_ids: Tensor,
        positions: Tensor,
        previous_hidden_states: Tensor,
        inputs_embeds: Tensor | None = None,
        spec_step_index: int = 0,
    ) -> tuple[Tensor, Tensor]:
        from vllm.models.deepseek_v32.nvidia import fused_ops, mtp

        if self.mtp_block.use_sequence_parallel_moe:  # the block has reduced its output; its rows are gathered there
            return original(self, input_ids, positions, previous_hidden_states, inputs_embeds, spec_step_index)
        weights = self.enorm.weight, self.hnorm.weight
        joined = mtp.fused_eh_norm(positions, inputs_embeds, previous_hidden_states, *weights, self.enorm.variance_epsilon)
        partial, residual = self.mtp_block(positions=positions, hidden_states=self.eh_proj(joined), residual=None)
        normed, _ = fused_ops.fused_allreduce_rms_norm(partial, residual, self.shared_head.norm)
        return normed, normed

    return forward


def _get_top_tokens(self: Any, hidden_states: Tensor, spec_step_idx: int = 0) -> Tensor:
    """``DeepseekV32MTP.get_top_tokens``: int64 ``[batch]``, what ``compute_logits(...).argmax(-1)`` gives.

    vLLM's ``LogitsProcessor.get_top_tokens`` does it, with ``torch.argmax``'s rules over the whole vocabulary: of equal logits the
    smallest id, the first NaN before any number, id 0 where all are -inf. Padding is -inf and never first.
    """
    predictor = self.model
    layer = predictor.layers[str(predictor.mtp_start_layer_idx + spec_step_idx % predictor.num_mtp_layers)]
    return predictor.logits_processor.get_top_tokens(layer.shared_head.head, hidden_states)


def _greedy_sample_draft(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    smallest = local_argmax_batch()

    @functools.wraps(original)
    def greedy_sample_draft(self: Any, hidden_states: Tensor) -> Tensor:
        if 0 < smallest <= len(hidden_states) and getattr(type(self.model), "get_top_tokens", None) is _get_top_tokens:
            return self.model.get_top_tokens(hidden_states)
        return original(self, hidden_states)

    return greedy_sample_draft


_DSA = "vllm.models.deepseek_v32.nvidia"
_LAYERS = "vllm.model_executor.layers"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator"

PATCHES: tuple[Patch, ...] = (
    *(
        patch(f"{module}:_can_use_flashinfer", _can_use_flashinfer, "asks the workspace's size first", "vLLM >= 0.29", "4c219afcae94bffa")
        for module in (f"{_LAYERS}.fused_allreduce_gemma_rms_norm", f"{_DSA}.fused_ops")
    ),
    patch(
        f"{_DSA}.mtp:DeepseekV32MultiTokenPredictorLayer.forward",
        _layer_forward,
        "reduces the block's output inside the final norm",
        "vLLM >= 0.28",
        "f076ba8aed8da77a",
    ),
    patch(
        f"{_DSA}.mtp:DeepseekV32MTP.get_top_tokens",
        lambda original: _get_top_tokens,
        "each rank's argmax, then (value, id) pairs",
        "vLLM >= 0.28",
        ABSENT,
    ),
    patch(
        f"{_SPECULATOR}._greedy_sample_draft",
        _greedy_sample_draft,
        f"uses it from {LOCAL_ARGMAX} on",
        "vLLM chooses by batch size itself",
        "c55ebf95e3085ef5",
    ),
)
