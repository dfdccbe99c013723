"""Seam in vLLM 0.26.0: ``GateLinear``, the MoE router's linear layer."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from lldecode.feature import Context, Feature, Patch, decline, pdl
from lldecode.warmup import Units, WarmUp
from lldecode_ll_bf16_router import op

NAME = "ll-bf16-router"
_GATE = "vllm.model_executor.layers.fused_moe.router.gate_linear:GateLinear"


def probe(ctx: Context) -> str | None:
    """Why the kernels cannot run here, or None."""
    return ctx.missing("apache-tvm-ffi", "nvidia-cutlass-dsl") or ctx.unproven(op.ARCHS)


def _launch_pdl() -> bool:
    return pdl() is not False  # vLLM launches its own kernel at this seam with PDL


def _reason(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> str | None:
    if x.shape[0] > op.MAX_M:  # prefill: one reason, not one for each number of tokens
        return f"more than {op.MAX_M} tokens"
    return op.supports(x, weight, out_dtype, _launch_pdl())


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():  # a gate traced into a graph: a branch on the batch size would be frozen
            return original(self, x)
        out_dtype = self.out_dtype or self.weight.dtype
        if reason := "bias" if self.bias is not None else _reason(x, self.weight, out_dtype):
            decline(NAME, reason)
            return original(self, x)
        return op.ll_bf16_router(x, self.weight, out_dtype, _launch_pdl()), None

    return forward


def _units(gate: Any) -> Units:
    (n, k), out_dtype, device = gate.weight.shape, gate.out_dtype or gate.weight.dtype, gate.weight.device
    if gate.bias is not None or not gate.weight.is_cuda or op.unsupported(n, k, gate.weight.dtype, out_dtype):
        return {}
    what = (n, k, out_dtype, device)
    return {(*what, _launch_pdl()): functools.partial(op.warmup, *what, pdl=_launch_pdl())}


_warm_up = WarmUp(NAME, _units)  # vLLM's registry of providers is weak


def _router_gemm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def router_gemm(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        if reason := _reason(x, weight, out_dtype):
            decline(NAME, reason)
            return original(x, weight, out_dtype)
        return op.ll_bf16_router(x, weight, out_dtype, _launch_pdl())

    return router_gemm


_REMOVE = "vLLM's own ll_bf16 kernel measures as fast over M = 1..32 (0.33.0 does not)"

FEATURE = Feature(
    name=NAME,
    summary="MoE router GEMM for 1 to 32 tokens, bf16 in, fp32 or bf16 logits out",
    probe=probe,
    default="off",  # in vLLM's engine no faster at one and four tokens
    patches=(
        Patch(f"{_GATE}.forward", _forward, "routes small batches to the kernel", _REMOVE, frozenset({"b10ceeee4a15f0d7"})),
        Patch(f"{_GATE}.__init__", _warm_up.init, "has vLLM warm the kernel up", _REMOVE, frozenset({"bc9217c6b363ad75"})),
        Patch("lldecode.layer:router_gemm", _router_gemm, "the same call in the embedded layer", "with the feature"),
    ),
)
