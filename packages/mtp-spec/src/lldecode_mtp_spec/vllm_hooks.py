"""Lifecycle hooks of vLLM 0.26.0's autoregressive speculators, called at the same points in ``capture`` and in ``propose``.

    on_prefill_begin  draft step 0  on_prefill_end
    on_multi_step_decode_begin  draft steps 1, 2, ...  on_multi_step_decode_end        (not with a single draft token)

A speculator's class, or else its draft model, defines those it needs as ``hook(num_reqs)``; `num_reqs` counts requests without
padding, or as many as there can be while capturing.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from lldecode.feature import ABSENT, Patch

HOOKS = ("on_prefill_begin", "on_prefill_end", "on_multi_step_decode_begin", "on_multi_step_decode_end")


def _hook(name: str, _: None) -> Callable[[Any, int], None]:
    def hook(self: Any, num_reqs: int) -> None:
        of_model = getattr(self.model, name, None)
        if of_model is not None:
            of_model(num_reqs)

    hook.__name__ = name
    return hook


@contextlib.contextmanager
def _multi_step_decode_phase(speculator: Any, num_reqs: int) -> Iterator[None]:
    try:
        speculator.on_multi_step_decode_begin(num_reqs)
        yield
    finally:
        speculator.on_multi_step_decode_end(num_reqs)


def _propose(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.on_prefill_begin(input_batch.num_reqs)
        out = original(self, input_batch, *args, **kwargs)
        if self.num_speculative_steps == 1:  # else it was called before the steps that follow
            self.on_prefill_end(input_batch.num_reqs)
        return out

    return propose


def _multi_step_decode(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def multi_step_decode(self: Any, num_reqs: int, *args: Any, **kwargs: Any) -> Any:
        self.on_prefill_end(num_reqs)
        with _multi_step_decode_phase(self, num_reqs):
            return original(self, num_reqs, *args, **kwargs)

    return multi_step_decode


def _capture(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture(self: Any, forward_fn: Any, *args: Any, **kwargs: Any) -> None:
        speculator, num_reqs = forward_fn.__self__, self.max_num_reqs
        if self is speculator.decode_cudagraph_manager:
            with _multi_step_decode_phase(speculator, num_reqs):
                original(self, forward_fn, *args, **kwargs)
        else:
            speculator.on_prefill_begin(num_reqs)
            original(self, forward_fn, *args, **kwargs)
            speculator.on_prefill_end(num_reqs)

    return capture


_AUTOREGRESSIVE = "vllm.v1.worker.gpu.spec_decode.autoregressive"
_SPECULATOR = f"{_AUTOREGRESSIVE}.speculator:AutoRegressiveSpeculator"
_REMOVE = "vLLM >= 0.28"


def patch(target: str, wrap: Callable[[Any], Any], why: str, remove_when: str, *expects: str) -> Patch:
    return Patch(target, wrap, why, remove_when, frozenset(expects))


PATCHES: tuple[Patch, ...] = (
    *(
        patch(f"{_SPECULATOR}.{name}", functools.partial(_hook, name), "the hook, by default the model's", _REMOVE, ABSENT)
        for name in HOOKS
    ),
    patch(f"{_SPECULATOR}.propose", _propose, "calls the prefill hooks", _REMOVE, "f3ac17b5a8977996"),
    patch(f"{_SPECULATOR}._multi_step_decode", _multi_step_decode, "calls the decode hooks", _REMOVE, "98a80ca5435239ad"),
    patch(
        f"{_AUTOREGRESSIVE}.cudagraph_utils:SpeculatorCudaGraphManager.capture",
        _capture,
        "calls the hooks around the capture of the same steps",
        _REMOVE,
        "c1fd5119d20db2ce",
    ),
)
