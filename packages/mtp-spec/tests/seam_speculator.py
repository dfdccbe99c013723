"""Runs vLLM 0.26.0's own speculator and draft model, with and without the feature, and prints what happened as JSON.

For ``lldecode.testing_vllm.run_vllm``; the argument is a directory for the model's config. Real are the speculator, the MTP model, its
attention, and their Triton kernels (interpreted). Stand-ins are the MoE, the indexer's kernels and the attention kernel.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lldecode.engine import Engine
from lldecode.feature import declined
from lldecode.testing_vllm import tiny_model, world
from lldecode_mtp_spec.vllm import FEATURE
from lldecode_mtp_spec.vllm_hooks import HOOKS

MAX_REQS, TOPK, SHARE = 4, 128, "LLDECODE_MTP_SPEC_SHARE"
TARGETS = [p.target for p in FEATURE.patches if p.host == "vllm"]
WRAPS = {p.target: p.wrap for p in FEATURE.patches}
INDEXER = "vllm.models.deepseek_v32.nvidia.attention:sparse_attn_indexer"
out: dict[str, Any] = {}
log: list[Any] = []


def held(target: str) -> Any:
    """What the module or class itself holds, or the string "absent"."""
    module, _, path = target.partition(":")
    owner: Any = sys.modules[module]
    *classes, name = path.split(".")
    for cls in classes:
        owner = vars(owner)[cls]
    return vars(owner).get(name, "absent")


class Block(torch.nn.Module):
    """A decoder layer of attention alone."""

    use_sequence_parallel_moe = False

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.self_attn = attention

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: Any) -> Any:
        return self.self_attn(positions=positions, hidden_states=hidden_states), hidden_states


class Tables:
    """Block tables of a request a row, each in a block of its own."""

    input_block_tables: Any = (torch.arange(1, MAX_REQS + 1, dtype=torch.int32)[:, None],)
    slot_mappings = torch.full((1, 64), -1, dtype=torch.int64)

    def compute_slot_mappings(self, idx_mapping: Any, query_start_loc: Any, positions: torch.Tensor, padded: int) -> torch.Tensor:
        self.slot_mappings[0, :padded] = -1
        self.slot_mappings[0, : len(positions)] = (idx_mapping[: len(positions)] + 1) * 64 + positions
        return self.slot_mappings[:, :padded]


def top(position: int) -> torch.Tensor:
    """The row that the stand-in indexer chooses at `position`."""
    row = torch.full((TOPK,), -1, dtype=torch.int32)
    row[: position + 1] = torch.arange(position, -1, -1, dtype=torch.int32) * 100 + position
    return row


def build(config: Any) -> Any:
    """The real speculator with the real draft model."""
    import vllm.models.deepseek_v32.nvidia.attention as attention_module
    import vllm.v1.worker.gpu.spec_decode.mtp.speculator as mtp_module
    from vllm.models.deepseek_v32.nvidia.mtp import DeepseekV32MTP
    from vllm.v1.worker.gpu.spec_decode import init_speculator

    torch.manual_seed(0)
    config.compilation_config.static_forward_context.clear()
    model = DeepseekV32MTP(vllm_config=config)
    (layer,) = model.model.layers.values()
    attention = layer.mtp_block.self_attn
    layer.mtp_block = Block(attention)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    attention.process_weights_after_loading(torch.bfloat16)
    attention.kv_cache = torch.zeros(MAX_REQS + 1, 64, 656 if attention.kv_cache_dtype == "fp8_ds_mla" else 576, dtype=torch.uint8)
    indexer = attention._modules["indexer"]
    indexer.k_cache.kv_cache = torch.zeros(MAX_REQS + 1, 64, 132, dtype=torch.uint8)

    def run_indexer(*args: Any, **_: Any) -> torch.Tensor:
        positions = vars(attention)["positions"]
        log.append(("indexer", len(positions)))
        for i, position in enumerate(positions.tolist()):
            args[13][i] = top(position)
        return args[13]

    def forward_mqa(q: Any, kv: Any, metadata: Any, layer: Any) -> Any:
        n = metadata.num_actual_tokens
        rows = attention.topk_indices_buffer[:n].clone()
        log.append(("attention", rows, kv.view(torch.uint8).count_nonzero().item(), indexer.k_cache.kv_cache.count_nonzero().item()))
        return torch.zeros(n, attention.num_local_heads, attention.kv_lora_rank, dtype=torch.bfloat16), None

    attention.impl.forward_mqa = forward_mqa
    attention_module.sparse_attn_indexer = WRAPS[INDEXER](run_indexer) if engine.enabled else run_indexer
    attention.register_forward_pre_hook(lambda m, a, k: vars(m).update(positions=k["positions"].clone()), with_kwargs=True)

    mtp_module.load_eagle_model = lambda *_: model
    speculator = init_speculator(config, torch.device("cpu"))
    speculator.model = speculator.load_draft_model(None, set())
    name = attention.layer_name
    speculator.block_tables = Tables()
    speculator.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[name])])
    speculator._build_draft_attn_metadata = lambda num_tokens_padded, **_: {name: SimpleNamespace(num_actual_tokens=num_tokens_padded)}
    speculator.model_state = speculator.target_input_buffers = speculator.target_attn_groups = speculator.attn_groups = None
    speculator.attention, speculator.name = attention, name
    return speculator


def propose(speculator: Any, starts: list[int], lengths: list[int], rejected: list[int], padding: int = 0) -> torch.Tensor:
    """One proposal: request ``i`` computes `lengths[i]` tokens from position `starts[i]`, the last `rejected[i]` of them rejected."""
    n, tokens = len(starts), sum(lengths)
    positions = torch.cat([torch.arange(s, s + length) for s, length in zip(starts, lengths, strict=True)])
    ends = torch.tensor(lengths).cumsum(0).tolist()
    requests = torch.repeat_interleave(torch.arange(n), torch.tensor(lengths))
    slots = torch.cat([(requests + 1) * 64 + positions, torch.full((padding,), -1)])
    padded = torch.cat([positions, torch.zeros(padding, dtype=torch.int64)])
    seq_lens = torch.tensor([s + length for s, length in zip(starts, lengths, strict=True)], dtype=torch.int32)
    batch = SimpleNamespace(
        num_tokens=tokens,
        num_tokens_after_padding=tokens + padding,
        num_reqs=n,
        num_scheduled_tokens=np.array(lengths),
        seq_lens_cpu_upper_bound=seq_lens,
        idx_mapping=torch.arange(n, dtype=torch.int32),
        input_ids=torch.arange(10, 10 + tokens + padding, dtype=torch.int32),
        positions=padded,
        query_start_loc=torch.tensor([0, *ends], dtype=torch.int32),
        seq_lens=seq_lens,
    )
    speculator.input_buffers.positions[: tokens + padding] = padded  # the padded rows' are whatever the last batch left
    return speculator.propose(
        input_batch=batch,
        attn_metadata={speculator.name: SimpleNamespace(num_actual_tokens=tokens + padding)},
        slot_mappings={speculator.name: slots},
        last_hidden_states=torch.randn(tokens + padding, speculator.hidden_size, dtype=speculator.dtype),
        aux_hidden_states=None,
        num_sampled=torch.ones(n, dtype=torch.int32),
        num_rejected=torch.tensor(rejected, dtype=torch.int32),
        last_sampled=torch.full((MAX_REQS, 1), 99),
        next_prefill_tokens=torch.zeros(MAX_REQS, dtype=torch.int32),
        temperature=torch.zeros(MAX_REQS),
        seeds=torch.zeros(MAX_REQS, dtype=torch.int64),
    )


def rows_of(entry: Any) -> list[int]:
    """The position each row of the top-k was chosen at, -1 for a row of -1, -2 for anything else."""
    known = {tuple(top(p).tolist()): p for p in range(64)} | {tuple([-1] * TOPK): -1}
    return [known.get(tuple(row), -2) for row in entry[1].tolist()]


BATCHES: list[dict[str, Any]] = [  # requests join, leave and swap; drafts are rejected; rows are padded
    {"starts": [0, 0], "lengths": [5, 3], "rejected": [0, 0]},
    {"starts": [5, 3], "lengths": [4, 4], "rejected": [2, 0], "padding": 2},
    {"starts": [7, 7, 0], "lengths": [4, 4, 6], "rejected": [3, 1, 0]},
    {"starts": [8], "lengths": [4], "rejected": [0], "padding": 4},
]


def proposals(speculator: Any) -> list[dict[str, Any]]:
    """What the attention of each draft step saw, for each of the batches."""
    found = []
    for batch in BATCHES:
        log.clear()
        speculator.attention.topk_indices_buffer.fill_(7)
        speculator.attention.kv_cache.zero_()
        speculator.attention._modules["indexer"].k_cache.kv_cache.zero_()
        tokens = propose(speculator, **batch)
        steps = [e for e in log if e[0] == "attention"]
        found.append(
            {
                "indexer": [e[1] for e in log if e[0] == "indexer"],
                "rows": [rows_of(e) for e in steps],
                "kv_grows": all(a[2] < b[2] for a, b in itertools.pairwise(steps)),
                "keys_grow": [a[3] < b[3] for a, b in itertools.pairwise(steps)],
                "tokens": list(tokens.shape),
                "after": speculator.attention.skip_topk,
            }
        )
    return found


def captures(speculator: Any, fails: bool = False) -> list[Any]:
    """The skip state at which each kind of graph is captured, between the hooks."""
    import vllm.v1.worker.gpu.spec_decode.autoregressive.cudagraph_utils as module

    def captured(self: Any, create_forward_fn: Any, desc: str) -> None:
        log.append((desc, speculator.attention.skip_topk))
        if fails and "decode" in desc:
            raise RuntimeError("step failed")

    base, module.CudaGraphManager.capture = module.CudaGraphManager.capture, captured
    log.clear()
    try:
        speculator.capture()
    finally:
        module.CudaGraphManager.capture = base
    return list(log)


def watched(speculator: Any) -> None:
    """Log the speculator's hooks, in front of what they do."""
    for name in HOOKS:
        inner = getattr(speculator, name)
        setattr(speculator, name, lambda n, name=name, inner=inner: (log.append((name, n)), inner(n))[1])


