"""Seams in vLLM 0.26.0: the unquantized linears of the DSA models, their absorbed products and LM head.

A constructed model's linears are marked, and vLLM's methods of an unquantized layer give those that are to the op: whatever looks
at a layer or its method (weight loading, LoRA, MLA's absorption) finds vLLM's own. The absorbed weights become a parameter that
answers ``torch.bmm``, and MTP's ``eh_proj``, a plain ``nn.Linear``, gets a subclass.
"""

import collections
import fnmatch
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lldecode.feature import Context, Feature, Patch, decline, pdl
from lldecode.warmup import Units, WarmUp
from lldecode_skinny_gemm import op

logger = logging.getLogger("lldecode")
NAME = "skinny-gemm"
_layers = os.environ.get("LLDECODE_SKINNY_GEMM_LAYERS", "").strip()
LAYERS = (f"*,!*shared_expert*,{_layers}" if _layers[:1] in ("", "!") else _layers).strip(",")
"""Comma-separated patterns of module names (``*.eh_proj``) that may be taken, with ``!`` that may not; the last that matches decides.

An empty list is the default, and one that begins with ``!`` goes on from it.
Shared experts run beside the routed ones on a second stream: their time is hidden, and a wide kernel there takes the routed one's place.
"""


def probe(ctx: Context) -> str | None:
    """Why the kernel cannot run here, or None."""
    return ctx.missing("apache-tvm-ffi", "nvidia-cutlass-dsl") or ctx.unproven(op.ARCHS)


def _wanted(name: str) -> bool:
    return next((p[0] != "!" for p in map(str.strip, LAYERS.split(",")[::-1]) if p and fnmatch.fnmatchcase(name, p.lstrip("!"))), False)


