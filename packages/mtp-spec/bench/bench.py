"""Measure mtp-spec in vLLM 0.26.0's engine: time, launches, tokens and acceptance of a step, each variant in a process of its own.

    python tools/slice_model.py DIR --layers 24
    python packages/mtp-spec/bench/bench.py --model DIR [--at-once 2] [--json FILE] [--csv FILE] [--dry-run]

All variants run the ``deepseek_v32`` class through sm100-routing, with dummy weights and no other feature. ``nospec`` decodes without
drafts, ``off`` is vLLM's own MTP, ``on`` this package, ``unshared`` this package without top-k sharing, which leaves the conversions.

1. Step time, as the engine's client sees it while every request decodes. Draft time: CUDA events around ``propose``.
2. Launches a step of the indexer's and the conversion's kernels, held against the model's config.
3. Greedy tokens of weights that make each depend on every layer, held against ``nospec``'s with ``lldecode ablate``'s margin rule.
4. Acceptance with weights edited in place: see :func:`construct`.

The exit status is 1 where a check fails; the CSV is then not written.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lldecode import bench, registry, workers
from lldecode.ablate_vllm import (
    BUSY,
    Noise,
    WorkerExtension,
    compare,
    decode_again,
    greedy_output,
    memory_share,
    own_noise,
    spread,
    worker_environ,
)

VARIANTS: dict[str, tuple[frozenset[str], dict[str, str]]] = {
    "off": (frozenset({"sm100-routing"}), {}),
    "on": (frozenset({"sm100-routing", "mtp-spec"}), {}),
    "nospec": (frozenset({"sm100-routing"}), {}),
    "unshared": (frozenset({"sm100-routing", "mtp-spec"}), {"LLDECODE_MTP_SPEC_SHARE": "0"}),
}
"""Features that are on, and further environment variables."""

KERNELS = {
    "indexer logits": r"paged_mqa_logits(?!_metadata)",
    "indexer top-k": r"cooperative_topk|persistent_topk_kernel",
    "conversion": r"_convert_req_index_to_global_index_kernel",
}
"""What vLLM 0.26.0 launches once an indexer (the first two) and once a converted top-k in a decoding step on CUDA."""

WARM, PROFILED, SLACK = 10, 16, 64
"""Steps before the timing, steps in a profile, and how many the engine may be ahead of its client."""

BATCHED = 8192
ACCEPTED = 0.85
"""The fraction of tokens after which the constructed draft is right."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What one worker runs: `llm` are ``vllm.LLM``'s arguments, `context` is that of acceptance, `steps` are timed."""

    variant: str
    batches: list[int]
    contexts: list[int]
    steps: int
    tokens: int
    draft_tokens: int
    context: int
    mtp: int
    llm: dict[str, Any]


def own_indexers(config: Mapping[str, Any]) -> int:
    """How many target layers have an indexer of their own, by vLLM 0.26.0's reading of the model's config."""
    layers, pattern = config["num_hidden_layers"], config.get("index_topk_pattern")
    if pattern is not None:
        return sum(pattern[i : i + 1] != "S" for i in range(layers))
    frequency, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    return sum(max(i - offset + 1, 0) % frequency == 0 for i in range(layers))


def expected(config: Mapping[str, Any], variant: str, mtp: int) -> dict[str, int]:
    """Launches a step by the names of :data:`KERNELS`: the target's, and those of `mtp` draft steps of one layer each."""
    own, layers = own_indexers(config), config["num_hidden_layers"]
    drafts = 0 if variant == "nospec" else mtp
    indexers = own + (min(1, drafts) if variant == "on" else drafts)
    return {
        "indexer logits": indexers,
        "indexer top-k": indexers,
        "conversion": (own if variant in ("on", "unshared") else layers) + drafts,
    }