def failing(speculator: Any) -> dict[str, Any]:
    """A step that fails after the top-k was shared, and a hook of another one that does."""

    def fail(*_: Any, **__: Any) -> None:
        if what.startswith("on_"):
            kept(*_)  # it has set the reuse mode
        seen.append(speculator.attention.skip_topk)
        raise RuntimeError("step failed")

    results: dict[str, Any] = {}
    for what in ("_generate_draft", "on_multi_step_decode_begin", "_prefill"):
        seen: list[bool] = []
        kept = vars(speculator).get(what)
        setattr(speculator, what, fail)
        try:
            propose(speculator, [0], [4], [0])
        except RuntimeError as e:
            results[what] = {"error": str(e), "during": seen, "after": speculator.attention.skip_topk}
        finally:
            delattr(speculator, what) if kept is None else setattr(speculator, what, kept)
    try:
        captures(speculator, fails=True)
    except RuntimeError as e:
        during = [entry[1] for entry in log if "decode CUDA" in entry[0]]
        results["capture"] = {"error": str(e), "during": during, "after": speculator.attention.skip_topk}
    return results


def hooks_only(speculator: Any) -> list[Any]:
    """A speculator whose model has no hooks, and a subclass that defines two itself."""
    from vllm.v1.worker.gpu.spec_decode.autoregressive.speculator import AutoRegressiveSpeculator

    plain = SimpleNamespace(model=SimpleNamespace())
    for name in HOOKS:
        getattr(AutoRegressiveSpeculator, name)(plain, 1)  # nothing to call
    cls = type("Other", (AutoRegressiveSpeculator,), {"on_prefill_end": lambda self, n: log.append(("own", n))})
    log.clear()
    cls.on_prefill_end(plain, 2)
    plain.model.on_prefill_begin = lambda n: log.append(("model", n))
    cls.on_prefill_begin(plain, 3)
    return list(log)


