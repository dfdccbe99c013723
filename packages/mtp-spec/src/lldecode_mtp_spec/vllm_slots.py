"""Physical top-k indices kept for the layers that share an indexer's top-k.

They are kept with the forward pass that converted them, from when an indexer writes a top-k buffer until one writes it again. A
forward pass has one set of attention metadata, and the draft's passes are not the target's, so nothing of one meets the other. A
captured graph is one forward pass: its tensors are dropped when its capture ends, and a replay converts anew.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lldecode.feature import Patch, decline
from lldecode_mtp_spec.vllm_hooks import patch

MAX_TOKENS = 1024
"""Above this nothing is kept: a prefill batch's indices would stay in memory that vLLM's profile has not seen."""

Kept = dict[int, dict[tuple[Any, ...], tuple[tuple[Any, ...], Any]]]
"""Per top-k buffer (address of its storage) and arguments: the arguments themselves, so that no address is reused, and the result."""

_KEPT = "_lldecode_mtp_spec"


def _of_forward_pass() -> Kept | None:
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return vars(get_forward_context()).setdefault(_KEPT, {}) if is_forward_context_available() else None


def _address(buffer: Tensor) -> int:
    return buffer.untyped_storage().data_ptr()


def _same(x: Any) -> Any:
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _indexer(original: Callable[..., Any], kept: Callable[[], Kept | None], buffer: Callable[..., Tensor]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sparse_attn_indexer(*args: Any, **kwargs: Any) -> Any:
        if (now := kept()) is not None:
            now[_address(buffer(*args, **kwargs))] = {}
        return original(*args, **kwargs)

    return sparse_attn_indexer


def _reason(now: Kept | None, since: Any, tokens: int) -> str | None:
    """Why a conversion is not kept, or None."""
    if now is None:
        return "expected a forward pass, got a call outside of one"
    if since is None:
        return "no indexer of the deepseek_v32 class ran before it in the forward pass (a draft step that reuses its top-k has none)"
    return f"expected at most {MAX_TOKENS} tokens, got more" if tokens > MAX_TOKENS else None


def _convert(original: Callable[..., Any], kept: Callable[[], Kept | None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def triton_convert_req_index_to_global_index(
        req_id: Tensor, block_table: Tensor, token_indices: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        call = (req_id, block_table, token_indices, *args, *(x for item in sorted(kwargs.items()) for x in item))
        now = kept()
        since = None if now is None else now.get(_address(token_indices))
        if reason := _reason(now, since, len(req_id)):
            decline("mtp-spec", f"index conversion: {reason}")
        if reason or since is None:
            return original(req_id, block_table, token_indices, *args, **kwargs)
        key = tuple(map(_same, call))
        if key not in since:
            since[key] = call, original(req_id, block_table, token_indices, *args, **kwargs)
        return since[key][1]

    return triton_convert_req_index_to_global_index


_step = threading.local()


def _layer_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """In ``lldecode.layer`` a step is the forward pass."""

    @functools.wraps(original)
    def step(layers: Any, state: Any) -> Any:
        _step.kept = {} if state.on_topk is None else None  # it may replace the selection of any layer
        try:
            return original(layers, state)
        finally:
            _step.kept = None

    return step


def _of_layer_step() -> Kept | None:
    return getattr(_step, "kept", None)


def _buffer(*args: Any, **_: Any) -> Tensor:
    """``topk_indices_buffer`` among the arguments of vLLM's ``sparse_attn_indexer``."""
    return args[13]


def _layer_buffer(*args: Any, **_: Any) -> Tensor:
    return args[5]


_CONVERT = "triton_convert_req_index_to_global_index"
_ONCE = "converts once an indexer, not once a layer"
_NEW = "an indexer's top-k is converted anew"
_REMOVE = "vLLM >= 0.30"

PATCHES: tuple[Patch, ...] = (
    patch(
        "vllm.models.deepseek_v32.nvidia.attention:sparse_attn_indexer",
        functools.partial(_indexer, kept=_of_forward_pass, buffer=_buffer),
        _NEW,
        _REMOVE,
        "9cc13f0cfbaa94b4",
    ),
    *(
        patch(
            f"vllm.v1.attention.backends.mla.{module}:{_CONVERT}",
            functools.partial(_convert, kept=_of_forward_pass),
            _ONCE,
            _REMOVE,
            "691cce89be0b63bc",
        )
        for module in ("flashinfer_mla_sparse", "flashmla_sparse", "flashattn_mla_sparse")
    ),
    patch("lldecode.layer:sparse_attn_indexer", functools.partial(_indexer, kept=_of_layer_step, buffer=_layer_buffer), _NEW, _REMOVE),
    patch(f"lldecode.layer:{_CONVERT}", functools.partial(_convert, kept=_of_layer_step), _ONCE, _REMOVE),
    patch("lldecode.layer:step", _layer_step, "keeps them for a step", _REMOVE),
)
