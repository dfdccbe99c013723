"""Seams in vLLM 0.26.0: the unquantized linears of the DSA models, their absorbed products and LM head.

After a model is constructed its linears get a subclass of vLLM's own unquantized method, so that whatever asks for the method
(weight loading, LoRA, MLA's absorption) finds what it knows. The absorbed weights become a parameter that answers ``torch.bmm``.
"""

import collections
import fnmatch
import functools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lldecode.feature import Context, Feature, Patch, decline, pdl
from lldecode_skinny_gemm import op, plan

logger = logging.getLogger("lldecode")
NAME = "skinny-gemm"
LAYERS = "LLDECODE_SKINNY_GEMM_LAYERS"
"""Environment variable: comma-separated patterns of module names (``*.eh_proj``) that may be taken; all by default."""


def probe(ctx: Context) -> str | None:
    """Why the kernel cannot run here, or None."""
    for dist in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        if dist not in ctx.versions:
            return f"{dist} is not installed"
    if not ctx.capabilities:
        return "no CUDA device"
    if unproven := sorted(set(ctx.capabilities) - set(op.ARCHS)):
        proven = ", ".join(f"{a}.{b}" for a, b in op.ARCHS)
        return f"capability: expected one of {proven}, got {', '.join(f'{a}.{b}' for a, b in unproven)}"
    return None


def _pdl() -> bool:
    return pdl() is not False  # the kernel waits for what it reads, so it may launch early unless the user says otherwise


def _apply(original: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The op where it takes these arguments at every M, which a compiler must not branch on; else what vLLM does."""
    reason = "bias" if bias is not None else None if x.ndim == 2 else f"x: expected shape [*, *], got {x.ndim} dimensions"
    if not torch.compiler.is_compiling() and (reason := reason or op.supports(x, weight)):
        decline(NAME, reason)
    return original() if reason else torch.ops.lldecode.skinny_gemm(x, weight, None, _pdl())


class _Linear(nn.Linear):
    """MTP's ``eh_proj``."""

    def forward(self, input: Tensor) -> Tensor:
        return _apply(functools.partial(super().forward, input), input, self.weight, self.bias)


class _Absorbed(nn.Parameter):
    """``W_UK_T`` or ``W_UV`` ``[H, K, N]``: answers ``torch.bmm`` with the op, everything else as a plain parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = (kwargs or {}).get("out")
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.bmm and type(args[1]) is cls and args[0].shape[1] <= plan.MAX_M:
                weight = args[1].detach()  # a plain tensor
                if not (reason := op.supports(args[0], weight, out=out, bmm=True)):
                    return op.skinny_bmm(args[0], weight, out=out, pdl=_pdl())
                decline(NAME, reason)
            return func(*args, **(kwargs or {}))


@functools.cache
def _methods() -> dict[type, Any]:
    """By vLLM's method of an unquantized layer, ours."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def ours(base: type) -> Any:
        def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return _apply(functools.partial(base.apply, self, layer, x, bias), x, layer.weight, bias)  # type: ignore[attr-defined]

        return type(f"Skinny{base.__name__}", (base,), {"apply": apply})()

    return {base: ours(base) for base in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)}


def _refusal(vllm_config: Any) -> str | None:
    import vllm.envs as envs

    if vllm_config.lora_config is not None:
        return "LoRA"
    return "VLLM_BATCH_INVARIANT" if envs.VLLM_BATCH_INVARIANT else None


