"""The one patch that is lldecode's own: vLLM's compile cache is keyed by the features in force."""

import functools
from collections.abc import Callable
from typing import Any

from lldecode.feature import Feature, Patch

NAME = "compile-cache-key"


def feature(fingerprint: Callable[[], str]) -> Feature:
    """A feature that is applied whenever any other is: artefacts compiled under one set must not be loaded under another.

    Args:
        fingerprint: of the features in force, asked at each hash, since one can be left out at a later import.
    """

    def wrap(original: Callable[[Any], str]) -> Callable[[Any], str]:
        @functools.wraps(original)
        def compute_hash(self: Any) -> str:
            return f"{original(self)}-{fingerprint()}"

        return compute_hash

    patch = Patch(
        "vllm.config.vllm:VllmConfig.compute_hash",
        wrap,
        why="keys vLLM's compile cache by the features in force",
        remove_when="vLLM lets a plugin add to the compile-cache key",
        expects=frozenset({"1e5afb5e81575f1e"}),
    )
    return Feature(NAME, "compile-cache fingerprint", (patch,))
