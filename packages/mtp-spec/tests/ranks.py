"""Two tensor-parallel ranks of the real vLLM 0.26.0 over gloo, with and without ``vllm_ranks``; prints what happened as JSON.

For ``lldecode.testing_vllm.run_vllm``. Without arguments it starts the ranks, each a process of its own.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from lldecode.engine import Engine
from lldecode.feature import Feature, declined
from lldecode.ranks import tensor_parallel
from lldecode_mtp_spec.vllm_ranks import LOCAL_ARGMAX, PATCHES

HIDDEN = 64
FITS = 4  # tokens in the workspace
out: dict[str, Any] = {}


class OnGpu(torch.Tensor):
    """A tensor that says it is in CUDA memory, for the checks of vLLM's that ask."""

    is_cuda = True


@contextlib.contextmanager
def world(rank: int, rendezvous: str) -> Iterator[None]:
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    base = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    type(current_platform).get_device_communicator_cls = classmethod(lambda cls: base)
    type(current_platform).use_custom_op_collectives = classmethod(lambda cls: False)
    with tensor_parallel(rank, 2, rendezvous):
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def held(target: str) -> Any:
    module, path = target.split(":")
    value: Any = sys.modules[module]
    for name in path.split("."):
        value = vars(value).get(name)
    return value


def both(value: Any) -> list[Any]:
    """What each rank has."""
    got: list[Any] = [None, None]
    torch.distributed.all_gather_object(got, value)
    return got


def draft_layer(sequence_parallel: bool = False) -> tuple[list[Any], list[str]]:
    """The MTP layer's forward, its block replaced by one with a different partial sum on each rank; and the collectives it used."""
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.models.deepseek_v32.nvidia.mtp import DeepseekV32MultiTokenPredictorLayer

    torch.manual_seed(0)
    group = get_tp_group()
    norms = [RMSNorm(HIDDEN, eps=1e-5) for _ in range(3)]
    for norm in norms:
        norm.weight.data.normal_(1, 0.1)
    partial, residual = torch.randn(2, 4, HIDDEN), torch.randn(4, HIDDEN)
    if sequence_parallel:  # reduced, and each rank has its rows
        block_out = partial.sum(0)[2 * group.rank_in_group :][:2], residual[2 * group.rank_in_group :][:2]
    else:
        block_out = partial[group.rank_in_group], residual
    seen: list[torch.Tensor] = []

    def block(positions: Any, hidden_states: Any, residual: Any) -> Any:
        seen.append(hidden_states)
        return block_out[0].clone(), block_out[1].clone()

    block.use_sequence_parallel_moe = sequence_parallel
    layer = SimpleNamespace(
        enorm=norms[0], hnorm=norms[1], shared_head=SimpleNamespace(norm=norms[2]), eh_proj=lambda x: x[:, :HIDDEN] * 2, mtp_block=block
    )
    calls: list[str] = []
    communicator = group.device_communicator
    for name in ("all_reduce", "all_gather"):
        original = getattr(type(communicator), name)
        setattr(communicator, name, lambda *a, name=name, f=original: (calls.append(name), f(communicator, *a))[1])
    with torch.inference_mode():
        logits, recycled = DeepseekV32MultiTokenPredictorLayer.forward(
            layer, None, torch.arange(4), torch.randn(4, HIDDEN), torch.randn(4, HIDDEN)
        )
        expected = norms[2](partial.sum(0), residual)[0]
    for name in ("all_reduce", "all_gather"):
        delattr(communicator, name)
    assert logits is recycled and torch.allclose(logits, expected, atol=1e-5), (logits - expected).abs().max()
    return [logits, seen[0]], calls


