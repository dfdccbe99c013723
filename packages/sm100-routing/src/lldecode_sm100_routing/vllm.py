"""Seams in vLLM 0.26.0: the per-architecture configuration hook, the V2 runner's default list, the start of a configuration.

A routed configuration carries everything in itself: architecture names of our own, put before the checkpoint's, and the
classes they stand for in ``model_class_overrides``. vLLM registers overrides process-wide, so an override of the
checkpoint's name would reach later engines, and that of the MTP name a plain DeepSeek-V3. It also makes the default list
of the V2 runner one by configuration: what is not routed keeps stock's runner.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from lldecode.feature import Context, Feature, Patch, decline
from lldecode_sm100_routing.route import ARCHITECTURES, Draft, Facts, decide, unproven

NAME = "sm100-routing"
TARGET = ("LldecodeDeepseekV32ForCausalLM", "vllm.models.deepseek_v32:DeepseekV32ForCausalLM")
DRAFT = ("LldecodeDeepseekV32MTPModel", "vllm.models.deepseek_v32:DeepseekV32MTP")
"""(architecture name, class) of a routed model and of its MTP draft."""

BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
OURS = "_LLDECODE_SET_BREAKABLE_CUDAGRAPH"
"""Beside :data:`BREAKABLE` in the environment where we set that, so that child processes too can tell it from the user's."""

_DECIDED = "_lldecode_sm100_routing"
_ATTENTION = "vllm.models.deepseek_v32.nvidia.attention"

logger = logging.getLogger("lldecode")


def probe(ctx: Context) -> str | None:
    """Why no configuration is routed here, or None."""
    return unproven(ctx.capabilities, ctx.required)


def hold_breakable() -> None:
    """Switch breakable CUDA graphs on for the engine being configured, unless the user did."""
    if BREAKABLE not in os.environ:
        os.environ.update({BREAKABLE: "1", OURS: "1"})
    _refresh(True)


def release_breakable() -> None:
    """Take back what :func:`hold_breakable` set for an earlier engine."""
    if os.environ.pop(OURS, None):
        os.environ.pop(BREAKABLE, None)
        _refresh(False)


def _refresh(value: bool) -> None:
    """An engine that ran inside this process has frozen vLLM's view of the environment."""
    from vllm import envs

    if bool(envs.VLLM_USE_BREAKABLE_CUDAGRAPH) is not value:
        envs.disable_envs_cache()


def route(config: Any, kv_cache_dtype: str) -> None:
    """Route a ``VllmConfig`` or leave it, once. Logs the reason where it is left.

    Args:
        config: at the start of its ``__post_init__``.
        kv_cache_dtype: what it held before vLLM's own hook, which turns bfloat16 into auto.
    """
    model = config.model_config
    decided = getattr(model, _DECIDED, None)
    if decided is not None:
        if decided == "breakable":
            hold_breakable()
        return
    release_breakable()
    try:
        outcome = decide(read(config, kv_cache_dtype))
    except Exception as e:  # a configuration that cannot be read is not proven
        outcome = f"cannot read the configuration: {type(e).__name__}: {e}"
    if isinstance(outcome, str):
        setattr(model, _DECIDED, "generic")
        decline(NAME, outcome)
        return
    if outcome.breakable:
        hold_breakable()
    _use(model, *TARGET)
    if outcome.draft:
        _use(config.speculative_config.draft_model_config, *DRAFT)
    config.cache_config.cache_dtype = outcome.kv_cache_dtype
    setattr(model, _DECIDED, "breakable" if outcome.breakable else "eager")
    graphs = "breakable CUDA graphs" if outcome.breakable else "no CUDA graphs"
    logger.info("%s: %s: %s, V2 runner, %s, %s KV cache", NAME, model.architecture, TARGET[1], graphs, outcome.kv_cache_dtype)


def _use(model: Any, arch: str, implementation: str) -> None:
    names = [arch, *model.architectures]
    model.hf_config.architectures = names
    model.model_arch_config.architectures = list(names)
    model.model_class_overrides = {**model.model_class_overrides, arch: implementation}


