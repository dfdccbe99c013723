"""``lldecode tune``: measure this GPU on the shapes of a model, and write the plans that the features' operators load.

A feature offers a :class:`Tuner` through the entry-point group ``lldecode.tuners``.
"""

import argparse
import concurrent.futures.process
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import math
import multiprocessing
import os
import pkgutil
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from lldecode import bench, jit, neighbour, plan, registry
from lldecode.engine import failure
from lldecode.plan import Gemm

logger = logging.getLogger("lldecode.tune")

ENTRY_POINT_GROUP = "lldecode.tuners"

ROUNDS = 7
"""Samples of each candidate in each of :data:`lldecode.plan.SITUATIONS`."""

_SHARED = dict(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128, moe_intermediate_size=2048, n_shared_experts=1)
_GLM52 = dict(hidden_size=6144, intermediate_size=12288, vocab_size=154880, num_attention_heads=64, index_n_heads=32)
_DSV32 = dict(hidden_size=7168, intermediate_size=18432, vocab_size=129280, num_attention_heads=128, index_n_heads=64)
MODELS: dict[str, dict[str, Any]] = {
    "glm52": _SHARED | _GLM52 | dict(q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256),
    "dsv32": _SHARED | _DSV32 | dict(q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128),
}
"""What :func:`products` reads of the Hugging Face configs of GLM-5.2 and DeepSeek-V3.2."""


Call = Callable[[Tensor, Tensor], object]
"""``f(weight, out)``"""


@dataclasses.dataclass(frozen=True)
class Tuner:
    """What a feature that takes small-M products offers to tune.

    Attributes:
        plans: the feature's.
        kernel: ``"module:NAME"`` of its :class:`lldecode.jit.Kernel`.
        configs: given the GPU's multiprocessors, a product and M: by variant (a tuple, part of a plan) the kernel's config.
        launch: ``f(config, x, weight, out)`` with operands of three dimensions, weight ``[batch, n, k]``.
        providers: given a product and x ``[batch, M, k]``: what else takes it, by name, the baseline first.
    """

    plans: plan.Plans
    kernel: str
    configs: Callable[[int, Gemm, int], Mapping[tuple[int, ...], Any]]
    launch: Callable[[Any, Tensor, Tensor, Tensor], object]
    providers: Callable[[Gemm, Tensor], Mapping[str, Call]]