def launches(kernels: Mapping[str, Sequence[float]], steps: int) -> dict[str, float]:
    """Launches a step of each group of :data:`KERNELS`, from launches and time by kernel."""
    return {group: sum(n for name, (n, _) in kernels.items() if re.search(regex, name)) / steps for group, regex in KERNELS.items()}


def z_score(a: Sequence[int], b: Sequence[int]) -> float:
    """Difference of two acceptance rates over its standard error.

    Args:
        a, b: accepted tokens of each proposal: the drafts of one proposal depend on each other, proposals do not.
    """
    difference = statistics.fmean(a) - statistics.fmean(b)
    error = (statistics.variance(a) / len(a) + statistics.variance(b) / len(b)) ** 0.5
    return difference / error if error else 0.0 if difference == 0 else float("inf")


def construct(target: Any, draft: Any, context: int, topk: int) -> dict[str, float]:
    """Edit the weights of both models in place so that the draft agrees with the target where its top-k is the right one.

    The target's layers add nothing to the residual stream and its head says token + 1. The draft starts from the same embedding; its
    attention adds ``(2 * m - v) * u``: `u` is a random direction, `v` the mean over the attended positions of feature 0 of their
    tokens, `m` what `v` is where the indexer takes those `topk` of `context` positions whose feature is largest, as it does whatever
    it is asked. Its size is such that the draft is right after :data:`ACCEPTED` of all tokens; with `topk` other positions
    it is twice as large, and the draft is rarely right; with none it is always right.

    Returns:
        `m`, the size of what is added, and the fraction of a sample of tokens after which the draft is right.
    """
    import torch

    (layer,) = draft.model.layers.values()
    attention, embed, head = layer.mtp_block.self_attn, target.model.embed_tokens.weight, target.lm_head.weight
    if draft.model.embed_tokens is not target.model.embed_tokens or layer.shared_head.head is not target.lm_head:
        raise RuntimeError("draft model: expected the target's embedding and head")
    vocabulary, hidden = target.config.vocab_size, embed.shape[1]
    generator = torch.Generator(embed.device).manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=embed.device, dtype=torch.float32)

    with torch.no_grad():
        kinds = {"o_proj.weight": 0, "down_proj.weight": 0, "w2_weight": 0}
        for name, x in (*target.named_parameters(), *draft.named_parameters()):
            for kind in kinds:
                if name.endswith(kind):
                    kinds[kind] += 1
                    x.zero_()
        if not all(kinds.values()):
            raise RuntimeError(f"weights that write to the residual stream: expected some of each kind, got {kinds}")

        tokens, direction = normal(vocabulary, hidden), normal(hidden)
        tokens[:, 1], direction[:2] = 1, 0  # feature 1 is constant
        embed.zero_()[:vocabulary] = tokens
        head.zero_()[:vocabulary] = embed[:vocabulary].roll(1, 0)
        sample = torch.arange(0, vocabulary, max(1, vocabulary // 2048), device=embed.device)

        def right(size: float) -> float:
            return ((tokens[sample] + size * direction) @ tokens.T).argmax(-1).eq(sample).double().mean().item()

        low, high = 0.0, float(hidden)
        for _ in range(24):
            size = (low + high) / 2
            low, high = (size, high) if right(size) > ACCEPTED else (low, size)
        gauss = statistics.NormalDist()
        m = gauss.pdf(gauss.inv_cdf(1 - topk / context)) * context / topk

        layer.eh_proj.weight.zero_().diagonal().fill_(1)  # the embedding's half
        feature, constant = torch.eye(2, hidden, device=embed.device)
        projection, latent = attention.fused_qkv_a_proj.weight, attention.q_lora_rank
        projection.copy_(normal(*projection.shape) * hidden**-0.5)
        projection[0], projection[latent], projection[latent + 1] = constant, feature, constant
        attention.q_b_proj.weight.zero_()  # every attended position counts the same
        attention.W_UV.zero_()[0, [0, 1], [0, 1]] = 1
        attention.o_proj.weight[:, 0], attention.o_proj.weight[:, 1] = -size / m * direction, 2 * size * direction

        indexer = attention.indexer
        rope, width, keys = indexer.rope_dim, indexer.head_dim, indexer.wk_weights_proj.weight
        keys.copy_(normal(*keys.shape) * hidden**-0.5)
        keys[rope], keys[rope + 1], keys[width:] = feature, -feature, constant  # a LayerNorm follows: no mean
        indexer.k_norm.bias.zero_()
        queries = indexer.wq_b.weight.zero_().view(-1, width, latent)
        queries[:, rope, 0], queries[:, rope + 1, 0] = 1, -1
    return {"m": m, "size": size, "right": right(size)}


class Extension(WorkerExtension):
    """What the bench asks of vLLM's worker."""

    def lldecode_watch(self) -> None:
        """Count engine steps, and put CUDA events around the proposals."""
        import torch

        runner = self.model_runner  # type: ignore[attr-defined]
        self.lldecode_steps = 0
        self.lldecode_events: list[Any] = []
        sample, propose = runner.sample_tokens, runner.speculator and runner.speculator.propose

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            self.lldecode_steps += 1
            return sample(*args, **kwargs)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out = propose(*args, **kwargs)
            end.record()
            self.lldecode_events.append((start, end))
            return out

        runner.sample_tokens = sample_tokens
        if propose:
            runner.speculator.propose = timed

    def lldecode_window(self, profile: bool) -> None:
        import torch

        torch.cuda.synchronize()  # the steps before leave no kernel in a profile
        self.lldecode_steps = 0
        self.lldecode_events.clear()
        if profile:
            self.lldecode_profile_start()

    def lldecode_window_end(self, profile: bool) -> dict[str, Any]:
        """Steps since the window began, kernels of a profile, microseconds of each proposal on its stream, waits for the host included."""
        import torch

        kernels = self.lldecode_profile_stop() if profile else {}
        torch.cuda.synchronize()
        draft_us = [start.elapsed_time(end) * 1e3 for start, end in self.lldecode_events]
        return {"steps": self.lldecode_steps, "kernels": kernels, "draft_us": draft_us}

    def lldecode_spread_both(self) -> None:
        """The target's weights, then those of the draft that are not the target's."""
        spread(self.get_model())  # type: ignore[attr-defined]
        draft = self.model_runner.get_draft_model()  # type: ignore[attr-defined]
        for layer in () if draft is None else draft.model.layers.values():
            for part in (layer.enorm, layer.hnorm, layer.eh_proj, layer.mtp_block, layer.shared_head.norm):
                spread(part)

    def lldecode_construct(self, context: int, topk: int) -> dict[str, float]:
        return construct(self.get_model(), self.model_runner.get_draft_model(), context, topk)  # type: ignore[attr-defined]

    def lldecode_wrong_topk(self) -> None:
        """From now on the constructed indexer takes the smallest features instead of the largest."""
        for layer in self.model_runner.get_draft_model().model.layers.values():  # type: ignore[attr-defined]
            layer.mtp_block.self_attn.indexer.wq_b.weight.data.neg_()


@contextlib.contextmanager
def decoding(llm: Any, prompts: Sequence[list[int]], max_tokens: int) -> Iterator[tuple[Callable[[], list[int]], dict[str, list[int]]]]:
    """Requests that all decode inside.

    Yields:
        what returns how many tokens each request got in the engine's next step, and all tokens so far.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    got: dict[str, list[int]] = {f"bench-{time.monotonic_ns()}-{i}": [] for i in range(len(prompts))}
    delta = {"ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA}

    def step() -> list[int]:
        while engine.has_unfinished_requests():
            outputs = engine.step()
            for out in outputs:
                got[out.request_id] += out.outputs[0].token_ids
                if out.finished:
                    raise RuntimeError(f"requests: expected more than {max_tokens} tokens")
            if counts := [n for out in outputs if (n := len(out.outputs[0].token_ids))]:
                return counts
        raise RuntimeError("requests: expected unfinished ones, got none")

    try:
        for name, prompt in zip(got, prompts, strict=True):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, **delta)
            engine.add_request(name, {"type": "token", "prompt_token_ids": prompt}, params)
        while not all(got.values()):
            step()
        yield step, got
    finally:
        engine.abort_request(list(got))


def room(steps: int, batch: int, context: int, mtp: int) -> int:
    """Tokens that a request may decode in so many steps, beside those in which others are not past their prompts."""
    return (mtp + 1) * (steps + SLACK + batch * (2 + context // (BATCHED // 2)))


def measure(llm: Any, spec: Spec, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Times, tokens and launches of a step in which every request decodes."""
    times, counts = [], []
    with decoding(llm, prompts, room(WARM + spec.steps + PROFILED, len(prompts), len(prompts[0]), spec.mtp)) as (step, _):
        llm.collective_rpc("lldecode_window", args=(False,))
        for i in range(-WARM, spec.steps + 1):
            new = step()
            if i >= 0:
                times.append(time.perf_counter())
                counts.append(new)
        draft_us = llm.collective_rpc("lldecode_window_end", args=(False,))[0]["draft_us"]
        llm.collective_rpc("lldecode_window", args=(True,))
        for _ in range(PROFILED):
            counts.append(step())
        profile = llm.collective_rpc("lldecode_window_end", args=(True,))[0]
    if (got := {len(c) for c in counts}) != {len(prompts)}:
        raise RuntimeError(f"step: expected tokens of {len(prompts)} requests, got those of {got}")
    kernels, steps = profile["kernels"], profile["steps"]
    busy = kernels.pop(BUSY)[1] / steps
    return {
        "us": [(b - a) * 1e6 for a, b in itertools.pairwise(times)],
        "tokens_per_step": statistics.fmean(map(sum, counts)) / len(prompts),
        "draft_us": draft_us,
        "busy_us": busy,
        "launches": launches(kernels, steps),
        "kernels": {name: [n / steps, us / steps] for name, (n, us) in sorted(kernels.items(), key=lambda item: -item[1][1])},
    }


def greedy(llm: Any, spec: Spec, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Tokens of each batch size and of parts of the largest, as ``lldecode.ablate_vllm.own_noise`` reads them."""
    from vllm import SamplingParams

    llm.collective_rpc("lldecode_spread_both")
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=spec.tokens, ignore_eos=True, detokenize=False, logprobs=2)

    def generate(part: range) -> list[dict[str, Any]]:
        return [greedy_output(o.outputs[0]) for o in llm.generate([{"prompt_token_ids": prompts[i]} for i in part], params, use_tqdm=False)]

    batches = {str(n): {"prompts": generate(range(n))} for n in spec.batches}
    return {"batches": batches, "again": decode_again(spec.batches, generate)}


def acceptance(llm: Any, spec: Spec, prompts: Sequence[list[int]], vocabulary: int, topk: int) -> dict[str, Any]:
    """Accepted tokens of each proposal, with the constructed weights and then, as a control, with the wrong top-k."""
    steps = -(-spec.draft_tokens // (spec.mtp * len(prompts)))
    weights = llm.collective_rpc("lldecode_construct", args=(spec.context + steps * spec.mtp // 2, topk))[0]  # where it is halfway
    out: dict[str, Any] = {"weights": weights, "tokens_ok": True}
    for what, n in (("accepted", steps), ("control", -(-steps // 10))):
        if what == "control":
            llm.collective_rpc("lldecode_wrong_topk")
        llm.reset_prefix_cache()
        with decoding(llm, prompts, room(n, len(prompts), len(prompts[0]), spec.mtp)) as (step, got):
            out[what] = [tokens - 1 for _ in range(n) for tokens in step()]
        for prompt, tokens in zip(prompts, got.values(), strict=True):
            out["tokens_ok"] &= tokens == [(prompt[-1] + 1 + i) % vocabulary for i in range(len(tokens))]
    return out


def work(spec: Spec, started: Callable[[], object], report: Callable[[dict[str, Any]], object]) -> None:
    """The worker. A part that fails leaves the others, and what was measured is reported after each."""
    from vllm import LLM

    llm = LLM(**spec.llm, worker_extension_cls=f"{Path(__file__).stem}.Extension")
    started()
    config = llm.llm_engine.model_config
    vocabulary, rng = config.get_vocab_size(), random.Random(0)
    prompts = {c: [[rng.randrange(vocabulary) for _ in range(c)] for _ in range(max(spec.batches))] for c in (*spec.contexts, spec.context)}
    llm.collective_rpc("lldecode_watch")
    out: dict[str, Any] = {"gpu": bench.gpu_name(), "cases": {}, "errors": {}, "state": llm.collective_rpc("lldecode_state")[0]}

    def part(name: str, into: dict[str, Any], key: str, call: Callable[[], Any]) -> None:
        begun = time.monotonic()
        try:
            into[key] = call()
        except Exception:
            out["errors"][name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
        report(out)

    for context in spec.contexts:
        for batch in spec.batches:
            case = f"B={batch} ctx={context}"
            part(case, out["cases"], case, lambda b=batch, c=context: measure(llm, spec, prompts[c][:b]))  # type: ignore[misc]
    part("tokens", out, "tokens", lambda: greedy(llm, spec, prompts[spec.contexts[0]]))
    if spec.variant != "nospec":
        topk = config.hf_text_config.index_topk
        part("acceptance", out, "acceptance", lambda: acceptance(llm, spec, prompts[spec.context], vocabulary, topk))
    out["state"] = llm.collective_rpc("lldecode_state")[0]
    report(out)


def run(specs: Sequence[Spec], environs: Mapping[str, Mapping[str, str]], at_once: int, timeout: float) -> dict[str, dict[str, Any]]:
    """Run the workers, `at_once` of them starting together and one after the other measuring. By variant: what each reported."""
    begun = time.monotonic()
    found: dict[str, workers.Outcome] = {}
    commands = {s.variant: ([sys.executable, __file__, "--worker", json.dumps(dataclasses.asdict(s))], environs[s.variant]) for s in specs}
    for group in (list(commands)[i : i + at_once] for i in range(0, len(commands), at_once)):
        workers.run(
            {name: commands[name] for name in group},
            lambda what: print(f"{time.monotonic() - begun:.0f} s: {what}", flush=True),
            found,
            timeout,
        )
    outcomes = {}
    for name, outcome in found.items():
        outcomes[name] = outcome.report or {"cases": {}, "errors": {}}
        if outcome.failure:
            outcomes[name]["errors"]["worker"] = outcome.failure
    return outcomes


Check = tuple[str, bool, str]


def checks(outcomes: Mapping[str, dict[str, Any]], config: Mapping[str, Any], specs: Sequence[Spec]) -> list[Check]:
    """Everything that must hold: name, whether it does, and what was found."""
    found: list[Check] = []
    stock = outcomes.get("nospec", {}).get("tokens")
    noise = own_noise(stock) if stock else Noise()
    off = outcomes.get("off", {}).get("acceptance")
    for spec in specs:
        name, out = spec.variant, outcomes[spec.variant]
        for what, error in out["errors"].items():
            found.append((f"{name} {what}", False, error))
        applied = out.get("state", {}).get("applied")
        found.append((f"{name} features", applied == sorted(VARIANTS[name][0]), f"{applied}"))
        for case, got in out["cases"].items():
            for group, count in expected(config, name, spec.mtp).items():
                measured = got["launches"][group]
                found.append((f"{name} {case} {group}", measured == count, f"{measured:g} a step, expected {count}"))
        if name != "nospec" and "tokens" in out:
            for size, got in out["tokens"]["batches"].items():
                verdict = compare(stock["batches"][size]["prompts"], got["prompts"], noise) if stock else None
                note = (
                    f"{verdict.note} (stock differs from itself up to a margin of {noise.margin:.2g})"
                    if verdict
                    else "not compared: nospec has none"
                )
                found.append((f"{name} B={size} tokens of nospec", bool(verdict and verdict.ok), note))
        if got := out.get("acceptance"):
            a, control, n = got["accepted"], got["control"], len(got["accepted"]) * spec.mtp
            rate, wrong = sum(a) / n, sum(control) / len(control) / spec.mtp
            places = ", ".join(f"{sum(x > i for x in a) / len(a):.3f}" for i in range(spec.mtp))
            found.append((f"{name} acceptance", n >= 2000 and 0.5 < rate < 0.95, f"{sum(a)}/{n} = {rate:.3f}; by position {places}"))
            found.append((f"{name} acceptance needs the top-k", wrong < rate / 2, f"{wrong:.3f} with the wrong one"))
            found.append((f"{name} constructed tokens", got["tokens_ok"], "each the one before + 1"))
            if name != "off":
                z = z_score(a, off["accepted"]) if off else None
                found.append((f"{name} acceptance as off", z is not None and abs(z) < 3, f"z = {'unknown' if z is None else f'{z:.2f}'}"))
    return found


def table(outcomes: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Times by case and variant, beside those of ``off``."""
    yield f"{'':24s} {'step us p20':>11s} {'p50':>8s} {'p80':>8s} {'busy':>8s} {'draft us':>9s} {'tok/step':>8s} {'/off':>8s} {'draft':>9s}"
    for case in dict.fromkeys(c for out in outcomes.values() for c in out["cases"]):
        base = outcomes.get("off", {"cases": {}})["cases"].get(case)
        for name, out in outcomes.items():
            if got := out["cases"].get(case):
                step, draft = bench.percentiles(got["us"]), statistics.median(got["draft_us"] or [0.0])
                ratio = step[1] / statistics.median(base["us"]) if base else float("nan")
                drafts = draft / statistics.median(base["draft_us"]) if base and base["draft_us"] else float("nan")
                times = f"{step[0]:11.0f} {step[1]:8.0f} {step[2]:8.0f} {got['busy_us']:8.0f} {draft:9.0f}"
                yield f"{case:15s} {name:8s} {times} {got['tokens_per_step']:8.2f} {ratio:8.3f} {drafts:9.3f}"


def rows(outcomes: Mapping[str, dict[str, Any]], mtp: int) -> list[bench.Row]:
    """Draft times; ``lldecode`` is ``on``; no bytes are counted, so `gbps` is 0. Whole steps vary more than they differ: see the table."""
    return [
        bench.row("mtp-spec", "lldecode" if name == "on" else name, f"draft {case} mtp={mtp}", got["draft_us"], 0, 0.0)
        for name, out in outcomes.items()
        for case, got in out["cases"].items()
        if got["draft_us"]
    ]


def plan(a: argparse.Namespace) -> tuple[dict[str, Any], list[Spec], dict[str, dict[str, str]]]:
    """The model's config, and by variant what a worker runs and its environment."""
    config = json.loads((Path(a.model) / "config.json").read_text())
    largest, context = max(a.batch), 3 * config["index_topk"]
    draft_steps = -(-a.draft_tokens // (a.mtp * largest))
    steps = {c: WARM + a.output_len + PROFILED for c in a.context}
    steps[context] = max(draft_steps, steps.get(context, 0))
    length = -(-max(c + room(n, largest, c, a.mtp) for c, n in steps.items()) // 64) * 64
    cached = config["num_hidden_layers"] + own_indexers(config) + 2 * config["num_nextn_predict_layers"]
    llm: dict[str, Any] = {
        "model": str(a.model),
        "load_format": "dummy",
        "max_model_len": length,
        "max_num_seqs": largest,
        "max_num_batched_tokens": BATCHED,
        "kv_cache_memory_bytes": int(a.kv_gib * 2**30) if a.kv_gib else largest * length * cached * 656 * 11 // 10,
        # only what must be free at start: the cache's size is given
        "gpu_memory_utilization": memory_share(min(a.at_once, len(a.variants)), a.gpus or ()),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "seed": 0,
        "compilation_config": {"cudagraph_capture_sizes": [2**i for i in range((largest * (a.mtp + 1) - 1).bit_length() + 1)]},
    }
    installed = sorted(registry.entry_points())
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LLDECODE_MTP_SPEC")}
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), clean.get("PYTHONPATH")]))
    specs, environs = [], {}
    for name in a.variants:
        chosen, more = VARIANTS[name]
        speculative = {} if name == "nospec" else {"speculative_config": {"method": "mtp", "num_speculative_tokens": a.mtp}}
        mtp = 0 if name == "nospec" else a.mtp
        sizes = {"batches": sorted(a.batch), "contexts": sorted(a.context), "context": context}
        counts = {"steps": a.output_len, "tokens": a.tokens, "draft_tokens": a.draft_tokens}
        specs.append(Spec(name, **sizes, **counts, mtp=mtp, llm=llm | speculative))
        environs[name] = worker_environ(clean, installed, chosen) | more
        if a.gpus:
            environs[name]["CUDA_VISIBLE_DEVICES"] = a.gpus[(len(specs) - 1) % len(a.gpus)]
    return config, specs, environs


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of tools/slice_model.py")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS), help=f"of {','.join(VARIANTS)}")
    parser.add_argument("--batch", type=numbers, default=[1, 4])
    parser.add_argument("--context", type=numbers, default=[4096, 32768])
    parser.add_argument("--output-len", type=int, default=64, help="steps that are timed")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are compared, at the smallest context")
    parser.add_argument("--draft-tokens", type=int, default=6000, help="of acceptance, at three times index_topk")
    parser.add_argument("--mtp", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, help="KV cache of an engine; default: what the largest batch and context need")
    parser.add_argument("--at-once", type=int, default=1, help="engines that start together and share the GPU's memory")
    parser.add_argument("--gpus", type=lambda text: text.split(","), help="the GPU of each variant in turn; default: what is visible")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for a group's start, and for a worker's measurements")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--csv", type=Path, help="default: none")
    parser.add_argument("--dry-run", action="store_true", help="print what the workers would run")
    a = parser.parse_args()
    if unknown := set(a.variants) - set(VARIANTS):
        parser.error(f"--variants: expected some of {', '.join(VARIANTS)}, got {', '.join(sorted(unknown))}")
    config, specs, environs = plan(a)
    if missing := {f for name in a.variants for f in VARIANTS[name][0]} - set(registry.entry_points()):
        parser.error(f"features: expected {', '.join(sorted(missing))} to be installed")
    if a.dry_run:
        for spec in specs:
            ours = {k: v for k, v in environs[spec.variant].items() if k.startswith("LLDECODE_")}
            counts = expected(config, spec.variant, spec.mtp)
            print(json.dumps({**dataclasses.asdict(spec), "environment": ours, "expected": counts}, indent=1))
        return
    outcomes = run(specs, environs, a.at_once, a.timeout)
    found = checks(outcomes, config, specs)
    print("\n".join(table(outcomes)))
    for name, ok, note in found:
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {note}", flush=True)
    good = all(ok for _, ok, _ in found)
    if a.json:
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps({"ok": good, "specs": [dataclasses.asdict(s) for s in specs], "checks": found, "outcomes": outcomes}))
    if a.csv and good:
        bench.write_csv(a.csv, rows(outcomes, a.mtp))
    sys.exit(not good)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Spec(**json.loads(sys.argv[2])), *workers.worker(sys.argv[3]))
    else:
        main()
