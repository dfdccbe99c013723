"""``lldecode ablate --engine vllm``: each combination of features in its own process, through vLLM's offline engine.

The parent decides which features can run (``lldecode doctor``), starts one worker a combination with every flag set
explicitly, and compares what the workers report. A worker is ``python -m lldecode.ablate_vllm SPEC DIR``: SPEC is a JSON
object; the file ``ready`` in DIR says that its engine has started, it measures when it reads a line from stdin, and the file
``result`` receives one JSON line. So workers can start together, and each still measures alone.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lldecode import bench, flags, registry
from lldecode.ablate import (
    FeatureNote,
    Report,
    Result,
    Verdict,
    batches,
    choose,
    combinations,
    positive,
    progress,
    result,
    versions,
)

WORKER = (sys.executable, "-m", "lldecode.ablate_vllm")
DOCTOR = (sys.executable, "-c", "import sys; from lldecode.cli import main; sys.exit(main(['doctor', '--json']))")
LOG_TAIL = 15
"""Lines of a failed worker's log that are reported."""

FIRST_TOKENS = 16
"""Length of the shorter of the two generations whose difference is the time of a decoded token."""

_PR_SET_PDEATHSIG = 1

ABSORBED = {"W_UK_T": -1, "W_UV": -2}
"""MLA's absorbed weights, and the dimension that holds the latent."""

BUSY = "any kernel"
"""Beside the kernels of a profile: how long at least one of them ran, since they overlap."""