def _linear(original: Callable[[], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The op where it takes these arguments at every M, which a compiler must not branch on; else what vLLM does.

    The kernel waits for what it reads, so it launches with PDL unless the user says otherwise.
    """
    reason = "bias" if bias is not None else None if x.ndim == 2 else f"x: expected two dimensions, got {x.ndim}"
    if not torch.compiler.is_compiling() and (reason := reason or op.supports(x, weight)):
        decline(NAME, reason)
    return original() if reason else torch.ops.lldecode.skinny_gemm(x, weight, None, pdl() is not False)


def _bmm(original: Callable[..., Tensor], x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    if reason := op.supports(x, weight.mT, out=out):
        decline(NAME, reason)
        return original(x, weight, out=out)
    return op.skinny_bmm(x, weight, out=out, pdl=pdl() is not False)


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return _linear(functools.partial(super().forward, input), input, self.weight, self.bias)


class _Absorbed(nn.Parameter):
    """``W_UK_T`` or ``W_UV`` ``[H, K, N]``: answers ``torch.bmm`` with the op, everything else as a plain parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.bmm and type(args[1]) is cls:
                func, args = functools.partial(_bmm, func), (args[0], args[1].detach())
            return func(*args, **(kwargs or {}))


def take(model: nn.Module, prefix: str = "") -> dict[str, int]:
    """Mark the unquantized bf16 and fp16 linears of a model for the op, and log which.

    Returns:
        count by kind: the last part of the name and the weight's N x K; ``absorbed`` for an attention's two products.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    taken: collections.Counter[str] = collections.Counter()
    for name, m in model.named_modules(prefix=prefix):
        weight, method = getattr(m, "weight", None), type(getattr(m, "quant_method", None))
        half = getattr(weight, "dtype", None) in (torch.bfloat16, torch.float16) and not isinstance(m, GateLinear)
        plain = isinstance(m, LinearBase | ParallelLMHead) and method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        # An attention's absorbed weights are not there yet; they are bf16 also where the checkpoint is quantized. They stand for kv_b_proj.
        fits = isinstance(m, MLAAttention) or (half and (plain or type(m) is nn.Linear) and not name.endswith("kv_b_proj"))
        if fits and _wanted(name):
            m.lldecode_skinny_gemm = True
            if type(m) is nn.Linear:
                m.__class__ = _Linear
            m._use_min_latency_gemm = False  # of DeepSeekV2FusedQkvAProjLinear: the op knows that kernel too
            taken["absorbed" if weight is None else f"{name.rsplit('.', 1)[-1]} {weight.shape[0]}x{weight.shape[1]}"] += 1
    (logger.info if taken else logger.warning)("%s: took %s of %s", NAME, dict(taken) or "nothing", LAYERS)
    return dict(taken)


def _refusal(vllm_config: Any) -> str | None:
    import vllm.envs as envs

    if not hasattr(vllm_config.model_config.hf_config, "index_topk"):
        return "a model without index_topk"
    config = vllm_config.compilation_config.inductor_compile_config
    if pdl() is None and config.get("triton.enable_pdl", os.environ.get("TORCHINDUCTOR_ENABLE_PDL") == "1"):
        return "triton.enable_pdl without the pdl feature: what PyTorch generates may read before it waits"
    return "LoRA" if vllm_config.lora_config else "VLLM_BATCH_INVARIANT" if envs.VLLM_BATCH_INVARIANT else None


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        original(self, vllm_config=vllm_config, prefix=prefix)
        if reason := _refusal(vllm_config):
            return decline(NAME, reason)
        take(self, prefix)
        _warm_up.watch(self)

    return __init__


def _units(model: nn.Module) -> Units:
    """One for each distinct weight that was taken."""
    taken = [m for m in model.modules() if hasattr(m, "lldecode_skinny_gemm")]
    weights = [getattr(m, name).detach() for m in taken for name in ("weight", "W_UK_T", "W_UV") if hasattr(m, name)]
    as_taken = [w if w.ndim == 2 else w.mT for w in weights if w.is_cuda]
    return {(tuple(w.shape), w.stride(), w.dtype, w.device): functools.partial(op.warmup, w, pdl() is not False) for w in as_taken}


_warm_up = WarmUp(NAME, _units)  # vLLM's registry of providers is weak


def _absorb(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def process_weights_after_loading(self: Any, act_dtype: torch.dtype) -> None:
        original(self, act_dtype)
        for name in ("W_UK_T", "W_UV") if hasattr(self, "lldecode_skinny_gemm") else ():
            self.register_parameter(name, torch.Tensor._make_subclass(_Absorbed, getattr(self, name).data, False))

    return process_weights_after_loading


def _apply(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        stock = functools.partial(original, self, layer, x, bias)
        return _linear(stock, x, layer.weight, bias) if hasattr(layer, "lldecode_skinny_gemm") else stock()

    return apply


_REMOVE = "vLLM's own small-M GEMMs cover SM90 and SM100 and measure as fast (0.33.0: three projections, SM103 and SM107)"
_MODELS, _LAYERS = "vllm.model_executor.models", "vllm.model_executor.layers"
_TAKE = f"takes, of fused_qkv_a_proj, q_b_proj, o_proj, wq_b, wk_weights_proj, MLPs, eh_proj and LM head, what matches {LAYERS}"
_GIVE, _ABSORB = "gives the layers taken to the op", "has the absorbed weights of an attention that was taken answer torch.bmm with the op"
_EMBEDDED = "the same call in the embedded layer", "with the feature"
_PATCHES = (
    (f"{_MODELS}.deepseek_v2:DeepseekV2ForCausalLM.__init__", _init, _TAKE, "62535be1bf79770e"),
    (f"{_MODELS}.deepseek_mtp:DeepSeekMultiTokenPredictor.__init__", _init, _TAKE, "740134d856e2bc7d"),
    ("vllm.models.deepseek_v32.nvidia.mtp:DeepseekV32MTP.__init__", _init, _TAKE, "01e9366a106c2202"),
    (f"{_LAYERS}.linear:UnquantizedLinearMethod.apply", _apply, _GIVE, "ba0c0bd11ca697b7"),
    (f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply", _apply, _GIVE, "ba0c0bd11ca697b7"),
    (f"{_LAYERS}.attention.mla_attention:MLAAttention.process_weights_after_loading", _absorb, _ABSORB, "0b85fc65af81cda9"),
)

FEATURE = Feature(
    name=NAME,
    summary="small-M bf16 GEMMs of the decode path: linears, absorbed MLA products, MTP projection, LM head",
    probe=probe,
    superseded_by="in part: vLLM 0.28.0 on SM103, 0.33.0 on SM107",
    patches=(
        *(Patch(target, wrap, why, _REMOVE, frozenset({source})) for target, wrap, why, source in _PATCHES),
        Patch("lldecode.layer:linear", lambda linear: lambda x, w: _linear(functools.partial(linear, x, w), x, w), *_EMBEDDED),
        Patch("lldecode.layer:bmm", lambda bmm: functools.partial(_bmm, bmm), *_EMBEDDED),
    ),
)