def take(model: nn.Module, prefix: str = "") -> dict[str, int]:
    """Give the unquantized bf16 and fp16 linears of a model to the op, and log which.

    Returns:
        count by kind: the last part of the name and the weight's N x K; ``absorbed`` for an attention's two products.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    patterns = os.environ.get(LAYERS, "*").split(",")
    taken: collections.Counter[str] = collections.Counter()
    for name, m in model.named_modules(prefix=prefix):
        weight: Any = getattr(m, "weight", None)
        if not any(fnmatch.fnmatchcase(name, p.strip()) for p in patterns):
            continue
        if isinstance(m, MLAAttention):
            _layers.add(m)  # its absorbed weights are not there yet; bf16 also where the checkpoint is quantized
            taken["absorbed"] += 1
            continue
        if getattr(weight, "dtype", None) not in (torch.bfloat16, torch.float16):
            continue
        if type(m) is nn.Linear:
            m.__class__ = _Linear
        elif isinstance(m, LinearBase | ParallelLMHead) and not isinstance(m, GateLinear) and type(m.quant_method) in _methods():
            m.quant_method = _methods()[type(m.quant_method)]
            m._use_min_latency_gemm = False  # of DeepSeekV2FusedQkvAProjLinear: the op knows that kernel too
        else:
            continue
        _layers.add(m)
        taken[f"{name.rsplit('.', 1)[-1]} {weight.shape[0]}x{weight.shape[1]}"] += 1
    logger.info("%s: took %s", NAME, ", ".join(f"{n} x {kind}" for kind, n in taken.items()) or "nothing")
    return dict(taken)


def _model_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        original(self, vllm_config=vllm_config, prefix=prefix)
        if not hasattr(vllm_config.model_config.hf_config, "index_topk"):
            return
        if reason := _refusal(vllm_config):
            decline(NAME, reason)
            return
        take(self, prefix)
        from vllm.model_executor.warmup.cutedsl_warmup import register_cutedsl_warmup_provider

        register_cutedsl_warmup_provider(_warm_up)

    return __init__


def _absorb(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def process_weights_after_loading(self: Any, act_dtype: torch.dtype) -> None:
        original(self, act_dtype)
        if self in _layers:
            for name in ("W_UK_T", "W_UV"):
                self.register_parameter(name, torch.Tensor._make_subclass(_Absorbed, getattr(self, name).data, False))

    return process_weights_after_loading


_layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _WarmUp:
    """Provider for vLLM's CuTe DSL warm-up: one compile unit for each distinct weight that was taken."""

    def get_cutedsl_warmup_compile_units(self) -> list[Any]:
        from vllm.model_executor.warmup.cutedsl_warmup import CuTeDSLCompileUnit

        units = {}
        for layer in list(_layers):
            names = ("W_UK_T", "W_UV") if hasattr(layer, "W_UV") else ("weight",)
            for weight in (getattr(layer, name).data for name in names):
                key = (NAME, tuple(weight.shape), weight.stride(), weight.dtype, weight.device, _pdl())
                if weight.is_cuda and key not in units:
                    units[key] = CuTeDSLCompileUnit(NAME, key, functools.partial(op.warmup, weight, _pdl()))
        return list(units.values())


_warm_up = _WarmUp()  # vLLM's registry of providers is weak


def _layer_linear(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return _apply(functools.partial(original, x, weight), x, weight, None)

    return linear


def _layer_bmm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def bmm(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if reason := op.supports(x, weight, out=out, bmm=True):
            decline(NAME, reason)
            return original(x, weight, out)
        return op.skinny_bmm(x, weight, out=out, pdl=_pdl())

    return bmm


_REMOVE = "vLLM's own small-M GEMMs cover SM90 and SM100 and measure as fast (0.33.0: three projections, SM103 and SM107)"
_MODELS = "vllm.model_executor.models"
_TAKES = "gives the constructed model's unquantized linears to the op"

FEATURE = Feature(
    name=NAME,
    summary="small-M bf16 GEMMs of the decode path: linears, absorbed MLA products, MTP projection, LM head",
    probe=probe,
    superseded_by="in part: vLLM 0.28.0 on SM103, 0.33.0 on SM107",
    patches=(
        Patch(f"{_MODELS}.deepseek_v2:DeepseekV2ForCausalLM.__init__", _model_init, _TAKES, _REMOVE, frozenset({"62535be1bf79770e"})),
        Patch(
            f"{_MODELS}.deepseek_mtp:DeepSeekMultiTokenPredictor.__init__", _model_init, _TAKES, _REMOVE, frozenset({"740134d856e2bc7d"})
        ),
        Patch("vllm.models.deepseek_v32.nvidia.mtp:DeepseekV32MTP.__init__", _model_init, _TAKES, _REMOVE, frozenset({"01e9366a106c2202"})),
        Patch(
            "vllm.model_executor.layers.attention.mla_attention:MLAAttention.process_weights_after_loading",
            _absorb,
            "has the absorbed weights answer torch.bmm with the op",
            _REMOVE,
            frozenset({"0b85fc65af81cda9"}),
        ),
        Patch("lldecode.layer:linear", _layer_linear, "the same calls in the embedded layer", "with the feature"),
        Patch("lldecode.layer:bmm", _layer_bmm, "the same calls in the embedded layer", "with the feature"),
    ),
)
