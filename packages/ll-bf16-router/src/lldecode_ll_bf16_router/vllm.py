"""Seam in vLLM 0.26.0: ``GateLinear``, the MoE router's linear layer."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from lldecode.feature import Context, Feature, Patch, decline, pdl
from lldecode_ll_bf16_router import op

NAME = "ll-bf16-router"
_GATE = "vllm.model_executor.layers.fused_moe.router.gate_linear:GateLinear"


def probe(ctx: Context) -> str | None:
    """Why the kernels cannot run here, or None."""
    for dist in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        if dist not in ctx.versions:
            return f"{dist} is not installed"
    if not ctx.capabilities:
        return "no CUDA device"
    if unproven := sorted(set(ctx.capabilities) - set(op.ARCHS)):
        proven = ", ".join(f"{a}.{b}" for a, b in op.ARCHS)
        return f"capability: expected one of {proven}, got {', '.join(f'{a}.{b}' for a, b in unproven)}"
    return None


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


class _WarmUp:
    """Provider for vLLM's CuTe DSL warm-up: one compile unit for each distinct gate that was constructed."""

    def __init__(self) -> None:
        self.gates: weakref.WeakSet[Any] = weakref.WeakSet()

    def get_cutedsl_warmup_compile_units(self) -> list[Any]:
        from vllm.model_executor.warmup.cutedsl_warmup import CuTeDSLCompileUnit

        units = {}
        for gate in self.gates:
            n, k = gate.weight.shape
            out_dtype = gate.out_dtype or gate.weight.dtype
            key = (NAME, n, k, out_dtype, _launch_pdl(), gate.weight.device)
            if gate.bias is None and gate.weight.is_cuda and op.unsupported(n, k, gate.weight.dtype, out_dtype) is None:
                compile = functools.partial(op.warmup, n, k, out_dtype, gate.weight.device, pdl=_launch_pdl())
                units[key] = CuTeDSLCompileUnit(NAME, key, compile)
        return list(units.values())


_warm_up = _WarmUp()  # vLLM's registry of providers is weak


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm.model_executor.warmup.cutedsl_warmup import register_cutedsl_warmup_provider

        _warm_up.gates.add(self)
        register_cutedsl_warmup_provider(_warm_up)

    return __init__


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
        Patch(f"{_GATE}.__init__", _init, "has vLLM's warm-up compile the kernel before capture", _REMOVE, frozenset({"bc9217c6b363ad75"})),
        Patch("lldecode.layer:router_gemm", _router_gemm, "the same call in the embedded layer", "with the feature"),
    ),
)
