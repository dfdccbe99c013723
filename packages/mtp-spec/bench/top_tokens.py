"""Time greedy draft tokens from one argmax a rank against those from gathered logits, on two tensor-parallel ranks of vLLM.

    python packages/mtp-spec/bench/top_tokens.py [--vocab 38720,154880] [--batch 1,4,16,64] [--rounds 30] [--out DIR] [--timeout S]

The head is GLM-5.2's: with the first vocabulary a rank holds what one of eight ranks does, with the second half of the model's. Both
ways are checked first, then captured in CUDA graphs and replayed in turn by both ranks together; a sample is the slower rank's.
``lldecode`` is ``get_top_tokens``, ``vllm-0.26.0`` the gather of the logits and their argmax. What is printed last is the value for
``LLDECODE_MTP_SPEC_LOCAL_ARGMAX``. NVLink multicast stays off.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lldecode import bench, ranks, workers
from lldecode.layer import GLM52
from lldecode_mtp_spec.vllm_ranks import LOCAL_ARGMAX, PATCHES

RANKS = 2
CALLS = 8
"""Calls a graph: what starting a replay on two devices at once cannot align is shared by them."""
STOCK, OURS = "vllm-0.26.0", "lldecode"

get_top_tokens: Callable[[Any, Tensor], Tensor] = {p.attr: p.wrap for p in PATCHES}["DeepseekV32MTP.get_top_tokens"](None)


@dataclasses.dataclass(frozen=True)
class Head:
    """vLLM's LM head and logits processor for a vocabulary; this rank's rows are ``weight`` ``[rows, hidden]``."""

    vocab: int
    hidden: int
    device: torch.device

    @functools.cached_property
    def lm_head(self) -> Any:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        with self.device:
            head = ParallelLMHead(self.vocab, self.hidden, params_dtype=torch.bfloat16)
        head.weight.data.zero_()
        return head

    @functools.cached_property
    def processor(self) -> Any:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        return LogitsProcessor(self.vocab)

    @property
    def weight(self) -> Tensor:
        return self.lm_head.weight.data

    def calls(self, hidden: Tensor) -> dict[str, Callable[[], Tensor]]:
        """By provider, what returns int64 tokens ``[batch]`` for bf16 `hidden` ``[batch, hidden]``."""
        layers = {"0": SimpleNamespace(shared_head=SimpleNamespace(head=self.lm_head))}
        predictor = SimpleNamespace(mtp_start_layer_idx=0, num_mtp_layers=1, layers=layers, logits_processor=self.processor)
        mtp = SimpleNamespace(model=predictor)
        return {OURS: lambda: get_top_tokens(mtp, hidden), STOCK: lambda: self.processor(self.lm_head, hidden).argmax(-1)}


def constructed(vocab: int) -> dict[str, tuple[dict[int, float], float, int]]:
    """By name: the logits of some ids, that of the others, and the token; the ranks meet at the half of the padded vocabulary."""
    second = math.ceil(vocab / 64) * 64 // RANKS
    return {
        "tie across ranks": ({second - 1: 2.0, second: 2.0, vocab - 1: 2.0}, 0.0, second - 1),
        "tie on the second rank": ({second + 3: 2.0, vocab - 1: 2.0}, 0.0, second + 3),
        "all equal": ({}, -3.0, 0),
        "all negative, best last": ({vocab - 1: -1.0}, -2.0, vocab - 1),
        "all negative, best first": ({0: -1.0}, -2.0, 0),
        "all minus infinity": ({}, -math.inf, 0),
    }


def check_constructed(vocab: int, batch: int, rank: int, device: torch.device) -> list[str]:
    """Logits that are the first column of the weight; what went wrong."""
    head = Head(vocab, 64, device)
    hidden = torch.zeros(batch, head.hidden, dtype=torch.bfloat16, device=device)
    hidden[:, 0] = 1
    wrong = []
    for name, (some, rest, expected) in constructed(vocab).items():
        logits = torch.full((vocab,), rest, dtype=torch.bfloat16)
        for token, logit in some.items():
            logits[token] = logit
        shard = logits[len(head.weight) * rank :][: len(head.weight)]
        head.weight.zero_()
        head.weight[: len(shard), 0] = shard.to(device)
        for provider, call in head.calls(hidden).items():
            got = call()
            if got.dtype != torch.int64 or got.tolist() != [expected] * batch:
                wrong.append(f"{name}, vocab={vocab}, batch={batch}, {provider}: expected {expected}, got {got.tolist()}")
    return wrong


def together(group: Any, value: Any) -> list[Any]:
    """What each rank has, in the order of the ranks."""
    got: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(got, value, group=group.cpu_group)
    return got


def random_head(vocab: int, hidden: int, rank: int, device: torch.device) -> Head:
    head = Head(vocab, hidden, device)
    generator = torch.Generator(device).manual_seed(rank)
    head.weight.normal_(0, hidden**-0.5, generator=generator)
    return head


def check_random(head: Head, batch: int, group: Any) -> tuple[Tensor, list[str]]:
    """The same bf16 hidden states on both ranks, and what went wrong; such logits have ties of their own."""
    generator = torch.Generator(head.device).manual_seed(batch)
    hidden = torch.randn(batch, head.hidden, generator=generator, device=head.device).bfloat16()
    tokens = {provider: call().tolist() for provider, call in head.calls(hidden).items()}
    if any(other != {STOCK: tokens[STOCK], OURS: tokens[STOCK]} for other in together(group, tokens)):
        return hidden, [f"random, vocab={head.vocab}, batch={batch}: expected the same tokens everywhere, got {tokens}"]
    return hidden, []


def aligned(group: Any, device: torch.device) -> Callable[[str], object]:
    """What makes the streams of both ranks go on at the same time."""
    if device.type != "cuda":
        return lambda name: torch.distributed.barrier(group=group.cpu_group)
    pynccl, flag = group.device_communicator.pynccl_comm, torch.zeros(1, device=device)
    return lambda name: pynccl.all_reduce(flag)


def measure(head: Head, hidden: Tensor, group: Any, rounds: int) -> dict[str, list[float]]:
    """By provider, samples in microseconds a call: of each replay, the rank that took longer."""
    device = head.device
    graphs: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if device.type == "cuda":
        from vllm.distributed.parallel_state import graph_capture

        graphs = graph_capture(device)
    with graphs:
        replays = {name: bench.capture([call] * CALLS, device) for name, call in head.calls(hidden).items()}
    mine = bench.time_rounds(replays, rounds=rounds, device=device, before=aligned(group, device))
    all_ranks = together(group, mine)
    return {name: [max(us) / CALLS for us in zip(*(r[name] for r in all_ranks), strict=True)] for name in replays}


def threshold(wins: Mapping[int, bool]) -> int:
    """The smallest batch from which every measured one wins, 0 if the largest does not."""
    best = 0
    for batch in sorted(wins, reverse=True):
        if not wins[batch]:
            break
        best = batch
    return best


def run_rank(args: argparse.Namespace) -> None:
    from vllm.distributed import parallel_state

    device = ranks.device(args.rank)
    parallel_state.set_custom_all_reduce(False)  # nothing here is all-reduced
    rows: list[bench.Row] = []
    with ranks.tensor_parallel(args.rank, RANKS, args.rendezvous) as group, torch.inference_mode():
        for vocab in args.vocab:
            wrong = [
                line
                for v in (vocab, vocab - 20)
                for batch in {1, args.batch[-1]}
                for line in check_constructed(v, batch, args.rank, device)
            ]
            head = random_head(vocab, args.hidden, args.rank, device)
            inputs = {}
            for batch in args.batch:
                inputs[batch], found = check_random(head, batch, group)
                wrong += found
            if failed := [line for lines in together(group, wrong) for line in lines]:
                raise SystemExit("\n".join(["nothing is measured:", *failed]))
            if args.rank == 0:
                print(f"vocabulary {vocab}: tokens equal, {len(head.weight)} rows of {args.hidden} a rank", flush=True)
            wins = {}
            for batch in args.batch:
                samples = measure(head, inputs[batch], group, args.rounds)
                p20, p50, p80 = (dict(zip(samples, p, strict=True)) for p in zip(*map(bench.percentiles, samples.values()), strict=True))
                wins[batch] = p80[OURS] < p20[STOCK]
                if args.rank == 0:
                    nbytes = 2 * args.hidden * (len(head.weight) + batch) + 8 * batch
                    case = f"top_tokens B={batch} vocab={vocab} hidden={args.hidden} TP={RANKS}"
                    rows += [bench.row("mtp-spec", name, case, us, nbytes, 0.0) for name, us in samples.items()]
                    ratio = p50[STOCK] / p50[OURS]
                    print(f"{case:52s} {STOCK} {p50[STOCK]:8.2f} us  {OURS} {p50[OURS]:8.2f} us  {ratio:.3f}", flush=True)
            if args.rank == 0:
                print(f"{LOCAL_ARGMAX}={threshold(wins)} with vocabulary {vocab}: from there on its p80 is below stock's p20", flush=True)
                gpu = bench.gpu_name().removeprefix("NVIDIA ").split()[0].lower()
                bench.write_csv(args.out / f"{gpu}-top-tokens.csv", rows)
        torch.distributed.barrier(group=group.cpu_group)
        sys.stdout.flush()
        os._exit(0)  # without a teardown of the communicators, which could wait for the other rank


def start(argv: Sequence[str], timeout: float) -> int:
    """Both ranks, killed together where one fails or the time is over.

    Returns:
        0; 1 where a rank failed; 124 after `timeout` seconds.
    """
    command = [sys.executable, __file__, *argv, "--rendezvous", ranks.rendezvous(), "--rank"]
    with tempfile.TemporaryFile("w+") as log:
        with workers.killed_at_end() as processes:
            for i, out in enumerate((None, log)):  # the first rank's is ours
                environ = os.environ | ranks.NO_MULTICAST
                processes.append(subprocess.Popen([*command, str(i)], env=environ, stdout=out, stderr=out, start_new_session=True))
            codes = workers.wait(processes, timeout)
        if codes == [0, 0]:
            return 0
        log.seek(0)
        print(f"exit status of the ranks (None: killed): {codes}\nthe second rank's output:\n{log.read()[-4000:]}", file=sys.stderr)
        return 1 if any(codes) else 124


def main() -> int:
    def numbers(text: str) -> list[int]:
        return sorted({int(x) for x in text.split(",")})

    vocabs = f"{RANKS * GLM52.vocab_size},{8 * GLM52.vocab_size}"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=numbers, default=vocabs, help=f"comma-separated, of both ranks together (default {vocabs})")
    parser.add_argument("--batch", type=numbers, default="1,4,16,64", help="comma-separated (default 1,4,16,64)")
    parser.add_argument("--hidden", type=int, default=GLM52.hidden_size)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which both ranks are killed (default 300)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args)
        return 0
    if torch.cuda.is_available() and torch.cuda.device_count() < RANKS:
        parser.error(f"expected {RANKS} GPUs, got {torch.cuda.device_count()}")
    return start(sys.argv[1:], args.timeout)


if __name__ == "__main__":
    sys.exit(main())
