"""``lldecode ablate --engine vllm``: each combination of features in its own process, through vLLM's offline engine.

The parent decides which features can run (``lldecode doctor``), starts one worker a combination with every flag set
explicitly, and compares what the workers report. A worker is ``python -m lldecode.ablate_vllm SPEC DIR``: SPEC is a JSON
object, DIR as :mod:`lldecode.workers` says.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from lldecode import bench, flags, registry, workers
from lldecode.ablate import (
    FeatureNote,
    Report,
    Result,
    Verdict,
    batches,
    check_directory,
    choose,
    combinations,
    positive,
    progress,
    result,
    versions,
)

WORKER = (sys.executable, "-m", "lldecode.ablate_vllm")
DOCTOR = (sys.executable, "-c", "import sys; from lldecode.cli import main; sys.exit(main(['doctor', '--json']))")
GPU_MEMORY = 0.9
"""Share of a GPU's memory that engines which start together have between them; vLLM's default for one."""

FIRST_TOKENS = 16
"""Tokens that each request decodes before anything is timed, and the shorter of the two generations of a profile."""

ABSORBED = {"W_UK_T": -1, "W_UV": -2}
"""MLA's absorbed weights, and the dimension that holds the latent."""

SHARDED = {"ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"}
"""vLLM's layers of which a tensor-parallel rank holds a share, as it does of the experts' weights."""

BUSY = "any kernel"
"""Beside the kernels of a profile: how long at least one of them ran, since they overlap."""

NOISE_MARGIN = 2.0
"""A token may differ from stock's where stock's own top-2 margin is at most this many times the largest at which stock differs from itself.

Stock differs from itself where it decodes the same prompt in a batch of another size: cuBLAS and vLLM then choose other kernels. It decodes
every prompt so in several sizes, since the largest margin of a few pairs says little about more. Where it never differs, the largest margin
is the median change of a chosen token's log-probability.
"""

TYPICAL_MARGIN = 3.0
"""The median change of a chosen token's log-probability may be this many times the median of stock's own noise.

That noise is the change between batches of two sizes. It has a long tail, since another expert is chosen where two score the same; what is
off everywhere moves the median. Logits in bf16 move by steps, so the median jumps from almost nothing to a step where half of them have
moved: noise counts as one step at least.
"""

LEAST_POSITIONS = 32
"""Fewer tokens before the first difference say nothing about the median."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What every worker runs.

    Attributes:
        llm: keyword arguments of ``vllm.LLM``.
        profile: kernels to report, 0 for no profile.
        trace: file that receives the timeline of a profile, or None.
        noise: decode what :func:`own_noise` needs beside the batches.
    """

    batches: list[int]
    input_len: int
    output_len: int
    rounds: int
    profile: int
    trace: str | None
    llm: dict[str, Any]
    noise: bool = False