def choices(tokens: int) -> list[str]:
    """The path of each fused all-reduce + norm at this batch, with an op and a workspace that stand in for FlashInfer's."""
    import vllm.model_executor.layers.fused_allreduce_gemma_rms_norm as gemma
    import vllm.models.deepseek_v32.nvidia.fused_ops as fused_ops
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    torch.manual_seed(tokens)
    partials, residual = torch.randn(2, tokens, HIDDEN, dtype=torch.bfloat16), torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
    fused: list[int] = []

    def op(allreduce_in: Any, residual: Any, norm_out: Any, rms_gamma: Any, weight_bias: float, rms_eps: float, **_: Any) -> None:
        fused.append(len(allreduce_in))
        torch.distributed.all_reduce(allreduce_in.as_subclass(torch.Tensor), group=get_tp_group().device_group)
        allreduce_in += residual
        x = allreduce_in.float()
        norm_out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps) * (rms_gamma.float() + weight_bias))

    def sufficient(tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> bool:
        return (tp_size, hidden_dim, dtype) == (2, HIDDEN, torch.bfloat16) and num_tokens <= FITS

    for module in (gemma, fused_ops):
        module.flashinfer_trtllm_fused_allreduce_norm = op
        module._AR_RESIDUAL_RMS_NORM = 0
    gemma.get_fi_ar_workspace = lambda **_: SimpleNamespace(is_buffer_size_sufficient=sufficient)
    paths = []
    pairs = ((gemma.fused_allreduce_gemma_rms_norm, GemmaRMSNorm), (fused_ops.fused_allreduce_rms_norm, RMSNorm))
    for function, norm_class in pairs:
        norm = norm_class(HIDDEN, eps=1e-5).bfloat16()
        fused.clear()
        with torch.inference_mode():
            got = function(partials[get_tp_group().rank_in_group].clone().as_subclass(OnGpu), residual.clone(), norm)
            expected = norm(partials.sum(0), residual.clone())
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor), rtol=0.02, atol=0.02)
        paths.append("fused" if fused else "unfused")
    return paths


INF, NAN = math.inf, math.nan


def argmax_cases() -> dict[str, tuple[int, dict[int, float], float]]:
    """By name: vocabulary, the logits of some ids, the logit of the others. Both ranks have half of the next multiple of 64."""
    return {
        "one": (128, {100: 2.0}, 0.0),
        "tie across ranks": (128, {30: 2.0, 31: 2.0, 64: 2.0, 127: 2.0}, 0.0),
        "tie on the second rank": (128, {70: 2.0, 90: 2.0}, 0.0),
        "all equal": (128, {}, -3.0),
        "all negative, padded": (100, {99: -1.0}, -2.0),
        "all negative, best first": (100, {0: -1.0}, -2.0),
        "minus infinity, padded": (100, {}, -INF),
        "one rank all padding": (20, {19: -5.0}, -7.0),
        "one rank all padding, minus infinity": (20, {}, -INF),
        "infinity twice": (100, {40: INF, 80: INF}, 0.0),
        "nan before a number": (100, {50: 9.0, 80: NAN}, 0.0),
        "nan on both": (100, {60: NAN, 70: NAN, 3: 9.0}, 0.0),
        "nan with infinity": (100, {3: INF, 99: NAN}, -1.0),
        "all nan": (100, {}, NAN),
        "large ids": (129280, {129279: -0.5, 129278: -0.5}, -1.0),
    }


def argmax() -> dict[str, list[int]]:
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.models.deepseek_v32.nvidia.mtp import DeepseekV32MTP, DeepseekV32MultiTokenPredictor

    def model(head: Any, vocab: int) -> Any:
        layers = {"61": SimpleNamespace(shared_head=SimpleNamespace(head=head))}
        predictor = SimpleNamespace(mtp_start_layer_idx=61, num_mtp_layers=1, layers=layers, logits_processor=LogitsProcessor(vocab))
        predictor.compute_logits = lambda *a: DeepseekV32MultiTokenPredictor.compute_logits(predictor, *a)
        return SimpleNamespace(model=predictor)

    tokens = {}
    for name, (vocab, some, rest) in argmax_cases().items():
        head = ParallelLMHead(vocab, 1)
        logits = torch.full((vocab,), rest)
        logits[list(some)] = torch.tensor(list(some.values()))
        head.weight.data.zero_()
        shard = logits[len(head.weight) * get_tp_group().rank_in_group :][: len(head.weight)]
        head.weight.data[: len(shard), 0] = shard
        mtp, hidden = model(head, vocab), torch.ones(3, 1)
        got = DeepseekV32MTP.get_top_tokens(mtp, hidden, 2)
        stock = DeepseekV32MTP.compute_logits(mtp, hidden, 2).argmax(-1)
        assert got.dtype == stock.dtype == torch.int64 and got.shape == (3,) and len(set(got.tolist())) == 1
        tokens[name] = [got[0].item(), stock[0].item(), logits.argmax().item()]
    head = ParallelLMHead(1000, 32)
    torch.manual_seed(5)
    weight, hidden = torch.randint(-2, 3, (1000, 32)).bfloat16(), torch.randint(-1, 2, (64, 32)).bfloat16()  # many ties
    head.weight.data = torch.zeros(512, 32, dtype=torch.bfloat16)
    shard = weight[512 * get_tp_group().rank_in_group :][:512]
    head.weight.data[: len(shard)] = shard
    assert torch.equal(DeepseekV32MTP.get_top_tokens(model(head, 1000), hidden), (hidden @ weight.T).argmax(-1))
    assert DeepseekV32MTP.get_top_tokens(model(head, 1000), hidden[:0]).shape == (0,)
    return tokens


