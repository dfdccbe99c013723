"""Two tensor-parallel ranks of the real vLLM 0.26.0 over NCCL: the fused all-reduce + norm around its limits, and the draft's argmax.

NVLink multicast stays off: the ranks take FlashInfer's ``trtllm`` workspace, whose memory is torch's symmetric memory without it.
Run as a script with a rank, this file is one of the two processes.
"""

import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lldecode import ranks as tp
from lldecode import workers
from lldecode.engine import Engine
from lldecode.feature import Feature, declined
from lldecode_mtp_spec.vllm_ranks import PATCHES

RANKS, HIDDEN = 2, 6144
SMALL = 64
"""Tokens of the workspace that another layer is supposed to have asked for first."""
LIMIT_S = 240.0
"""After this long both ranks are killed; FlashInfer's kernels are compiled in it where they were not before."""

missing = [name for name in ("vllm", "flashinfer") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs two GPUs, got {torch.cuda.device_count()}"),
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.timeout(LIMIT_S + 60),
]


def start(folder: Path, script: str = __file__) -> list[dict[str, Any]]:
    """What each rank reports; AssertionError with the end of both logs where one fails or the time is over, after both are killed."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LLDECODE_")} | tp.NO_MULTICAST
    logs, rendezvous = [folder / f"log{i}" for i in range(RANKS)], tp.rendezvous()
    with workers.killed_at_end() as processes:
        for i, log in enumerate(logs):
            with log.open("wb") as out:
                command = [sys.executable, script, str(i), rendezvous, str(folder / f"out{i}")]
                processes.append(subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True))
        codes = workers.wait(processes, LIMIT_S)
    tails = "\n".join(f"rank {i}:\n{log.read_text(errors='replace')[-4000:]}" for i, log in enumerate(logs))
    assert codes == [0] * RANKS, f"exit status (None: hung, killed after {LIMIT_S:.0f} s): {codes}\n{tails}"
    return [json.loads((folder / f"out{i}").read_text()) for i in range(RANKS)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start(tmp_path_factory.mktemp("ranks"))


def test_workspaces_have_no_multicast(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["workspaces"] == {"small": ["trtllm", [0, 0, 0]], "own": ["trtllm", [0, 0, 0]]}


def test_path_depends_on_the_size_alone_and_reduces_once(ranks: list[dict[str, Any]]) -> None:
    own = ranks[0]["limit"]
    assert own > SMALL
    fused, unfused = [["fused"]] * 2, [["all_reduce"]] * 2
    sizes = {"small": [1, SMALL - 1, SMALL, SMALL + 1, 1], "own": [1, own - 1, own, own + 1, 1]}
    for rank in ranks:
        assert rank["paths"] == {name: [[n, unfused if n == tokens[3] else fused] for n in tokens] for name, tokens in sizes.items()}
        (reason,) = rank["declined"]["mtp-spec"]
        assert "workspace is too small" in reason


def test_replays_take_the_captured_path(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["graphs"] == [[1, ["fused"]], [16, ["fused"]], [SMALL, ["fused"]], [SMALL + 1, ["all_reduce"]]]


def test_draft_layer_reduces_its_output_once_inside_the_norm(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["layer"] == {"on": ["fused"], "off": ["all_reduce"]}


def test_values_are_those_of_the_unfused_path(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["wrong"] == [] and rank["compared"] == 2 * 5 * 2 * 2 + 4 * 3 * 2 + 2


def test_top_tokens_are_the_argmax_of_the_whole_vocabulary(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["argmax"]) == 15
        assert {name: tokens for name, tokens in rank["argmax"].items() if len(set(tokens)) > 1} == {}
    assert ranks[0]["argmax"] == ranks[1]["argmax"]


class Rank:
    """One process: what it ran, and what differed."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.calls: list[str] = []
        self.out: dict[str, Any] = {"wrong": [], "compared": 0, "paths": {}, "graphs": [], "workspaces": {}, "layer": {}}

    def counted(self, owner: Any, name: str, label: str) -> None:
        """Note each call of ``owner.name`` as `label`."""
        original: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(label)
            return original(*args, **kwargs)

        setattr(owner, name, noted)

    def inputs(self, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """The same on both ranks: what each rank has to add, bf16 ``[RANKS, tokens, HIDDEN]``, and the residual."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + tokens)
        both, residual = (
            torch.randn(*shape, HIDDEN, generator=generator, device=self.device).bfloat16() for shape in ((RANKS, tokens), (tokens,))
        )
        return both, residual

    def mine(self, both: Tensor) -> Tensor:
        return both[self.rank].clone()

    def norm(self, norm_class: type[Any]) -> Any:
        with self.device:
            norm = norm_class(HIDDEN, eps=1e-5).bfloat16()
        norm.weight.data.normal_(0 if "Gemma" in norm_class.__name__ else 1, 0.1, generator=torch.Generator(self.device).manual_seed(7))
        return norm

    def compare(self, what: str, got: tuple[Tensor, ...], norm: Any, both: Tensor, residual: Tensor) -> None:
        """With the norm of a sum that no collective made."""
        expected = norm.forward_native(both.float().sum(0).bfloat16(), residual.clone())
        for name, a, b in zip(("norm", "residual"), got, expected, strict=False):
            self.out["compared"] += 1
            try:
                torch.testing.assert_close(a.as_subclass(Tensor), b, rtol=0.02, atol=0.04)
            except AssertionError as e:
                self.out["wrong"].append(f"{what}, {name}: {e}")


def sweep(r: Rank, name: str, sizes: list[int]) -> None:
    """Both fused functions at each size."""
    import vllm.model_executor.layers.fused_allreduce_gemma_rms_norm as gemma
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.models.deepseek_v32.nvidia import fused_ops

    r.out["paths"][name] = []
    for tokens in sizes:
        both, residual = r.inputs(tokens)
        paths = []
        for function, norm in (
            (gemma.fused_allreduce_gemma_rms_norm, r.norm(GemmaRMSNorm)),
            (fused_ops.fused_allreduce_rms_norm, r.norm(RMSNorm)),
        ):
            r.calls.clear()
            got = function(r.mine(both), residual.clone(), norm)
            synchronize(f"{name} workspace, {tokens} tokens, {function.__name__}: {r.calls}")
            paths.append([*r.calls])
            r.compare(f"{name} workspace, {tokens} tokens, {function.__name__}", got, norm, both, residual)
        r.out["paths"][name].append([tokens, paths])


def graphs(r: Rank) -> None:
    from vllm.distributed.parallel_state import graph_capture
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.models.deepseek_v32.nvidia.fused_ops import fused_allreduce_rms_norm

    norm = r.norm(RMSNorm)
    for tokens in (1, 16, SMALL, SMALL + 1):
        both, residual = r.inputs(tokens)
        x, held = r.mine(both), residual.clone()
        with graph_capture(r.device) as context:
            fused_allreduce_rms_norm(x, held, norm)
            r.calls.clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=context.stream):
                got = fused_allreduce_rms_norm(x, held, norm)
        r.out["graphs"].append([tokens, [*r.calls]])
        for seed in (1, 2, 3):
            both, residual = r.inputs(tokens, seed)
            x.copy_(both[r.rank])
            held.copy_(residual)
            graph.replay()
            synchronize(f"replay {seed} of {tokens} tokens")
            r.compare(f"replay {seed}, {tokens} tokens", got, norm, both, residual)


def draft_layer(r: Rank, name: str) -> None:
    """The MTP layer's forward, its block replaced by one with a different partial sum on each rank."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.models.deepseek_v32.nvidia.mtp import DeepseekV32MultiTokenPredictorLayer

    both, residual = r.inputs(4)

    def block(positions: Tensor, hidden_states: Tensor, residual: None, after: Tensor = residual) -> tuple[Tensor, Tensor]:
        return r.mine(both), after.clone()

    block.use_sequence_parallel_moe = False  # type: ignore[attr-defined]
    norm = r.norm(RMSNorm)
    layer = SimpleNamespace(
        enorm=norm, hnorm=norm, shared_head=SimpleNamespace(norm=norm), eh_proj=lambda x: x[:, :HIDDEN], mtp_block=block
    )
    positions = torch.arange(4, device=r.device)
    r.calls.clear()
    logits, recycled = DeepseekV32MultiTokenPredictorLayer.forward(layer, None, positions, residual, residual)
    synchronize(f"draft layer, patches {name}: {r.calls}")
    assert logits is recycled
    r.out["layer"][name] = [*r.calls]
    r.compare(f"draft layer, patches {name}", (logits,), norm, both, residual)


def synchronize(step: str) -> None:
    """A hang is then at the last line of the log."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(step, flush=True)


def observe(r: Rank, engine: Engine, group: Any) -> None:
    import ranks as cpu_ranks
    import vllm.distributed.device_communicators.flashinfer_all_reduce as flashinfer
    import vllm.model_executor.layers.fused_allreduce_gemma_rms_norm as gemma
    import vllm.models.deepseek_v32.nvidia.mtp  # noqa: F401, patched where it is imported
    from vllm.models.deepseek_v32.nvidia import fused_ops

    assert engine.dropped == {} and gemma.flashinfer_trtllm_fused_allreduce_norm is not None
    for module in (gemma, fused_ops):
        r.counted(module, "flashinfer_trtllm_fused_allreduce_norm", "fused")
    r.counted(group.device_communicator, "all_reduce", "all_reduce")

    def workspace(name: str) -> Any:
        held = flashinfer._fi_ar_workspace
        assert held is not None, "FlashInfer: expected a workspace, got None"
        r.out["workspaces"][name] = [held.backend, [handle.multicast_ptr for handle in held.mem_handles]]
        return held

    # Held by somebody else, for fewer tokens than the function would ask for.
    asked = {"world_size": RANKS, "rank": r.rank, "hidden_dim": HIDDEN, "dtype": torch.bfloat16, "group": group.device_group}
    gemma.get_fi_ar_workspace(max_token_num=SMALL, **asked)
    small = workspace("small")
    sweep(r, "small", [1, SMALL - 1, SMALL, SMALL + 1, 1])
    if r.device.type == "cuda":
        graphs(r)
    draft_layer(r, "on")

    flashinfer._fi_ar_workspace = None
    limit = gemma._max_token_num(RANKS, HIDDEN, torch.bfloat16)
    assert limit is not None
    r.out["limit"] = limit
    sweep(r, "own", [1, limit - 1, limit, limit + 1, 1])
    assert workspace("own") is not small

    with r.device:
        r.out["argmax"] = cpu_ranks.argmax()
    synchronize("argmax")
    r.out["declined"] = declined()
    engine.reconcile([])
    draft_layer(r, "off")


def main(rank: int, rendezvous: str, out: str) -> None:
    faulthandler.dump_traceback_later(LIMIT_S - 10, exit=True)
    device = tp.device(rank)
    engine = Engine([Feature("ranks", "test", PATCHES)])
    engine.reconcile(["ranks"])
    r = Rank(rank, device)
    with tp.tensor_parallel(rank, RANKS, rendezvous) as group, torch.inference_mode():
        observe(r, engine, group)
        torch.distributed.barrier(group=group.cpu_group)
    Path(out).write_text(json.dumps(r.out))
    sys.stdout.flush()
    os._exit(0)  # without a teardown of the communicators, which could wait for the other rank


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
