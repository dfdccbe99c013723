"""Runs the real vLLM 0.26.0 with and without the feature, on a machine without a GPU, and prints what happened as JSON.

For ``lldecode.testing_vllm.run_vllm``; vLLM's own kernels run in Triton's interpreter.
"""

import json
import operator
import sys
from types import SimpleNamespace
from typing import Any

import torch

from lldecode.engine import Engine
from lldecode.feature import declined, pdl
from lldecode_pdl.vllm import FEATURE

out: dict[str, Any] = {}
TARGETS = [p.target for p in FEATURE.patches if p.host == "vllm"]


class Reached(Exception):
    """Carries what arrived at the projection after the kernel under test."""


def stop(x: torch.Tensor) -> Any:
    raise Reached(x)


def at_load(engine: Engine) -> None:
    engine.reconcile(["pdl"])
    out["cuda_at_load"] = torch.cuda.is_initialized()
    out["imported_at_load"] = [m for m in ("triton", "lldecode_pdl.kernel", "vllm", "vllm.models.deepseek_v32") if m in sys.modules]
    out["pending"] = sorted(engine.pending) == sorted(TARGETS)
    out["pdl_on"] = pdl()


def held(target: str) -> Any:
    module, name = target.split(":")
    return operator.attrgetter(name)(sys.modules[module])


def poisoned_empty_like(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.full_like(x, torch.nan, **kwargs) if x.is_floating_point() else torch.zeros_like(x, **kwargs)


def query_rows(slots: list[int] | None) -> list[bool]:
    """Which rows of the query reach ``q_b_proj`` as numbers, out of the real attention layer."""
    from vllm.forward_context import override_forward_context
    from vllm.models.deepseek_v32.nvidia.attention import DeepseekV32Attention

    torch.manual_seed(0)
    norm = SimpleNamespace(weight=torch.ones(256, dtype=torch.bfloat16), variance_epsilon=1e-6)
    layer = SimpleNamespace(
        layer_name="layer",
        indexer=None,
        kv_cache=torch.zeros(2, 64, 656, dtype=torch.uint8),
        _k_scale=torch.ones(()),
        q_a_layernorm=norm,
        kv_a_layernorm=SimpleNamespace(weight=torch.ones(512, dtype=torch.bfloat16), variance_epsilon=1e-6),
        rotary_emb=SimpleNamespace(cos_sin_cache=torch.randn(16, 64)),
        topk_indices_buffer=torch.zeros(8, 128, dtype=torch.int32),
        kv_cache_dtype="fp8_ds_mla",
        _index_rope_interleave=True,
        q_b_proj=stop,
    )
    qkv = torch.randn(3, 256 + 576, dtype=torch.bfloat16)
    context = SimpleNamespace(
        attn_metadata=None if slots is None else {"layer": SimpleNamespace()},
        slot_mapping={} if slots is None else {"layer": torch.tensor(slots)},
    )
    empty_like, torch.empty_like = torch.empty_like, poisoned_empty_like
    try:
        with override_forward_context(context):
            DeepseekV32Attention._fused_attention(
                layer, torch.arange(3), qkv[:, :256], qkv[:, 256:768], qkv[:, 768:], None, None, torch.empty(3, 1)
            )
    except Reached as e:
        q = e.args[0]
        return (~q.isnan().any(-1)).tolist()
    finally:
        torch.empty_like = empty_like
    raise AssertionError("q_b_proj was not called")


def eh_input() -> torch.Tensor:
    from vllm.models.deepseek_v32.nvidia.mtp import DeepseekV32MultiTokenPredictorLayer

    torch.manual_seed(0)
    norms = [SimpleNamespace(weight=torch.randn(64), variance_epsilon=1e-6) for _ in range(2)]
    layer = SimpleNamespace(enorm=norms[0], hnorm=norms[1], eh_proj=stop)
    try:
        DeepseekV32MultiTokenPredictorLayer.forward(layer, None, torch.arange(3), torch.randn(3, 64), torch.randn(3, 64))
    except Reached as e:
        return e.args[0]
    raise AssertionError("eh_proj was not called")


def converted(target: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    args = torch.tensor([0, 1, 1], dtype=torch.int32), torch.randint(0, 90, (2, 5), dtype=torch.int32)
    indices = torch.randint(-1, 400, (3, 128), dtype=torch.int32)
    return list(held(target)(*args, indices, BLOCK_SIZE=64, NUM_TOPK_TOKENS=128, return_valid_counts=True))


def inductor_config(user: dict[str, object], **model: object) -> dict[str, object]:
    """What vLLM's backend gives Inductor for a model, of what :data:`FEATURE` adds."""
    from vllm.compilation.backends import VllmBackend
    from vllm.config import CompilationConfig

    compilation = CompilationConfig(mode=3, backend="inductor", inductor_compile_config=user)
    config = SimpleNamespace(compilation_config=compilation, model_config=SimpleNamespace(hf_config=SimpleNamespace(**model)))
    found = VllmBackend(config).inductor_config  # type: ignore[arg-type]
    assert compilation.inductor_compile_config is not found
    return {name: found[name] for name in ("triton.enable_pdl", "aot_inductor.metadata") if name in found}


def main() -> None:
    engine = Engine([FEATURE])
    at_load(engine)
    import torch._inductor.codegen.triton
    import vllm.compilation.backends
    import vllm.models.deepseek_v32.nvidia.attention
    import vllm.models.deepseek_v32.nvidia.mtp
    import vllm.v1.attention.backends.mla.flashattn_mla_sparse
    import vllm.v1.attention.backends.mla.flashinfer_mla_sparse
    import vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120
    import vllm.v1.attention.backends.mla.flashmla_sparse  # noqa: F401

    out["dropped"] = engine.dropped
    on = {t: held(t) for t in TARGETS}
    conversions = [t for t in TARGETS if t.endswith("global_index")]
    out["on"] = {
        "replaced": all(f.__wrapped__ is not f for f in on.values()),
        "rows": query_rows([3, -1, 70]),
        "profile": query_rows(None),
        "inductor": [
            inductor_config({}, index_topk=2048),
            inductor_config({"triton.enable_pdl": False}, index_topk=2048),
            inductor_config({}, hidden_size=4096),
        ],
    }
    ours = eh_input(), {t: converted(t) for t in conversions}
    out["declined"] = declined()

    engine.reconcile([])
    import vllm.models.deepseek_v32.nvidia.kernels as kernels
    import vllm.v1.attention.backends.mla.sparse_utils as utils

    originals = {t: getattr(utils if t in conversions else kernels, t.split(":")[1], on[t].__wrapped__) for t in TARGETS}
    out["off"] = {
        "identical": all(held(t) is originals[t] is on[t].__wrapped__ for t in TARGETS),
        "inductor": inductor_config({}, index_topk=2048),
        "rows": query_rows([3, -1, 70]),
        "profile": query_rows(None),
    }
    out["eh_norm_error"] = (eh_input() - ours[0]).abs().max().item()
    out["conversion_equal"] = all(torch.equal(a, b) for t in conversions for a, b in zip(converted(t), ours[1][t], strict=True))
    out["pdl_off"] = pdl()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
