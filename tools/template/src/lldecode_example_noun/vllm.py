"""Seam in vLLM 0.26.0: name it here."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lldecode.feature import Context, Feature, decline
from lldecode_example_noun import op

NAME = "example-noun"


def probe(ctx: Context) -> str | None:
    """Why this cannot run here, or None."""
    return ctx.unproven(op.ARCHS)


def adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `original`, for ``Patch(target, adapter, why=..., remove_when=..., expects=...)``."""

    def replacement(x: Tensor) -> Any:
        if reason := op.supports(x):
            decline(NAME, reason)
            return original(x)
        return op.example_noun(x)

    return replacement


FEATURE = Feature(name=NAME, summary="One line for lldecode doctor", probe=probe, patches=())
