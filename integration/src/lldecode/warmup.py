"""vLLM's CuTe DSL warm-up: what layers will launch is compiled at start, before a graph is captured."""

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

Units = Mapping[tuple[Hashable, ...], Callable[[], None]]
"""What to compile, by key: equal keys are compiled once."""


class WarmUp:
    """A provider of compile units for the layers that :meth:`watch` was given, as long as they live.

    Args:
        feature: name of the feature.
        units: what a layer will launch, asked once its weights are loaded.
    """

    def __init__(self, feature: str, units: Callable[[Any], Units]) -> None:
        self.feature, self.units = feature, units
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()

    def watch(self, layer: Any) -> None:
        from vllm.model_executor.warmup.cutedsl_warmup import register_cutedsl_warmup_provider

        self.layers.add(layer)
        register_cutedsl_warmup_provider(self)

    def init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wraps a layer's ``__init__`` so that it is watched."""

        @functools.wraps(original)
        def __init__(layer: Any, *args: Any, **kwargs: Any) -> None:
            original(layer, *args, **kwargs)
            self.watch(layer)

        return __init__

    def get_cutedsl_warmup_compile_units(self) -> list[Any]:
        """What vLLM asks its providers for."""
        from vllm.model_executor.warmup.cutedsl_warmup import CuTeDSLCompileUnit

        found = {key: compile for layer in self.layers for key, compile in self.units(layer).items()}
        return [CuTeDSLCompileUnit(self.feature, (self.feature, *key), compile) for key, compile in found.items()]