def read(config: Any, kv_cache_dtype: str) -> Facts:
    """The facts of a ``VllmConfig``. See :func:`route` for the arguments."""
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    attention, compilation, hf = config.attention_config, config.compilation_config, model.hf_config
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return Facts(
        arch=model.architecture,
        capability=(capability.major, capability.minor) if capability else None,
        implementation=_registered(model.architecture),
        runner_type=model.runner_type,
        convert_type=model.convert_type,
        dtype=str(model.dtype).removeprefix("torch."),
        index_topk=getattr(hf, "index_topk", None),
        q_lora_rank=getattr(hf, "q_lora_rank", None),
        latent=tuple(getattr(hf, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")),
        overridden=frozenset(model.model_class_overrides),
        lora=config.lora_config is not None,
        pipeline_parallel=parallel.pipeline_parallel_size,
        decode_context_parallel=parallel.decode_context_parallel_size,
        prefill_context_parallel=parallel.prefill_context_parallel_size,
        kv_cache_dtype=kv_cache_dtype,
        calculate_kv_scales=cache.calculate_kv_scales,
        kv_cache_dtype_skip_layers=tuple(cache.kv_cache_dtype_skip_layers),
        block_size=cache.block_size if cache.user_specified_block_size else None,
        connectors=_connectors(config.kv_transfer_config, cache),
        backend=attention.backend.name if attention.backend else None,
        backend_per_kind=bool(attention.backend_per_kind),
        fp4_indexer_cache=attention.use_fp4_indexer_cache,
        enforce_eager=model.enforce_eager,
        compile_mode=compilation.mode.name if compilation.mode is not None else None,
        sequence_parallel=bool(compilation.pass_config.enable_sp or compilation.pass_config.fuse_gemm_comms),
        breakable=os.environ.get(BREAKABLE),
        bound_early=_bound_early(),
        v2=envs.VLLM_USE_V2_MODEL_RUNNER,
        v2_unsupported=(*config._get_v2_model_runner_unsupported_features(), *(() if HAS_TRITON else ("no Triton",))),
        draft=_draft(config.speculative_config),
    )


def _registered(arch: str) -> str:
    from vllm.model_executor.models import ModelRegistry

    model = ModelRegistry.models[arch]
    return f"{getattr(model, 'module_name', type(model).__name__)}:{getattr(model, 'class_name', '')}"


def _draft(speculative: Any) -> Draft | None:
    if speculative is None:
        return None
    model = speculative.draft_model_config
    return Draft(
        method=speculative.method,
        architectures=tuple(model.architectures) if model else (),
        implementation=_registered("DeepSeekMTPModel"),
        index_topk=getattr(model.hf_config, "index_topk", None) if model else None,
        kv_cache_dtype=speculative.kv_cache_dtype,
        backend=speculative.attention_backend.name if speculative.attention_backend else None,
    )


def _connectors(transfer: Any, cache: Any) -> tuple[str, ...]:
    if cache.kv_offloading_size is not None:  # vLLM puts this one in the place of any other, later
        return ("OffloadingConnector" if cache.kv_offloading_backend == "native" else "LMCacheMPConnector",)
    if transfer is None or transfer.kv_connector is None:
        return ()
    if transfer.kv_connector != "MultiConnector":
        return (_connector(transfer.kv_connector, transfer.kv_connector_module_path),)
    children = transfer.kv_connector_extra_config["connectors"]
    return tuple(_connector(child["kv_connector"], child.get("kv_connector_module_path")) for child in children)


def _connector(name: str, module: str | None) -> str:
    return f"{module}.{name}" if module else name


def _bound_early() -> bool:
    """Whether the attention was imported with the switch off, seen through what other features wrapped around it."""
    module = sys.modules.get(_ATTENTION)
    if module is None:
        return False
    from vllm.compilation import breakable_cudagraph

    function = module.DeepseekV32Attention._fused_attention
    while function is not None and function.__code__.co_filename != breakable_cudagraph.__file__:
        function = getattr(function, "__wrapped__", None)
    return function is None


def _config_map(original: dict[str, Any]) -> dict[str, Any]:
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    return original | {arch: _hook(original.get(arch, VerifyAndUpdateConfig)) for arch in ARCHITECTURES}


def _hook(base: Any) -> Any:
    class Hook(base):
        @classmethod
        def verify_and_update_config(cls, vllm_config: Any) -> None:
            chosen = vllm_config.cache_config.cache_dtype
            base.verify_and_update_config(vllm_config)
            route(vllm_config, chosen)

    return Hook


def _v2_architectures(original: frozenset[str]) -> frozenset[str]:
    return original | {TARGET[0]}


def _create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        release_breakable()
        return original(self, *args, **kwargs)

    return create_engine_config


_REMOVE = "vLLM 0.29.0 routes these architectures itself (#49790)"

FEATURE = Feature(
    name=NAME,
    summary="GLM-5.2 and DeepSeek-V3.2: optimized sparse class, V2 runner, breakable CUDA graphs, fp8 KV cache",
    probe=probe,
    patches=(
        Patch(
            "vllm.model_executor.models.config:MODELS_CONFIG_MAP",
            _config_map,
            "decides for each configuration",
            _REMOVE,
            frozenset({"48b20991a322ba81"}),
        ),
        Patch(
            "vllm.config.vllm:DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES",
            _v2_architectures,
            "runs what is routed on the V2 model runner",
            _REMOVE,
            frozenset({"74bc7f41da2cf8a9"}),
        ),
        Patch(
            "vllm.engine.arg_utils:EngineArgs.create_engine_config",
            _create_engine_config,
            "starts each engine's configuration without the breakable switch of an earlier one",
            _REMOVE,
            frozenset({"835c627b7094d43b"}),
        ),
    ),
    superseded_by="vLLM 0.29.0 (#49790); the fp8 KV default on SM100 for GLM-5.2 by 0.32.0",
)
