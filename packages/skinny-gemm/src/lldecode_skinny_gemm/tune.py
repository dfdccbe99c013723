"""What ``lldecode tune`` measures of this feature."""

import functools
from typing import Any

import torch
from torch import Tensor

from lldecode.plan import Gemm
from lldecode.tune import Call, Tuner
from lldecode_skinny_gemm import op, plan


def configs(sms: int, shape: Gemm, m: int, tiles: int = 22) -> dict[tuple[int, ...], Any]:
    """By tile, the configs of the first `tiles` candidates for a product at M."""
    stride = shape.n if shape.n_major else shape.k
    return {t: op.config(shape, stride, m, t, torch.bfloat16, False, True) for t in plan.candidates(sms, shape, m)[:tiles]}


def providers(shape: Gemm, x: Tensor) -> dict[str, Call]:
    """cuBLAS and, where it takes the product, vLLM's ``dsv3_fused_a_gemm``."""
    fused_a = {"fused_a": functools.partial(op.run_fused_a, x)} if op.fused_a(shape, x.shape[1]) else {}
    return {"cublas": functools.partial(op.run_cublas, x), **fused_a}


TUNER = Tuner(plan.PLANS, "lldecode_skinny_gemm.kernel:KERNEL", configs, op.run, providers)