def prepare(args: argparse.Namespace) -> Callable[[], Report]:
    """Validate the options; the returned function measures.

    Raises:
        ValueError: bad input.
    """
    if not args.model:
        raise ValueError("--model: expected a path or model id with --engine vllm")
    if not bench.version_of("vllm"):
        raise ValueError("--engine vllm: vllm is not installed")
    sizes = batches(args.batch)
    input_len, output_len = positive("input-len", args.input_len, 1024), positive("output-len", args.output_len, 128)
    rounds = positive("rounds", args.rounds, 5)
    engine_args = _engine_args(args.engine_args)
    # The first request decodes while the others prefill, at least 1024 prompt tokens a step; with speculation one may outrun the mean.
    steps = FIRST_TOKENS + rounds * output_len + sizes[-1] * (2 + input_len // 1024)
    drafts = int((engine_args.get("speculative_config") or {}).get("num_speculative_tokens") or 0)
    room = input_len + steps * (1 + drafts)
    if drafts:  # vLLM rounds block tables up to 128 tokens, and with MTP its indexer fails on SM90 where that is a block more
        room = -(-room // 128) * 128
    llm: dict[str, Any] = {
        "model": args.model,
        "load_format": args.load_format or "auto",
        "tensor_parallel_size": positive("tensor-parallel-size", args.tensor_parallel_size, 1),
        "max_model_len": positive("max-model-len", args.max_model_len, room),
        "max_num_seqs": sizes[-1],
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    gpus = [gpu.strip() for gpu in (args.gpus or "").split(",") if gpu.strip()]
    at_once = positive("at-once", args.at_once, 1)
    if (share := memory_share(at_once, gpus)) < GPU_MEMORY:
        llm["gpu_memory_utilization"] = share  # an engine does not start where this is not free
    llm |= engine_args
    profile = positive("profile", args.profile, 0)
    if args.trace is not None:
        if not profile:
            raise ValueError("--trace: expected --profile beside it")
        check_directory("trace", args.trace)
    spec = Spec(sizes, input_len, output_len, rounds, profile, None, llm)
    wanted, environ = choose(args.features)
    if gpus and llm["tensor_parallel_size"] > 1:
        raise ValueError("--gpus: not with --tensor-parallel-size: set CUDA_VISIBLE_DEVICES")
    labels = None if args.only is None else {"none", *(label.strip() for label in args.only.split(","))}
    if unknown := sorted((labels or set()) - (known := combinations(wanted)).keys()):
        raise ValueError(f"--only: expected some of {', '.join(known)}, got {unknown[0]!r}")
    timeout = positive("timeout", args.timeout, 1800)
    options = {"at_once": at_once, "gpus": gpus, "only": labels, "timeout": timeout, "trace": args.trace}
    return lambda: measure(spec, wanted, environ, **options, quiet=args.json)


def memory_share(at_once: int, gpus: Sequence[str]) -> float:
    """What of a GPU's memory each of `at_once` engines gets where they take `gpus` in turn; none named is the one that is visible."""
    on = collections.Counter(itertools.islice(itertools.cycle(gpus or [""]), at_once))
    return round(GPU_MEMORY / max(on.values()), 3)


def _engine_args(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as e:
        raise ValueError(f"--engine-args: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"--engine-args: expected a JSON object, got {text!r}")
    return value


def measure(
    spec: Spec,
    wanted: Sequence[str],
    environ: Mapping[str, str],
    *,
    at_once: int = 1,
    gpus: Sequence[str] = (),
    only: Collection[str] | None = None,
    timeout: float = 1800,
    trace: str | None = None,
    quiet: bool = True,
) -> Report:
    """Run the ablation, `at_once` workers starting together, each on one of `gpus` in turn; no worker outlives it.

    Args:
        only: labels of the combinations to run, ``none`` among them; None for all.
        timeout: seconds, see :func:`lldecode.workers.run`.
        trace: directory that receives each combination's timeline.
    """
    notes = _survey(wanted, environ)
    measured = [name for name, note in notes.items() if note.state == "measured"]
    combos = {label: chosen for label, chosen in combinations(measured).items() if only is None or label in only}
    installed = sorted(registry.entry_points())
    environs = {combo: worker_environ(environ, installed, chosen) for combo, chosen in combos.items()}
    if gpus:
        environs = {c: e | {"CUDA_VISIBLE_DEVICES": gpu} for (c, e), gpu in zip(environs.items(), itertools.cycle(gpus), strict=False)}
    commands = {}
    for combo, its_environ in environs.items():
        to = trace and str(pathlib.Path(trace, f"{combo.replace(' ', '-')}.json.gz").absolute())
        its_spec = dataclasses.replace(spec, trace=to, noise=combo == "none")
        commands[combo] = [*WORKER, json.dumps(dataclasses.asdict(its_spec))], its_environ
    found: dict[str, workers.Outcome] = {}
    names = list(combos)
    with progress(2 * len(names), quiet) as step:
        try:
            for i in range(0, len(names), at_once):
                workers.run({name: commands[name] for name in names[i : i + at_once]}, step, found, timeout)
        except KeyboardInterrupt:
            if "none" not in found:
                raise
    interrupted = len(found) < len(names)
    outcomes: dict[str, dict[str, Any] | str] = dict.fromkeys(names, "interrupted before it was measured")
    outcomes |= {name: o.report if o.failure is None else o.failure for name, o in found.items()}
    for name in notes:
        counts: collections.Counter[str] = collections.Counter()
        for outcome in outcomes.values():
            if isinstance(outcome, dict):
                counts.update(outcome["state"]["declined"].get(name, {}))
        notes[name] = dataclasses.replace(notes[name], declined=dict(counts))
    stock = outcomes["none"]
    noise = Noise() if isinstance(stock, str) else own_noise(stock)
    results = [_row(combo, chosen, size, outcomes[combo], stock, noise) for size in spec.batches for combo, chosen in combos.items()]
    skipped = Verdict(False, "not run: a feature of it was skipped, or it is another combination without that one")
    missing = sorted(set(only or ()) - combos.keys())
    results += [result(label, frozenset(), size, None, None, skipped) for label in missing for size in spec.batches]
    done = {combo: o for combo, o in outcomes.items() if isinstance(o, dict)}
    return Report(
        engine="vllm",
        model=str(spec.llm["model"]),
        unit="µs a token",
        note="",
        gpu=next((o["gpu"] for o in done.values()), "unknown"),
        parameters={
            "input_len": spec.input_len,
            "output_len": spec.output_len,
            "rounds": spec.rounds,
            "noise": dataclasses.asdict(noise),
            "llm": spec.llm,
        },
        versions=versions(),
        utc=bench.utc(),
        features=list(notes.values()),
        results=results,
        ok=all(r.ok for r in results),
        kernels={combo: o["kernels"] for combo, o in done.items() if o["kernels"]},
        interrupted=interrupted,
    )


def _survey(wanted: Sequence[str], environ: Mapping[str, str]) -> dict[str, FeatureNote]:
    """What ``lldecode doctor`` says of each feature, asked in another process: this one must not hold a CUDA context."""
    out = subprocess.run(DOCTOR, env=dict(environ), stdout=subprocess.PIPE, text=True, check=False)
    if not out.stdout:
        raise RuntimeError(f"lldecode doctor failed: exit status {out.returncode}")
    found = {f["name"]: f for f in json.loads(out.stdout)["features"]}
    notes = {}
    for name in wanted:
        f = found[name]
        measured = f["state"] == "on"
        notes[name] = FeatureNote(name, f["version"], "measured" if measured else "skipped", "" if measured else f["reason"] or f["state"])
    return notes


def worker_environ(environ: Mapping[str, str], installed: Sequence[str], chosen: frozenset[str]) -> dict[str, str]:
    """The environment of one combination: the chosen features ``on``, the others as if they were not installed, and no other flag."""
    ours = {"LLDECODE_FEATURES", "LLDECODE_CONFIG", *map(flags.env_name, installed)}
    return {k: v for k, v in environ.items() if k not in ours} | {
        "LLDECODE_OFF": ",".join(name for name in installed if name not in chosen),
        **{flags.env_name(name): "on" for name in chosen},
    }


@dataclasses.dataclass(frozen=True)
class Noise:
    """Stock's own between batches of two sizes, in nats; 0 where no prompt was decoded twice.

    Attributes:
        margin: the largest top-2 margin at which it chose another token.
        typical: the median change of a chosen token's log-probability.
        step: the resolution of logits, see :func:`_step`.
    """

    margin: float = 0.0
    typical: float = 0.0
    step: float = 0.0


def own_noise(stock: Mapping[str, Any]) -> Noise:
    """Over positions with equal prefixes, of each two runs of a prompt.

    Args:
        stock: its report: runs by batch size under ``batches``, and :func:`decode_again`'s under ``again``, which may be missing.
    """
    by_prompt: dict[int, list[Mapping[str, Any]]] = {}
    for size in stock["batches"].values():
        for i, prompt in enumerate(size["prompts"]):
            by_prompt.setdefault(i, []).append(prompt)
    for name, runs in stock.get("again", {}).items():
        by_prompt[int(name)] += runs
    pairs = [pair for runs in by_prompt.values() for pair in itertools.combinations(runs, 2)]
    changes = [x for pair in pairs for x in _changes(*pair)]
    if not changes:
        return Noise()
    typical = statistics.median(changes)
    flips = [a["margins"][at] for a, b in pairs if (at := _common(a["tokens"], b["tokens"])) < len(a["tokens"])]
    margins = [margin for runs in by_prompt.values() for run in runs for margin in run["margins"]]
    return Noise(max(flips, default=typical), typical, _step(margins))


def _step(margins: Iterable[float]) -> float:
    """The power of two, 2^-10 to 2^-3, that most top-2 margins are multiples of, as they are where logits are in bf16; else 0.

    The lower quartile of what divides each: of half of them that is the step itself, and few are on a finer one.
    """

    def divisor(margin: float) -> float:
        n = round(margin * 1024)
        return min(n & -n, 128) / 1024 if abs(margin - n / 1024) < 2e-5 else 0.0

    divisors = sorted(divisor(margin) for margin in margins if margin > 1e-4)
    return divisors[len(divisors) // 4] if divisors else 0.0


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[float]:
    """Of the log-probabilities, before the first different token."""
    n = _common(a["tokens"], b["tokens"])
    return [abs(x - y) for x, y in zip(a["logprobs"][:n], b["logprobs"][:n], strict=True)]


def compare(stock: Sequence[Mapping[str, Any]], got: Sequence[Mapping[str, Any]], noise: Noise) -> Verdict:
    """Hold the greedy tokens of each prompt against stock's; see :data:`NOISE_MARGIN` and :data:`TYPICAL_MARGIN`.

    Returns:
        The median change of a log-probability before the first difference and the bound on it (None without noise to hold it against);
        in the note the position of each prompt's first difference.
    """
    ok, notes = True, []
    for i, (want, have) in enumerate(zip(stock, got, strict=True)):
        at = _common(want["tokens"], have["tokens"])
        if at < len(want["tokens"]):
            margin = want["margins"][at]
            excused = margin <= NOISE_MARGIN * noise.margin
            ok = ok and excused
            notes.append(f"prompt {i} differs at token {at}, stock's margin {margin:.2g}{' is noise' if excused else ''}")
    changes = [x for pair in zip(stock, got, strict=True) for x in _changes(*pair)]
    typical = statistics.median(changes) if changes else 0.0
    own = max(noise.typical, noise.step)
    bound = TYPICAL_MARGIN * own if own and len(changes) >= LEAST_POSITIONS else None
    if bound is not None and typical > bound:
        ok = False
        notes.append(f"log-probabilities change by {typical:.2g} in the median, stock's own noise {own:.2g}")
    return Verdict(ok, "; ".join(notes) or "tokens equal", typical, bound)


def _row(
    combo: str,
    chosen: frozenset[str],
    size: int,
    outcome: dict[str, Any] | str,
    stock: dict[str, Any] | str,
    noise: Noise,
) -> Result:
    if isinstance(outcome, str):
        return result(combo, chosen, size, None, None, Verdict(False, outcome))
    applied = frozenset(outcome["state"]["applied"] or ())
    mine = outcome["batches"][str(size)]
    if outcome["state"]["applied"] is None:
        verdict = Verdict(False, "lldecode's plugin did not run in the engine's process")
    elif applied != chosen:
        verdict = Verdict(False, f"applied: expected {sorted(chosen)}, got {sorted(applied)}")
    elif isinstance(stock, str):
        verdict = Verdict(True, "not compared: stock failed")
    else:
        verdict = compare(stock["batches"][str(size)]["prompts"], mine["prompts"], noise)
    base = None if isinstance(stock, str) else stock["batches"][str(size)]["us"]
    return result(combo, chosen, size, mine["us"] if applied == chosen else None, base, verdict)


class WorkerExtension:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), called through ``LLM.collective_rpc``."""

    def lldecode_state(self) -> dict[str, Any]:
        """Features applied in the worker's process and their fingerprint (None where the plugin did not run), and what they declined."""
        from lldecode import feature, plugin

        active = plugin.active()
        applied = None if active is None else sorted(s.name for s in active.statuses if s.state == "on")
        return {"applied": applied, "fingerprint": active and active.fingerprint, "declined": feature.declined()}

    def lldecode_profile_start(self) -> None:
        import torch

        self.lldecode_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.lldecode_profiler.start()

    def lldecode_profile_stop(self, trace: str | None = None) -> dict[str, tuple[int, float]]:
        """By kernel: launches, and GPU time in microseconds; under :data:`BUSY` the time in which any ran. Rank 0 writes the `trace`."""
        import torch

        torch.cuda.synchronize()
        self.lldecode_profiler.stop()
        if trace and self.rank == 0:  # type: ignore[attr-defined]
            self.lldecode_profiler.export_chrome_trace(trace)
        events = [e for e in self.lldecode_profiler.events() if e.device_type.name == "CUDA"]
        out: dict[str, tuple[int, float]] = {}
        for event in events:
            n, us = out.get(event.name, (0, 0.0))
            out[event.name] = (n + 1, us + event.device_time)
        return out | {BUSY: (len(events), union((e.time_range.start, e.time_range.end) for e in events))}

    def lldecode_spread(self) -> None:
        spread(self.get_model(), self.rank)  # type: ignore[attr-defined]


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what the intervals (start, end) cover together."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def spread(model: Any, rank: int = 0) -> None:
    """Scale dummy weights in place so that a token depends on every layer: norms to 1, matrices to keep the variance.

    vLLM draws them from +-1e-3, norms included. A layer's output is then lost in the rounding of the residual stream: tokens agree
    whatever a kernel computed, and those of a batch are routed to the same few experts. It draws the same for each weight of a shape and
    for each `rank`: so that the ranks' shares differ, they are rolled by it, and so that a model of few layers does not just repeat its
    last token, the LM head is not the embedding.
    """
    import torch

    def to(x: torch.Tensor, std: float, shift: int) -> None:
        x.mul_(std / x.flatten()[: 1 << 20].float().std().item())
        if shift:
            x.copy_(x.roll(shift, -1))

    def is_share(owner: Any, kind: str) -> bool:
        kinds = {c.__name__ for c in type(owner).__mro__}
        return kind in ("w13_weight", "w2_weight") or (getattr(owner, "tp_size", 1) > 1 and not SHARDED.isdisjoint(kinds))

    with torch.no_grad():
        for name, x in model.named_parameters():
            path, _, kind = name.rpartition(".")
            owner = model.get_submodule(path)
            if x.ndim == 1 and kind == "weight":
                x.fill_(1)
            elif x.ndim > 1 and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and kind not in ABSORBED:
                layer, width = type(owner).__name__, x.shape[-1]
                std = 1.0 if layer in ("Embedding", "VocabParallelEmbedding") else width**-0.5
                shift = rank if is_share(owner, kind) else 0
                to(x, std, shift + width // 2 if layer == "ParallelLMHead" else shift)
        for module in model.modules():
            for kind, dimension in ABSORBED.items():  # made of kv_b_proj when the weights were loaded
                if (x := getattr(module, kind, None)) is not None:
                    to(x.detach(), x.shape[dimension] ** -0.5, rank)


def work(spec: Spec, started: Callable[[], object]) -> dict[str, Any]:
    """The worker: everything that one combination's process measures, once `started`, called with the engine up, returns.

    Raises:
        RuntimeError: the ranks have different features, or a request ended before it was measured.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(**spec.llm, worker_extension_cls="lldecode.ablate_vllm.WorkerExtension")
    started()
    rng = random.Random(0)
    config = llm.llm_engine.model_config
    vocabulary = config.get_vocab_size()
    prompts = [{"prompt_token_ids": [rng.randrange(vocabulary) for _ in range(spec.input_len)]} for _ in range(spec.batches[-1])]

    def generate(size: int, tokens: int, logprobs: int | None = None, first: int = 0) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
        return llm.generate(prompts[first : first + size], params, use_tqdm=False)

    if spec.llm.get("load_format") == "dummy":
        llm.collective_rpc("lldecode_spread")
        llm.reset_prefix_cache()
    short, long = FIRST_TOKENS, FIRST_TOKENS + spec.output_len
    measured: dict[str, dict[str, Any]] = {}
    for size in spec.batches:
        generate(size, short)  # what compiles at its first use is not timed
        measured[str(size)] = {"us": decode(llm.llm_engine, prompts[:size], config.max_model_len, spec.rounds, spec.output_len)}
    kernels = []
    if spec.profile:
        size = spec.batches[0]
        before = _profile(llm, functools.partial(generate, size, short), spec.trace)
        after = _profile(llm, functools.partial(generate, size, long), None)
        kernels = top_kernels(before, after, spec.output_len, spec.profile)

    def greedy(part: range) -> list[dict[str, Any]]:
        return [greedy_output(o.outputs[0]) for o in generate(len(part), long, logprobs=2, first=part.start)]

    for size in spec.batches:
        measured[str(size)]["prompts"] = greedy(range(size))
    again = decode_again(spec.batches, greedy) if spec.noise else {}
    state = _agreed(llm.collective_rpc("lldecode_state"))
    return {"batches": measured, "again": again, "state": state, "kernels": kernels, "gpu": bench.gpu_name()}


def decode_again(sizes: Sequence[int], greedy: Callable[[range], list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """What `greedy` gives, by prompt, for the prompts of the largest of the ascending batch sizes in halves and in quarters.

    What was decoded in a batch of that size, because `sizes` has it or another part, is left out: a prompt differs from itself only in a
    batch of another size.
    """
    out: dict[str, list[dict[str, Any]]] = {}
    largest = sizes[-1]
    decoded = {i: {size for size in sizes if i < size} for i in range(largest)}
    for size in (-(-largest // 2), -(-largest // 4)):
        for first in range(0, largest, size):
            part = range(first, min(first + size, largest))
            new = [i for i in part if len(part) not in decoded[i]]
            outputs = dict(zip(part, greedy(part), strict=True)) if new else {}
            for i in new:
                decoded[i].add(len(part))
                out.setdefault(str(i), []).append(outputs[i])
    return out


def decode(engine: Any, prompts: Sequence[Any], max_model_len: int, rounds: int, output_len: int) -> list[float]:
    """Time of a decoded token while every request decodes: no prefill is in it.

    Args:
        engine: vLLM's ``LLMEngine``.
        prompts: one request each, as ``{"prompt_token_ids": ...}``.
        rounds: stretches of the same generation, one after the other.
        output_len: tokens of each request in a stretch, in the mean over requests.

    Returns:
        Microseconds a token of a request, one figure for each round.

    Raises:
        RuntimeError: a request reached `max_model_len` before the last round ended.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ids = [f"lldecode-{i}" for i in range(len(prompts))]
    for name, prompt in zip(ids, prompts, strict=True):
        params = SamplingParams(
            temperature=0,
            max_tokens=max_model_len - len(prompt["prompt_token_ids"]),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(name, {"type": "token", **prompt}, params)
    decoded = dict.fromkeys(ids, 0)
    marks: list[tuple[float, int]] = []
    while len(marks) <= rounds:
        ended = False
        for out in engine.step():
            decoded[out.request_id] += len(out.outputs[0].token_ids)
            ended = ended or out.finished
        now, total = time.perf_counter(), sum(decoded.values())
        if total >= marks[-1][1] + output_len * len(prompts) if marks else min(decoded.values()) >= FIRST_TOKENS:
            marks.append((now, total))
        if ended and len(marks) <= rounds:
            raise RuntimeError(f"max-model-len: expected room for {rounds} rounds of {output_len} tokens, got {max_model_len}")
    engine.abort_request(ids)
    return [(t1 - t0) * 1e6 * len(prompts) / (n1 - n0) for (t0, n0), (t1, n1) in itertools.pairwise(marks)]


def _agreed(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all ranks, `declined` as the first one counts it."""
    first = {k: v for k, v in states[0].items() if k != "declined"}
    for rank, state in enumerate(states):
        if (own := {k: state[k] for k in first}) != first:
            raise RuntimeError(f"features of rank {rank}: expected those of rank 0, {first}, got {own}")
    return dict(states[0])


def greedy_output(output: Any) -> dict[str, Any]:
    """Tokens of one completion, the log-probability of each, and by how much it beat the runner-up."""
    tokens = [int(t) for t in output.token_ids]
    chosen, margins = [], []
    for token, found in zip(tokens, output.logprobs, strict=True):
        best = sorted((x.logprob for x in found.values()), reverse=True)
        chosen.append(found[token].logprob)
        margins.append(best[0] - best[1])
    return {"tokens": tokens, "logprobs": chosen, "margins": margins}


def _profile(llm: Any, call: Callable[[], object], trace: str | None) -> Mapping[str, tuple[int, float]]:
    call()
    llm.collective_rpc("lldecode_profile_start")
    call()
    return llm.collective_rpc("lldecode_profile_stop", args=(trace,))[0]


def top_kernels(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], tokens: int, limit: int
) -> list[dict[str, Any]]:
    """Per decoded token, from the difference of a shorter and a longer generation.

    Returns:
        The kernels with the most GPU time, then their sum over all kernels, then :data:`BUSY`.
    """
    per_token: dict[str, tuple[float, float]] = {}
    for name, (launches, us) in after.items():
        n, t = before.get(name, (0, 0.0))
        per_token[name] = ((launches - n) / tokens, (us - t) / tokens)
    busy = per_token.pop(BUSY)
    top = sorted(per_token, key=lambda name: -per_token[name][1])[:limit]
    launches, us = (sum(column) for column in zip(*per_token.values(), strict=True))
    rows = [(name, *per_token[name]) for name in top] + [("all kernels", launches, us), (BUSY, *busy)]
    return [{"kernel": name, "launches": launches, "us": us} for name, launches, us in rows]


def main(argv: Sequence[str]) -> None:
    spec, directory = argv
    started, report = workers.worker(directory)
    report(work(Spec(**json.loads(spec)), started))


if __name__ == "__main__":
    main(sys.argv[1:])