NOISE_MARGIN = 2.0
"""A token may differ from stock's where stock's own top-2 margin is at most this many times stock's own noise.

That noise is the largest change of a chosen token's log-probability when stock decodes the same prompt at another batch size.
"""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What every worker runs.

    Attributes:
        llm: keyword arguments of ``vllm.LLM``.
        profile: kernels to report, 0 for no profile.
    """

    batches: list[int]
    input_len: int
    output_len: int
    rounds: int
    profile: int
    llm: dict[str, Any]


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
    llm: dict[str, Any] = {
        "model": args.model,
        "load_format": args.load_format or "auto",
        "tensor_parallel_size": positive("tensor-parallel-size", args.tensor_parallel_size, 1),
        "max_model_len": positive("max-model-len", args.max_model_len, input_len + FIRST_TOKENS + output_len),
        "max_num_seqs": sizes[-1],
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    llm |= _engine_args(args.engine_args)
    spec = Spec(sizes, input_len, output_len, positive("rounds", args.rounds, 5), positive("profile", args.profile, 0), llm)
    at_once = positive("at-once", args.at_once, 1)
    wanted, environ = choose(args.features)
    return lambda: measure(spec, wanted, environ, at_once=at_once, quiet=args.json)


def _engine_args(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as e:
        raise ValueError(f"--engine-args: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"--engine-args: expected a JSON object, got {text!r}")
    return value


def measure(spec: Spec, wanted: Sequence[str], environ: Mapping[str, str], *, at_once: int = 1, quiet: bool = True) -> Report:
    """Run the ablation, `at_once` workers starting together; no worker outlives it."""
    notes = _survey(wanted, environ)
    measured = [name for name, note in notes.items() if note.state == "measured"]
    combos = combinations(measured)
    installed = sorted(registry.entry_points())
    environs = {combo: worker_environ(environ, installed, chosen) for combo, chosen in combos.items()}
    outcomes: dict[str, dict[str, Any] | str] = {}
    names = list(combos)
    with progress(2 * len(names), quiet) as step:
        for i in range(0, len(names), at_once):
            outcomes |= run_workers(spec, {name: environs[name] for name in names[i : i + at_once]}, step)
    for name in notes:
        counts: collections.Counter[str] = collections.Counter()
        for outcome in outcomes.values():
            if isinstance(outcome, dict):
                counts.update(outcome["state"]["declined"].get(name, {}))
        notes[name] = dataclasses.replace(notes[name], declined=dict(counts))
    stock = outcomes["none"]
    noise = 0.0 if isinstance(stock, str) else own_noise(stock)
    results = [_row(combo, chosen, size, outcomes[combo], stock, noise) for size in spec.batches for combo, chosen in combos.items()]
    done = {combo: o for combo, o in outcomes.items() if isinstance(o, dict)}
    return Report(
        engine="vllm",
        model=str(spec.llm["model"]),
        unit="µs a token",
        note="",
        gpu=next((o["gpu"] for o in done.values()), "unknown"),
        parameters={"input_len": spec.input_len, "output_len": spec.output_len, "rounds": spec.rounds, "llm": spec.llm},
        versions=versions(),
        utc=bench.utc(),
        features=list(notes.values()),
        results=results,
        ok=all(r.ok for r in results),
        kernels={combo: o["kernels"] for combo, o in done.items() if o["kernels"]},
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


def run_workers(spec: Spec, environs: Mapping[str, Mapping[str, str]], step: Callable[[str], None]) -> dict[str, dict[str, Any] | str]:
    """Start one worker for each environment, and when all have started let one after the other measure.

    Returns:
        By name, what the worker reported, or why it reported nothing, with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="lldecode-ablate-") as tmp, contextlib.ExitStack() as ending:
        workers: dict[str, subprocess.Popen[bytes]] = {}
        for i, (name, environ) in enumerate(environs.items()):
            step(f"starting {name}")
            directory = pathlib.Path(tmp, str(i))
            directory.mkdir()
            command = [*WORKER, json.dumps(dataclasses.asdict(spec)), str(directory)]
            with (directory / "log").open("wb") as log:
                workers[name] = subprocess.Popen(
                    command, env=dict(environ), stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            ending.callback(_end, workers[name])
        directories = {name: pathlib.Path(tmp, str(i)) for i, name in enumerate(environs)}
        while any(w.poll() is None and not (directories[name] / "ready").exists() for name, w in workers.items()):
            time.sleep(0.2)
        outcomes = {}
        for name, worker in workers.items():
            step(f"measuring {name}")
            worker.communicate(b"\n")
            outcomes[name] = _outcome(worker.returncode, directories[name])
            _end(worker)  # what it leaves behind would hold the GPU's memory
        return outcomes


def _outcome(code: int, directory: pathlib.Path) -> dict[str, Any] | str:
    out = directory / "result"
    text = out.read_text() if out.is_file() else ""
    if code == 0 and text:
        return json.loads(text)
    why = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    tail = "\n".join((directory / "log").read_text(errors="replace").splitlines()[-LOG_TAIL:])
    return f"worker failed: {why}\n{tail}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the worker and whatever it started: it leads its own process group."""
    try:
        os.killpg(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def own_noise(stock: Mapping[str, Any]) -> float:
    """Largest change, in nats, of a chosen token's log-probability between batch sizes, over positions with equal prefixes."""
    by_prompt: dict[int, list[Mapping[str, Any]]] = {}
    for size in stock["batches"].values():
        for i, prompt in enumerate(size["prompts"]):
            by_prompt.setdefault(i, []).append(prompt)
    return max((_deviation(runs[0], other) for runs in by_prompt.values() for other in runs[1:]), default=0.0)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _deviation(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    n = _common(a["tokens"], b["tokens"])
    return max((abs(x - y) for x, y in zip(a["logprobs"][:n], b["logprobs"][:n], strict=True)), default=0.0)


def compare(stock: Sequence[Mapping[str, Any]], got: Sequence[Mapping[str, Any]], noise: float) -> Verdict:
    """Hold the greedy tokens of each prompt against stock's; see :data:`NOISE_MARGIN`.

    Returns:
        The largest log-probability deviation before the first difference, the bound on stock's margin at a difference,
        and in the note the position of each prompt's first difference.
    """
    bound = NOISE_MARGIN * noise
    ok, differences = True, []
    for i, (want, have) in enumerate(zip(stock, got, strict=True)):
        at = _common(want["tokens"], have["tokens"])
        if at < len(want["tokens"]):
            margin = want["margins"][at]
            excused = margin <= bound
            ok = ok and excused
            differences.append(f"prompt {i} differs at token {at}, stock's margin {margin:.2g}{' is noise' if excused else ''}")
    err = max((_deviation(*pair) for pair in zip(stock, got, strict=True)), default=0.0)
    return Verdict(ok, "; ".join(differences) or "tokens equal", err, bound)


def _row(
    combo: str,
    chosen: frozenset[str],
    size: int,
    outcome: dict[str, Any] | str,
    stock: dict[str, Any] | str,
    noise: float,
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
    return result(combo, chosen, size, mine["us"] if verdict.ok else None, base, verdict)


class WorkerExtension:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), called through ``LLM.collective_rpc``."""

    def lldecode_state(self) -> dict[str, Any]:
        """Features applied in the worker's process (None where the plugin did not run), and what they declined."""
        from lldecode import feature, plugin

        active = plugin.active()
        applied = None if active is None else sorted(s.name for s in active.statuses if s.state == "on")
        return {"applied": applied, "declined": feature.declined()}

    def lldecode_profile_start(self) -> None:
        import torch

        self.lldecode_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.lldecode_profiler.start()

    def lldecode_profile_stop(self) -> dict[str, tuple[int, float]]:
        """By kernel: launches, and GPU time in microseconds; under :data:`BUSY` the time in which any ran."""
        import torch

        torch.cuda.synchronize()
        self.lldecode_profiler.stop()
        events = [e for e in self.lldecode_profiler.events() if e.device_type.name == "CUDA"]
        out: dict[str, tuple[int, float]] = {}
        for event in events:
            n, us = out.get(event.name, (0, 0.0))
            out[event.name] = (n + 1, us + event.device_time)
        return out | {BUSY: (len(events), union((e.time_range.start, e.time_range.end) for e in events))}

    def lldecode_spread(self) -> None:
        spread(self.get_model())  # type: ignore[attr-defined]


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what the intervals (start, end) cover together."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def spread(model: Any) -> None:
    """Scale dummy weights in place so that a token depends on every layer: norms to 1, matrices to keep the variance.

    vLLM draws them from +-1e-3, norms included. A layer's output is then lost in the rounding of the residual stream, and tokens agree
    whatever a kernel computed.
    """
    import torch

    def to(x: torch.Tensor, std: float) -> None:
        x.mul_(std / x.flatten()[: 1 << 20].float().std().item())

    with torch.no_grad():
        for name, x in model.named_parameters():
            owner, _, kind = name.rpartition(".")
            if x.ndim == 1 and kind == "weight":
                x.fill_(1)
            elif x.ndim > 1 and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and kind not in ABSORBED:
                embeds = type(model.get_submodule(owner)).__name__ in ("Embedding", "VocabParallelEmbedding")
                to(x, 1.0 if embeds else x.shape[-1] ** -0.5)
        for module in model.modules():
            for kind, dimension in ABSORBED.items():  # made of kv_b_proj when the weights were loaded
                if (x := getattr(module, kind, None)) is not None:
                    to(x.detach(), x.shape[dimension] ** -0.5)


def work(spec: Spec, started: Callable[[], object]) -> dict[str, Any]:
    """The worker: everything that one combination's process measures, once `started`, called with the engine up, returns."""
    from vllm import LLM, SamplingParams

    llm = LLM(**spec.llm, worker_extension_cls="lldecode.ablate_vllm.WorkerExtension")
    started()
    rng = random.Random(0)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = [{"prompt_token_ids": [rng.randrange(vocabulary) for _ in range(spec.input_len)]} for _ in range(spec.batches[-1])]

    def generate(size: int, tokens: int, logprobs: int | None = None) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
        return llm.generate(prompts[:size], params, use_tqdm=False)

    def seconds(size: int, tokens: int) -> float:
        begun = time.perf_counter()
        generate(size, tokens)
        return time.perf_counter() - begun

    short, long = FIRST_TOKENS, FIRST_TOKENS + spec.output_len
    measured: dict[str, dict[str, Any]] = {}
    for size in spec.batches:
        for tokens in (short, long):  # what compiles at its first use is not timed
            generate(size, tokens)
        first = statistics.median(seconds(size, short) for _ in range(spec.rounds))
        measured[str(size)] = {"us": [(seconds(size, long) - first) / spec.output_len * 1e6 for _ in range(spec.rounds)]}
    kernels = []
    if spec.profile:
        size = spec.batches[0]
        before, after = (_profile(llm, functools.partial(generate, size, tokens)) for tokens in (short, long))
        kernels = top_kernels(before, after, spec.output_len, spec.profile)
    if spec.llm.get("load_format") == "dummy":
        llm.collective_rpc("lldecode_spread")
        llm.reset_prefix_cache()
    for size in spec.batches:
        measured[str(size)]["prompts"] = [_greedy(o.outputs[0]) for o in generate(size, long, logprobs=2)]
    state = llm.collective_rpc("lldecode_state")[0]
    return {"batches": measured, "state": state, "kernels": kernels, "gpu": bench.gpu_name()}


def _greedy(output: Any) -> dict[str, Any]:
    """Tokens of one completion, the log-probability of each, and by how much it beat the runner-up."""
    tokens = [int(t) for t in output.token_ids]
    chosen, margins = [], []
    for token, found in zip(tokens, output.logprobs, strict=True):
        best = sorted((x.logprob for x in found.values()), reverse=True)
        chosen.append(found[token].logprob)
        margins.append(best[0] - best[1])
    return {"tokens": tokens, "logprobs": chosen, "margins": margins}


def _profile(llm: Any, call: Callable[[], object]) -> Mapping[str, tuple[int, float]]:
    call()
    llm.collective_rpc("lldecode_profile_start")
    call()
    return llm.collective_rpc("lldecode_profile_stop")[0]


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
    spec, directory = argv[0], pathlib.Path(argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # a parent that is killed must not leave the GPU occupied

    def started() -> None:
        (directory / "ready").touch()
        sys.stdin.readline()

    report = work(Spec(**json.loads(spec)), started)
    (directory / "result").write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