def greedy(batch: int, user: bool = False) -> str:
    """What the real speculator calls for a batch of greedy drafts."""
    from vllm.models.deepseek_v32.nvidia.mtp import DeepseekV32MTP
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    calls: list[str] = []
    model = DeepseekV32MTP.__new__(DeepseekV32MTP)
    torch.nn.Module.__init__(model)
    logits = lambda head, hidden: (calls.append("logits"), hidden)[1]  # noqa: E731
    logits.get_top_tokens = lambda head, hidden: (calls.append("tokens"), hidden.argmax(-1))[1]
    layers = {"3": SimpleNamespace(shared_head=SimpleNamespace(head=None))}
    predictor = SimpleNamespace(mtp_start_layer_idx=3, num_mtp_layers=1, layers=layers, logits_processor=logits)
    predictor.compute_logits = lambda hidden, step: logits(None, hidden)
    model.model = predictor
    hidden = torch.eye(batch)
    speculator = SimpleNamespace(model=model, use_local_argmax_reduction=user)
    assert torch.equal(DraftModelSpeculator._greedy_sample_draft(speculator, hidden), torch.arange(batch))
    other = SimpleNamespace(get_top_tokens=None, compute_logits=lambda h: (calls.append("other"), h)[1])
    DraftModelSpeculator._greedy_sample_draft(SimpleNamespace(model=other, use_local_argmax_reduction=False), hidden)
    assert calls.pop() == "other"
    (call,) = calls
    return call


def main(rank: int, rendezvous: str) -> None:
    os.environ[LOCAL_ARGMAX] = "4"
    engine = Engine([Feature("ranks", "test", PATCHES)])
    engine.reconcile(["ranks"])
    out["imported_at_load"] = [m for m in ("vllm", "vllm.models.deepseek_v32") if m in sys.modules]
    with world(rank, rendezvous):
        observe(engine)
        ranks = both(out)
    if rank == 0:
        print(json.dumps({**out, "ranks_agree": ranks[0] == ranks[1]}))


def observe(engine: Engine) -> None:
    import vllm.models.deepseek_v32.nvidia.mtp
    import vllm.v1.worker.gpu.spec_decode.speculator  # noqa: F401

    out["dropped"], targets = engine.dropped, [p.target for p in PATCHES if p.host == "vllm"]
    on = {t: held(t) for t in targets}
    reduced, out["collectives_on"] = draft_layer()
    gathered, out["sequence_parallel_on"] = draft_layer(sequence_parallel=True)
    out["greedy_on"] = [greedy(4), greedy(3), greedy(3, user=True)]
    out["argmax"] = argmax()
    out["paths_on"] = [choices(n) for n in range(1, 7)]
    out["declined"] = declined()

    engine.reconcile([])
    off = {t: held(t) for t in targets}
    out["replaced"] = all(on[t] is not off[t] for t in targets)
    out["identical"] = all(off[t] is getattr(on[t], "__wrapped__", None) for t in targets)
    same, out["collectives_off"] = draft_layer()
    out["equal"] = all(map(torch.equal, same, reduced))
    same, out["sequence_parallel_off"] = draft_layer(sequence_parallel=True)
    out["sequence_parallel_equal"] = all(map(torch.equal, same, gathered))
    out["paths_off"] = [choices(n) for n in range(1, 7)]


if __name__ == "__main__":
    if len(sys.argv) == 1:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__]
            ranks = [subprocess.Popen([*command, str(rank), f"file://{folder}/store"]) for rank in range(2)]
            codes = [rank.wait() for rank in ranks]
        sys.exit(max(map(abs, codes)))
    main(int(sys.argv[1]), sys.argv[2])
