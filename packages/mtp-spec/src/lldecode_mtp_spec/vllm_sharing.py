"""Top-k sharing across draft steps: step 0 runs the indexer, the later ones attend to what it chose for the request's last token.

Later steps write no keys to the indexer's cache. Nothing reads these before the next proposal's step 0, which covers every position
of the step it follows and writes them itself, with the tokens that were accepted.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lldecode.feature import ABSENT, Patch, decline
from lldecode_mtp_spec.compact import compact
from lldecode_mtp_spec.vllm_hooks import HOOKS, patch

SHARE = "LLDECODE_MTP_SPEC_SHARE"
"""Environment variable, 0 or 1: overrides ``index_share_for_mtp_iteration`` of the draft's config."""

_DSA = "vllm.models.deepseek_v32.nvidia"


def invalid_share() -> str | None:
    """Why the value of :data:`SHARE` is not one, or None."""
    value = _share()
    return None if value in ("", "0", "1") else f"{SHARE}: expected 0 or 1, got {value!r}"


def _share() -> str:
    return os.environ.get(SHARE, "").strip()


class TopkSharing:
    """The draft model's hooks.

    Args:
        speculator: an ``AutoRegressiveSpeculator``.
        predictor: its model's ``DeepseekV32MultiTokenPredictor``.
    """

    def __init__(self, speculator: Any, predictor: Any) -> None:
        self.speculator, self.predictor = speculator, predictor

    def buffers(self) -> list[Tensor]:
        """The top-k buffers of the draft's layers, each once."""
        return list({id(b): b for b in (a.topk_indices_buffer for a in _attentions(self.predictor))}.values())

    def on_prefill_begin(self, num_reqs: int) -> None:
        self.predictor.set_skip_topk(False)

    def on_prefill_end(self, num_reqs: int) -> None:
        speculator = self.speculator
        for buffer in self.buffers():
            compact(buffer, speculator.last_token_indices[:num_reqs], speculator.max_num_reqs)

    def on_multi_step_decode_begin(self, num_reqs: int) -> None:
        self.predictor.set_skip_topk(True)

    def on_multi_step_decode_end(self, num_reqs: int) -> None:
        self.predictor.set_skip_topk(False)


def _attentions(predictor: Any) -> list[Any]:
    return [layer.mtp_block.self_attn for layer in predictor.layers.values()]


def refusal(speculator: Any, model: Any) -> str | None:
    """Why the draft steps of `speculator` with the draft `model` cannot share, or None."""
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if kind != f"{_DSA}.mtp.DeepseekV32MTP":
        return f"draft model: expected {_DSA}.mtp.DeepseekV32MTP, got {kind}"
    if (steps := speculator.num_speculative_steps) < 2:
        return f"num_speculative_tokens: expected at least 2, got {steps}"
    declared = getattr(speculator.draft_model_config.hf_config, "index_share_for_mtp_iteration", None)
    if not (share := _share()) and not declared:
        return f"index_share_for_mtp_iteration: expected true in the draft's config, or {SHARE}=1, got {declared}"
    if share == "0":
        return f"{SHARE}=0"
    if any(a.topk_indices_buffer is not a.impl.topk_indices_buffer for a in _attentions(model.model)):
        return "topk_indices_buffer: expected the attention to read the one that its indexer writes"
    return None


def _load_draft_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_draft_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(self, *args, **kwargs)
        if reason := refusal(self, model):
            decline("mtp-spec", f"top-k sharing: {reason}")
            return model
        sharing = TopkSharing(self, model.model)
        for name in HOOKS:
            setattr(model, name, getattr(sharing, name))
        return model

    return load_draft_model


def _v1_load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        decline("mtp-spec", "hooks and top-k sharing: model runner: expected V2, got V1")
        return original(self, *args, **kwargs)

    return load_model


def _attention_getattr(_: None) -> Callable[[Any, str], Any]:
    """``DeepseekV32Attention.__getattr__``, which is where a submodule is found: while the top-k is reused there is no indexer."""

    def __getattr__(self: Any, name: str) -> Any:
        if name == "indexer" and vars(self).get("skip_topk"):
            return None
        return torch.nn.Module.__getattr__(self, name)

    return __getattr__


def _layer_multi_step_decode(original: Callable[..., Any]) -> Callable[..., Any]:
    """In ``lldecode.layer`` a decoder layer without indexer reuses the top-k in the buffer: here the first draft step's."""

    @functools.wraps(original)
    def multi_step_decode(mtp: Any, *args: Any) -> Any:
        share = _share() or str(int(mtp.block.dims.index_share_for_mtp_iteration))
        if share != "1":
            decline("mtp-spec", f"top-k sharing: index_share_for_mtp_iteration, or {SHARE}: expected 1, got {share}")
            return original(mtp, *args)
        return original(dataclasses.replace(mtp, block=dataclasses.replace(mtp.block, indexer=None)), *args)

    return multi_step_decode


_REMOVE = "vLLM >= 0.28"

PATCHES: tuple[Patch, ...] = (
    patch(f"{_DSA}.attention:DeepseekV32Attention.__getattr__", _attention_getattr, "runs without indexer on reuse", _REMOVE, ABSENT),
    patch(
        "vllm.v1.worker.gpu.spec_decode.mtp.speculator:MTPSpeculator.load_draft_model",
        _load_draft_model,
        "decides whether the draft steps share their top-k",
        _REMOVE,
        "794b3b2b3eca8138",
    ),
    patch(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model",
        _v1_load_model,
        "says why there is no sharing on the V1 runner",
        _REMOVE,
        "060c8664f21a6c19",
    ),
    patch("lldecode.layer:multi_step_decode", _layer_multi_step_decode, "shares one top-k among draft steps", "with the feature"),
)