engine = Engine([FEATURE])


def main() -> None:
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda inspect: inspect()  # the same answer, without a process for each class
    engine.reconcile(["mtp-spec"])
    out["imported_at_load"] = [m for m in ("vllm.models.deepseek_v32", "vllm.v1.worker.gpu.spec_decode") if m in sys.modules]
    out["cuda_at_load"] = torch.cuda.is_initialized()
    directory = Path(sys.argv[1])
    model = tiny_model(directory, "glm52", index_topk=TOPK, index_n_heads=2, num_attention_heads=4, hidden_size=256, q_lora_rank=256)
    speculative = {"method": "mtp", "num_speculative_tokens": 3}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    with world(model, kv_cache_dtype="fp8", max_num_seqs=MAX_REQS, max_num_batched_tokens=64, speculative_config=speculative) as config:
        import vllm.models.deepseek_v32.nvidia.attention as attention_module
        import vllm.v1.attention.backends.mla.flashattn_mla_sparse
        import vllm.v1.attention.backends.mla.flashinfer_mla_sparse
        import vllm.v1.attention.backends.mla.flashmla_sparse
        import vllm.v1.spec_decode.llm_base_proposer
        import vllm.v1.worker.gpu.spec_decode.mtp.speculator  # noqa: F401
        from vllm.config.compilation import CUDAGraphMode
        from vllm.models.deepseek_v32.nvidia import mtp  # noqa: F401

        out["dropped"] = engine.dropped
        on = {t: held(t) for t in TARGETS}
        speculator = build(config)
        speculator.init_cudagraph_manager(CUDAGraphMode.NONE)
        out["on"] = proposals(speculator)
        watched(speculator)
        log.clear()
        propose(speculator, [0, 0], [4, 2], [0, 0])
        out["order_propose"] = [e if isinstance(e[0], str) and e[0].startswith("on_") else e[0] for e in log]
        out["order_capture"] = captures(speculator)
        out["failing"] = failing(speculator)
        out["hooks_only"] = hooks_only(speculator)

        speculator.num_speculative_steps = 1
        log.clear()
        propose(speculator, [0, 0], [4, 2], [0, 0])
        out["order_single"] = [e[0] for e in log]

        out["refused"] = refusals(speculator, config)
        os.environ[SHARE] = "0"
        unshared = build(config)
        unshared.init_cudagraph_manager(CUDAGraphMode.NONE)
        out["unshared"] = proposals(unshared)
        del os.environ[SHARE]
        out["declined"] = declined()

        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

        try:
            SpecDecodeBaseProposer.load_model(SimpleNamespace(), None)
        except AttributeError:
            out["v1"] = [r for r in declined()["mtp-spec"] if "V1" in r]

        attention_module.sparse_attn_indexer = on[INDEXER]
        engine.reconcile([])
        off = {t: held(t) for t in TARGETS}
        out["replaced"] = {t: on[t] is not off[t] for t in TARGETS}
        out["identical"] = {t: off[t] == "absent" or off[t] is on[t].__wrapped__ for t in TARGETS}
        out["absent"] = [t.split(".")[-1] for t in TARGETS if off[t] == "absent"]
        stock = build(config)
        stock.init_cudagraph_manager(CUDAGraphMode.NONE)
        out["stock"] = proposals(stock)
        stock.attention.skip_topk = True
        try:
            propose(stock, [0], [4], [0])
        except AssertionError:
            out["stock_asserts"] = True
    print(json.dumps(out))


