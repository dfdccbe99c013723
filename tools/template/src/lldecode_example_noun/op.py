"""``torch.ops.lldecode.example_noun``."""

import torch
from torch import Tensor

from lldecode_example_noun import reference

ARCHS = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities that are proven: run, or compiled in CI."""


def supports(x: Tensor) -> str | None:
    """Why :func:`example_noun` does not take `x`, or None."""
    if not x.is_floating_point():
        return f"x: expected a floating-point dtype, got {x.dtype}"
    if x.is_cuda and (capability := torch.cuda.get_device_capability(x.device)) not in ARCHS:
        return f"capability: expected one of {ARCHS}, got {capability}"
    return None


@torch.library.custom_op("lldecode::example_noun", mutates_args=())
def _example_noun(x: Tensor) -> Tensor:
    # A kernel goes into kernel.py and is imported inside its own implementation: @_example_noun.register_kernel("cuda").
    return reference.example_noun(x)


@_example_noun.register_fake
def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def example_noun(x: Tensor) -> Tensor:
    """``2 * x``; see :func:`lldecode_example_noun.reference.example_noun`.

    Raises:
        ValueError: what :func:`supports` says.
    """
    if reason := supports(x):
        raise ValueError(reason)
    return _example_noun(x)