def products(config: Mapping[str, Any], tp: int) -> list[Gemm]:
    """The small-M products of a DeepSeek-Sparse-Attention model, one tensor-parallel rank's share, from its Hugging Face config.

    Raises:
        KeyError: the config is of another kind of model.
        ValueError: a dimension is no positive whole number, or `tp` does not divide the attention heads.
    """
    for name in MODELS["glm52"]:
        if type(config[name]) is not int or config[name] < 1:
            raise ValueError(f"--model: {name}: expected a whole number from 1, got {config[name]!r}")
    hidden, q, latent, rope = (config[k] for k in ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"))
    if config["num_attention_heads"] % tp:
        raise ValueError(f"--tp: expected a divisor of {config['num_attention_heads']} attention heads, got {tp}")
    heads, nope, v = config["num_attention_heads"] // tp, config["qk_nope_head_dim"], config["v_head_dim"]
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    vocab = -(-config["vocab_size"] // 64) * 64 // tp
    out = [
        Gemm(q + latent + rope, hidden),  # fused_qkv_a_proj
        Gemm(heads * (nope + rope), q),  # q_b_proj
        Gemm(latent, nope, heads, n_major=True),  # W_UK_T
        Gemm(v, latent, heads),  # W_UV
        Gemm(hidden, heads * v),  # o_proj
        Gemm(index_heads * index_dim, q),  # wq_b
        Gemm(index_dim + index_heads, hidden),  # wk_weights_proj
        Gemm(hidden, 2 * hidden),  # eh_proj
        Gemm(vocab, hidden),  # lm_head
    ]
    for inter in (config["intermediate_size"], config["moe_intermediate_size"] * config["n_shared_experts"]):
        out += [Gemm(2 * inter // tp, hidden), Gemm(hidden, inter // tp)]  # gate_up_proj, down_proj
    return out


def operands(gemm: Gemm, copies: int) -> tuple[Tensor, list[Tensor]]:
    """Random bf16 activations ``[batch, 32, k]`` and `copies` of weights ``[batch, n, k]``, laid out as `gemm` says, on this device."""
    device = bench.default_device()
    size = (gemm.batch, gemm.k, gemm.n) if gemm.n_major else (gemm.batch, gemm.n, gemm.k)
    weights = [torch.randn(size, dtype=torch.bfloat16, device=device).mul_(gemm.k**-0.5) for _ in range(copies)]
    x = torch.randn(gemm.batch, plan.SIZES[-1], gemm.k, dtype=torch.bfloat16, device=device)
    return x, [w.transpose(1, 2) for w in weights] if gemm.n_major else weights


def measure(tuner: Tuner, gemm: Gemm, rounds: int = ROUNDS) -> dict[str, dict[str, Any]]:
    """The plan of a product, by M, on the current device with cold weights.

    Of each provider the mean over :data:`lldecode.plan.SITUATIONS` counts, in microseconds. What is less exact against fp64 than twice
    the baseline, or writes NaN, is left out with a warning.
    """
    x, weights = operands(gemm, bench.cold_copies(gemm.batch * gemm.n * gemm.k * 2))
    exact = x.double() @ weights[0].double().mT
    return {str(m): _measure(tuner, gemm, x[:, :m], weights, exact[:, :m], rounds) for m in plan.SIZES}


def time_calls(calls: Mapping[str, Sequence[Callable[[], object]]], x: Tensor, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Time calls in each of :data:`lldecode.plan.SITUATIONS`, each on its own by :func:`lldecode.bench.interleaved`.

    Args:
        calls: as there.
        x: their activations ``[batch, M, k]``, which the kernel between them writes. Afterwards they are as they were.

    Returns:
        By situation and by name of a call, `rounds` samples in microseconds a call.

    Raises:
        ValueError: x has another number of dimensions.
    """
    if x.ndim != 3:
        raise ValueError(f"x: expected shape [batch, M, k], got {list(x.shape)}")
    kept = x.clone()
    between: dict[str, Callable[[], object] | None] = {"chain": None, "behind": lambda: neighbour.launch(x), "alone": lambda: x.fill_(1.0)}
    try:
        return {situation: bench.interleaved(calls, rounds=rounds, between=between[situation]) for situation in plan.SITUATIONS}
    finally:
        x.copy_(kept)


def _measure(tuner: Tuner, gemm: Gemm, x: Tensor, weights: Sequence[Tensor], exact: Tensor, rounds: int) -> dict[str, Any]:
    out = torch.empty_like(exact, dtype=x.dtype)
    m = x.shape[1]

    def error(call: Call) -> float:
        out.fill_(math.nan)
        call(weights[0], out)
        return float((out - exact).norm() / exact.norm())

    def launch(cfg: Any, weight: Tensor, out: Tensor) -> None:
        tuner.launch(cfg, x, weight, out)

    calls = dict(tuner.providers(gemm, x))
    baseline = next(iter(calls))
    bound = 2 * error(calls[baseline]) + 1e-6
    configs = tuner.configs(plan.gpu()[1], gemm, m)
    variants = {str(variant): variant for variant in configs}
    calls |= {name: functools.partial(launch, configs[variant]) for name, variant in variants.items()}
    for name in list(calls):
        if not (found := error(calls[name])) <= bound:
            logger.warning("%s M=%d: %s is wrong: expected an error of at most %.2e, got %.2e", gemm, m, name, bound, found)
            del calls[name]
    samples = time_calls({name: [functools.partial(call, w, out) for w in weights] for name, call in calls.items()}, x, rounds)
    medians = {name: [bench.percentiles(samples[situation][name])[1] for situation in plan.SITUATIONS] for name in calls}
    took = {name: round(statistics.fmean(us), 3) for name, us in medians.items()}
    us = {name: t for name, t in took.items() if name not in variants}
    own = sorted((t, name) for name, t in took.items() if name in variants)
    if own:
        us["lldecode"] = own[0][0]
    choice = plan.decide(us, baseline)
    details = ", ".join(f"{name} {t} ({' '.join(f'{us:.3f}' for us in medians[name])})" for t, name in own)
    logger.info("%s M=%d: %s; %s", gemm, m, us, details)
    return {"choice": [choice, list(variants[own[0][1]]) if choice == "lldecode" else None], "us": us}


class CompileError(RuntimeError):
    """None of the kernels to measure compiles."""


def precompile(kernel: str, configs: Sequence[Any], jobs: int) -> dict[Any, str]:
    """Compile into the disk cache for the current device, in processes of their own: each takes seconds on one core.

    Returns:
        by config that does not compile, the reason.
    """
    # Inherited: the compiler reads it when it is imported, which may be before an initializer runs.
    os.environ["CUTE_DSL_ARCH"] = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    # The parent alone answers Ctrl-C.
    start = (signal.SIGINT, signal.SIG_IGN)
    pool = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), signal.signal, start)
    try:
        made = pool.map(functools.partial(_compile, kernel), configs, chunksize=4)
        reasons = list(track(made, "compiling", len(configs), console=Console(stderr=True)))
    finally:
        pool.shutdown(cancel_futures=True)
    return {cfg: reason for cfg, reason in zip(configs, reasons, strict=True) if reason is not None}


def _compile(kernel: str, cfg: Any) -> str | None:
    """Why `cfg` does not compile, in words: an exception may not survive the way between processes."""
    try:
        pkgutil.resolve_name(kernel).get(cfg, torch.device("cpu"))
    except Exception as e:
        return jit.one_line(e)
    return None


def tune(tuner: Tuner, gemms: Sequence[Gemm], path: Path, *, jobs: int) -> plan.Shapes:
    """Measure what a plan file lacks, on the current device. The file is rewritten after each product.

    A run that was interrupted goes on where it was; a stale file is measured again, with the reason on stderr. What does not compile is
    left out with a warning.

    Returns:
        all that the file holds.

    Raises:
        CompileError: nothing compiles, which is no property of the variants.
    """
    gpu, sms = plan.gpu()
    stamp = tuner.plans.stamp(gpu)
    done, reason = plan.read(path, stamp)
    if reason:
        print(f"lldecode tune: measuring again: {reason}", file=sys.stderr)
    todo = [g for g in dict.fromkeys(gemms) if str(g) not in done]
    failed: dict[Any, str] = {}
    if configs := list(dict.fromkeys(c for g in todo for m in plan.SIZES for c in tuner.configs(sms, g, m).values())):
        failed = precompile(tuner.kernel, configs, jobs)
        for cfg, why in failed.items():
            logger.warning("%s: left out, since it does not compile: %s", cfg, why)
        if len(failed) == len(configs):
            raise CompileError(f"none of {len(configs)} kernels compiles: {failed[configs[0]]}")

    def compiled(sms: int, gemm: Gemm, m: int) -> dict[tuple[int, ...], Any]:
        return {variant: cfg for variant, cfg in tuner.configs(sms, gemm, m).items() if cfg not in failed}

    for g in track(todo, "measuring", console=Console(stderr=True)):
        done[str(g)] = measure(dataclasses.replace(tuner, configs=compiled), g)
        plan.write(path, stamp, done)
    return done


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="glm52", help=f"a model's directory or its config.json, or {' or '.join(MODELS)} (default glm52)")
    add("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    add("--out", type=Path, metavar="DIR", help="folder for the plans (default: where the operators look for them)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile (default: one a core)")


def run(args: argparse.Namespace) -> int:
    """Entry point of the command.

    Returns:
        0; 1 where kernels cannot be compiled or run here; 2 on bad input, without a tuner, or where one cannot be loaded; 130 when
        interrupted.
    """
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("lldecode tune: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except CompileError as e:
        print(f"lldecode tune: {e}", file=sys.stderr)
        return 1
    except concurrent.futures.process.BrokenProcessPool:
        reason = "a process that compiles was killed, for want of memory perhaps"
        print(f"lldecode tune: {reason}; try less than --jobs {args.jobs}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    try:
        for name in ("tp", "jobs"):
            if (value := getattr(args, name)) < 1:
                raise ValueError(f"--{name}: expected a whole number from 1, got {value}")
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            if not os.access(args.out, os.W_OK):
                raise ValueError(f"--out: no permission to write in {str(args.out)!r}")
        config = read_config(args.model)
        tuners = {name: load(point) for name, point in sorted(registry.entry_points(ENTRY_POINT_GROUP).items())}
        if not tuners:
            raise ValueError("no installed feature has anything to tune; pip install lldecode-skinny-gemm")
        try:
            gemms = list(dict.fromkeys(products(config, args.tp)))
        except KeyError as e:
            raise ValueError(f"--model: expected a DeepSeek-Sparse-Attention model, got a config without {e}: {args.model}") from e
    except (ValueError, OSError) as e:
        print(f"lldecode tune: {e}", file=sys.stderr)
        return 2
    if reason := jit.unavailable():
        print(f"lldecode tune: {reason}", file=sys.stderr)
        return 1
    for name, tuner in tuners.items():
        try:
            path = tuner.plans.tuned(plan.gpu()[0], args.out)
        except OSError as e:
            print(f"lldecode tune: {e}; see --out", file=sys.stderr)
            return 1
        found = tune(tuner, gemms, path, jobs=args.jobs)
        for gemm in gemms:
            print(f"{gemm}: {', '.join(_gain(m, entry) for m, entry in found[str(gemm)].items())}")
        print(f"{name}: wrote {path}")
    return 0


def load(point: importlib.metadata.EntryPoint) -> Tuner:
    """The tuner of a feature.

    Raises:
        ValueError: its package cannot be loaded, or offers something else.
    """
    try:
        tuner = point.load()
    except BaseException as e:
        raise ValueError(f"{point.name}: failed to import: {failure(e)}") from e
    if not isinstance(tuner, Tuner):
        raise ValueError(f"{point.name}: expected a Tuner, got {tuner!r}")
    return tuner


def read_config(model: str) -> dict[str, Any]:
    """The Hugging Face config of a model: one of :data:`MODELS`, a directory with a ``config.json``, or that file.

    Raises:
        ValueError: `model` is none of these, or the file is not a JSON object.
    """
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    with contextlib.suppress(OSError, ValueError):
        config = json.loads(path.read_text())
        if isinstance(config, dict):
            return config
    raise ValueError(f"--model: expected {', '.join(MODELS)}, a directory with a config.json, or that file; got {model!r}")


def _gain(size: str, entry: Mapping[str, Any]) -> str:
    """Microseconds are listed from the baseline on."""
    us, provider = entry["us"], entry["choice"][0]
    return f"M={size} {next(iter(us.values())) / us[provider]:.2f}x {provider}"