def refusals(speculator: Any, config: Any) -> dict[str, str | None]:
    from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP

    from lldecode_mtp_spec.vllm_sharing import refusal

    def case(share: str | None = None, model: Any = None, steps: int = 3, declared: Any = True) -> str | None:
        os.environ.pop(SHARE, None)
        if share is not None:
            os.environ[SHARE] = share
        hf = SimpleNamespace() if declared is None else SimpleNamespace(index_share_for_mtp_iteration=declared)
        other = SimpleNamespace(num_speculative_steps=steps, draft_model_config=SimpleNamespace(hf_config=hf))
        try:
            return refusal(other, model or speculator.model)
        finally:
            os.environ.pop(SHARE, None)

    attention = speculator.attention
    found = {
        "none": case(),
        "forced": case(share="1", declared=None),
        "generic": case(model=object.__new__(DeepSeekMTP)),
        "subclass": case(model=object.__new__(type("Other", (type(speculator.model),), {"__module__": "other"}))),
        "single": case(steps=1),
        "undeclared": case(declared=None),
        "false": case(declared=False),
        "switched off": case(share="0"),
    }
    attention.topk_indices_buffer = attention.topk_indices_buffer.clone()
    found["two buffers"] = case()
    attention.topk_indices_buffer = attention.impl.topk_indices_buffer
    return found


if __name__ == "__main__":
    main()
