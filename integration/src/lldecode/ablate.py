"""``lldecode ablate``: the same decode with no feature, each alone, each left out and all, checked against stock and timed.

Two engines: the embedded layers of :mod:`lldecode.layer` (default), and vLLM itself (:mod:`lldecode.ablate_vllm`).
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from lldecode import bench, flags, layer, registry
from lldecode.engine import Engine
from lldecode.feature import declined

MARGIN = 2.0
"""A combination may differ from stock by this many times what stock itself changes when its inputs move by one bf16 ulp.

Measured on the scaled layers: other rounding orders reach 0.95 times that change, a projection that is 2 % off 2.6 times.
"""

TOPK_FLOOR = 0.01
"""Least share of differing top-k positions that counts as stock's own change, where the indexer has anything to leave out."""

CPU_NOTE = "CPU: scaled-down shapes, reference implementations; these times say nothing about a GPU"

_VLLM_ONLY = (
    *("load_format", "input_len", "output_len", "tensor_parallel_size", "max_model_len", "engine_args"),
    *("at_once", "gpus", "only", "profile", "timeout", "trace"),
)
_LAYER_ONLY = ("context", "layers", "spec")
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine", default="layer", help="layer: embedded decode layers in plain torch (default); vllm: vLLM's own engine")
    add("--model", help=f"engine layer: {' or '.join(layer.MODELS)} (default glm52); engine vllm: a path or model id")
    add("--features", help="comma-separated (default: all that are installed)")
    add("--batch", default="1,4,16", help="batch sizes, comma-separated (default 1,4,16)")
    add("--rounds", help="samples of each combination (default: 30 on a GPU, 5 on a CPU, 5 with vllm)")
    add("--json", action="store_true", help="print JSON instead of the table; no progress bar")
    add("--csv", metavar="PATH", help="also write the results as CSV")
    add("--plot", metavar="PATH", help=f"also draw them ({', '.join(_PLOT_SUFFIXES)})")
    embedded = parser.add_argument_group("engine layer")
    embedded.add_argument("--layers", help="decoder layers in the chain (default 4)")
    embedded.add_argument("--spec", help="MTP draft steps after them; 0 for the layers alone (default 3)")
    embedded.add_argument("--context", help="tokens in the cache of the longest request (default: 4096 on a GPU, 512 on a CPU)")
    vllm = parser.add_argument_group("engine vllm")
    vllm.add_argument("--load-format", help="as vLLM's (default auto; dummy needs no weights)")
    vllm.add_argument("--input-len", help="prompt tokens (default 1024)")
    vllm.add_argument("--output-len", help="tokens over which the time of one is taken (default 128)")
    vllm.add_argument("--tensor-parallel-size", help="as vLLM's (default 1)")
    vllm.add_argument("--max-model-len", help="as vLLM's (default: what the lengths above need)")
    vllm.add_argument("--engine-args", metavar="JSON", help="any other arguments of vllm.LLM, as a JSON object")
    vllm.add_argument(
        "--at-once", metavar="N", help="engines that start together and share the GPU's memory; they measure one by one (default 1)"
    )
    vllm.add_argument("--timeout", metavar="S", help="seconds for engines to start, and for each to be measured (default 1800)")
    vllm.add_argument("--only", metavar="LIST", help="of the combinations these and none, as the table names them (default: all of them)")
    vllm.add_argument(
        "--gpus", metavar="LIST", help="as CUDA_VISIBLE_DEVICES: one engine on each in turn (default: all on what is visible)"
    )
    vllm.add_argument("--profile", nargs="?", const="15", metavar="N", help="GPU time a token of the N largest kernels (default 15)")
    vllm.add_argument("--trace", metavar="DIR", help="with --profile: write each combination's timeline, for Perfetto or chrome://tracing")


def run(args: argparse.Namespace) -> int:
    """Entry point of the command.

    Returns:
        0; 1 where a combination failed or differs from stock; 2 on bad input; 130 when interrupted.
    """
    from lldecode import ablate_vllm

    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(args, {"layer": _layer_run, "vllm": ablate_vllm.prepare})
    except KeyboardInterrupt:
        print("lldecode ablate: interrupted; everything was put back", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: argparse.Namespace, engines: Mapping[str, Callable[[argparse.Namespace], Callable[[], "Report"]]]) -> int:
    try:
        if args.engine not in engines:
            raise ValueError(f"--engine: expected {' or '.join(engines)}, got {args.engine!r}")
        for name in _VLLM_ONLY if args.engine == "layer" else _LAYER_ONLY:
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')}: not with --engine {args.engine}")
        for name in ("csv", "plot"):
            check_output(name, getattr(args, name))
        start = engines[args.engine](args)
    except (ValueError, OSError) as e:
        print(f"lldecode ablate: {e}", file=sys.stderr)
        return 2
    report = start()
    if args.csv:
        write_csv(args.csv, report)
    if args.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        show(report)
    if args.plot:
        plot(args.plot, report)
    return 130 if report.interrupted else 0 if report.ok else 1


def _terminate(*_: object) -> None:
    raise KeyboardInterrupt


def positive(name: str, text: str | None, default: int, least: int = 1) -> int:
    """The value of option `name`; ValueError unless it is a whole number from `least`."""
    if text is None:
        return default
    if not text.strip().isdecimal() or int(text) < least:
        raise ValueError(f"--{name}: expected a whole number from {least}, got {text!r}")
    return int(text)


def batches(text: str) -> list[int]:
    """The sizes in ``--batch``, ascending and once each."""
    return sorted({positive("batch", item, 1) for item in text.split(",")})


def check_output(name: str, path: str | None) -> None:
    """Refuse before the measurement what could not be written after it."""
    if path is None:
        return
    if name == "plot" and pathlib.Path(path).suffix not in _PLOT_SUFFIXES:
        raise ValueError(f"--plot: expected a name that ends in {', '.join(_PLOT_SUFFIXES)}, got {path!r}")
    if pathlib.Path(path).is_dir():
        raise ValueError(f"--{name}: expected a file, got the directory {path!r}")
    check_directory(name, str(pathlib.Path(path).absolute().parent))


def check_directory(name: str, path: str) -> None:
    """Make it, and refuse one that nothing can be written in."""
    pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise ValueError(f"--{name}: no permission to write in {path!r}")


def choose(text: str | None) -> tuple[list[str], dict[str, str]]:
    """The features to measure, and an environment in which those without a setting of the user's are ``on`` if named, else ``auto``.

    Raises:
        ValueError: no name, one that is not installed, or a bad flag.
    """
    installed = sorted(registry.entry_points())
    wanted = installed if text is None else [name.strip() for name in text.split(",") if name.strip()]
    if text is not None and not wanted:
        raise ValueError(f"--features: expected names, got {text!r}")
    for name in wanted:
        if name in registry.catalog() and name not in installed:
            raise ValueError(f"--features: {name} is not installed (package lldecode-{name})")
        if name not in installed:
            raise ValueError(f"--features: unknown feature {name!r}; installed: {', '.join(installed) or 'none'}")
    settings = flags.read(os.environ, installed, registry.catalog())
    named = () if text is None else wanted
    unset = {flags.env_name(name): "on" if name in named else "auto" for name in installed if name not in settings}
    return sorted(set(wanted)), {**os.environ, **unset}


def combinations(features: Sequence[str]) -> dict[str, frozenset[str]]:
    """By label: none, each alone, each left out, all; equal sets once, under the first label."""
    everything = frozenset(features)
    labelled = [("none", frozenset[str]())]
    labelled += [(name, frozenset({name})) for name in features]
    labelled += [(f"all but {name}", everything - {name}) for name in features]
    labelled.append(("all", everything))
    out: dict[str, frozenset[str]] = {}
    for label, chosen in labelled:
        if chosen not in out.values():
            out[label] = chosen
    return out


@dataclasses.dataclass(frozen=True)
class FeatureNote:
    """What became of one feature: ``measured`` or ``skipped``, and why.

    Attributes:
        declined: reasons for which its adapter handed calls to the original, with their number.
    """

    name: str
    version: str
    state: str
    reason: str = ""
    declined: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """One combination at one batch size.

    Attributes:
        features: the combination's, comma-separated.
        us_p20, us_p50, us_p80: microseconds a step of all layers and draft steps, a layer where none is drafted, or a token with vLLM;
            None where it was not timed: with embedded layers where the check failed, with vLLM only where an engine did not run with
            these features.
        speedup: of the p50 over no feature's.
        max_err: the error that comes closest to (or furthest beyond) its bound; None where nothing was compared or it is infinite.
        bound: what it may be.
        note: which quantity that is, or what failed.
    """

    combo: str
    features: str
    batch: int
    us_p20: float | None
    us_p50: float | None
    us_p80: float | None
    speedup: float | None
    max_err: float | None
    bound: float | None
    ok: bool
    note: str


@dataclasses.dataclass(frozen=True)
class Report:
    engine: str
    model: str
    unit: str
    note: str
    gpu: str
    parameters: Mapping[str, Any]
    versions: Mapping[str, str]
    utc: str
    features: Sequence[FeatureNote]
    results: Sequence[Result]
    ok: bool
    kernels: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)
    interrupted: bool = False


def result(
    combo: str,
    features: frozenset[str],
    batch: int,
    samples: Sequence[float] | None,
    stock: Sequence[float] | None,
    verdict: "Verdict",
) -> Result:
    p20, p50, p80 = (round(us, 3) for us in bench.percentiles(samples)) if samples else (None, None, None)
    base = bench.percentiles(stock)[1] if stock else None
    return Result(
        combo=combo,
        features=",".join(sorted(features)),
        batch=batch,
        us_p20=p20,
        us_p50=p50,
        us_p80=p80,
        speedup=round(base / p50, 4) if base and p50 else None,
        max_err=_short(verdict.max_err),
        bound=_short(verdict.bound),
        ok=verdict.ok,
        note=verdict.note,
    )


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.3g}")


CSV_COLUMNS = (
    *("engine", "model", "combo", "features", "batch", "us_p20", "us_p50", "us_p80", "speedup", "max_err", "bound", "ok", "note"),
    *("unit", "gpu", "torch", "triton", "cutlass_dsl", "vllm", "utc"),
)


def write_csv(path: str, report: Report) -> None:
    common = {"engine": report.engine, "model": report.model, "unit": report.unit, "gpu": report.gpu, "utc": report.utc}
    common |= {name: report.versions.get(name, "") for name in ("torch", "triton", "cutlass_dsl", "vllm")}
    bench.write_table(path, CSV_COLUMNS, [{**common, **dataclasses.asdict(r)} for r in report.results])


def plot(path: str, report: Report) -> None:
    """Bars of the p50 by batch size and combination; none where the check failed."""
    groups: dict[str, dict[str, tuple[float, float, float]]] = {}
    for r in report.results:
        if r.ok and r.us_p20 is not None and r.us_p50 is not None and r.us_p80 is not None:
            groups.setdefault(r.combo, {})[f"batch {r.batch}"] = (r.us_p20, r.us_p50, r.us_p80)
    cases = [f"batch {b}" for b in sorted({r.batch for r in report.results})]
    title = f"{report.model} on {report.gpu}" + (f"\n{report.note}" if report.note else "")
    bench.bars(cases, groups, path, ylabel=report.unit, title=title)


def show(report: Report) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(f"{escape(report.model)} on {escape(report.gpu)}; " + ", ".join(f"{k} {v}" for k, v in report.parameters.items()))
    if report.note:
        console.print(escape(report.note), style="yellow")
    for f in report.features:
        console.print(f"{f.name} {f.version}: {f.state}" + (f": {escape(f.reason)}" if f.reason else ""))
        for reason, calls in f.declined.items():
            console.print(f"  stock path in {calls} calls: {escape(reason)}")
    table = Table("batch", "features", f"{report.unit} (p50)", "speedup", "max err", "bound", "ok", "note")
    previous = None
    for r in report.results:
        if previous not in (None, r.batch):
            table.add_section()
        previous = r.batch
        table.add_row(
            str(r.batch),
            r.combo,
            "-" if r.us_p50 is None else f"{r.us_p50:.1f}",
            "-" if r.speedup is None else f"{r.speedup:.3f}x",
            "-" if r.max_err is None else f"{r.max_err:.1e}",
            "-" if r.bound is None else f"{r.bound:.1e}",
            "[green]yes[/]" if r.ok else "[red]NO[/]",
            escape(r.note),
        )
    console.print(table)
    for combo, kernels in report.kernels.items():
        table = Table("µs a token", "launches a token", "kernel", title=f"GPU time by kernel, {combo}")
        for k in kernels:
            name = k["kernel"] if len(k["kernel"]) <= 100 else k["kernel"][:99] + "…"
            table.add_row(f"{k['us']:.1f}", f"{k['launches']:.1f}", escape(name))
        console.print(table)
    if not report.ok:
        console.print("A combination failed or differs from stock by more than its bound.", style="red")


@contextlib.contextmanager
def progress(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yields what to call before each step with what it is: shown as a bar on stderr, or a line each where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    terminal = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet or not terminal) as bar:
        task = bar.add_task("", total=total)
        last = ""

        def step(what: str) -> None:
            nonlocal last
            bar.update(task, description=escape(what), advance=1 if last else 0)
            if what != last and not quiet and not terminal:
                print(f"lldecode ablate: {what}", file=sys.stderr, flush=True)
            last = what

        yield step


def versions() -> dict[str, str]:
    names = {"lldecode": "lldecode", "torch": "torch", "triton": "triton", "cutlass_dsl": "nvidia-cutlass-dsl", "vllm": "vllm"}
    return {name: v for name, dist in names.items() if (v := bench.version_of(dist))}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome of comparing a combination with stock; see :class:`Result`."""

    ok: bool
    note: str = ""
    max_err: float | None = None
    bound: float | None = None


Record = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What one layer of the stock chain started from, and the positions that its attention read."""

    hidden: Tensor
    residual: Tensor | None
    topk_before: Tensor
    topk_used: Tensor


@dataclasses.dataclass(frozen=True)
class DraftInputs:
    """What one draft step of stock started from, the first step's selection after that step, and the positions its attention read."""

    tokens: Tensor
    hidden: Tensor
    topk_before: Tensor
    topk_used: Tensor


def observe(layers: list[layer.Layer], state: layer.State) -> tuple[list[Inputs], list[Record]]:
    """Run the chain of layers and record all that each computes, and what :func:`observe_on` needs to repeat it."""
    inputs: list[Inputs] = []
    records: list[Record] = []
    hidden, residual, topk = state.hidden, state.residual, torch.full_like(state.topk_indices, -1)
    for each in layers:
        records.append(_observe(each, state, hidden, residual, topk, None))
        inputs.append(Inputs(hidden, residual, topk, records[-1]["topk_indices"]))
        hidden, residual, topk = (records[-1][name] for name in ("hidden", "residual", "topk_indices"))
    return inputs, records


def observe_on(layers: list[layer.Layer], state: layer.State, inputs: Sequence[Inputs]) -> list[Record]:
    """Record each layer on its given inputs, its attention reading the given positions whatever its indexer selects.

    So neither rounding nor a near tie in a layer reaches the comparison of anything after it.
    """
    return [_observe(each, state, i.hidden, i.residual, i.topk_before, i.topk_used) for each, i in zip(layers, inputs, strict=True)]


def _observe(each: layer.Layer, state: layer.State, hidden: Tensor, residual: Tensor | None, before: Tensor, used: Tensor | None) -> Record:
    record: Record = {}
    watched = _watch(each, state, before, used, record)
    out = layer.decoder_layer(each, watched, hidden, residual)
    return {**record, **out._asdict(), **layer.written(each, state)}


def _watch(each: layer.Layer, state: layer.State, before: Tensor, used: Tensor | None, record: Record) -> layer.State:
    """The state with `before` in its top-k buffer and caches poisoned, which records the selection, then replaces it by `used`."""

    def on_topk(indices: Tensor) -> None:
        record["topk_indices"] = indices.clone()
        if used is not None:
            indices.copy_(used)

    state.topk_indices.copy_(before)
    layer.poison(each, state)
    return dataclasses.replace(state, on_topk=on_topk)


def observe_draft(mtp: layer.Mtp, states: list[layer.State], hidden: Tensor) -> tuple[list[DraftInputs], list[Record]]:
    """Run the draft steps and record all that each computes, and what :func:`observe_draft_on` needs to repeat it."""
    inputs: list[DraftInputs] = []
    records: list[Record] = []
    tokens, before = states[0].tokens, torch.full_like(states[0].topk_indices, -1)
    for i, state in enumerate(states):
        records.append(_observe_draft(mtp, state, i, tokens, hidden, before, None))
        inputs.append(DraftInputs(tokens, hidden, before, records[-1]["topk_indices"]))
        tokens, hidden, before = records[-1]["tokens"], records[-1]["normed"], inputs[0].topk_used
    return inputs, records


def observe_draft_on(mtp: layer.Mtp, states: list[layer.State], inputs: Sequence[DraftInputs]) -> list[Record]:
    """Record each draft step on its given inputs, as :func:`observe_on` does.

    A step after the first finds the first's selection in the buffer, as it does where it selects none itself.
    """
    return [
        _observe_draft(mtp, state, n, i.tokens, i.hidden, i.topk_before, i.topk_used)
        for n, (state, i) in enumerate(zip(states, inputs, strict=True))
    ]


def _observe_draft(
    mtp: layer.Mtp, state: layer.State, n: int, tokens: Tensor, hidden: Tensor, before: Tensor, used: Tensor | None
) -> Record:
    record: Record = {}
    watched = _watch(mtp.block, state, before, used, record)
    (draft,) = [layer.draft_step(mtp, watched, tokens, hidden)] if n == 0 else layer.multi_step_decode(mtp, [watched], tokens, hidden)
    written = layer.written(mtp.block, state)
    if n > 0:
        del written["index_k"]  # read by this proposal's selections alone, which are compared; the next proposal writes it anew
    drafted = {"tokens": draft.tokens, "normed": draft.hidden, "logits": draft.logits}
    return {**record, **draft.out._asdict(), **drafted, **written}


_Given = TypeVar("_Given", Inputs, DraftInputs)


def moved(inputs: Sequence[_Given]) -> list[_Given]:
    """The inputs with each activation moved by about one bf16 ulp up or down, at random and seeded."""
    if not inputs:
        return []
    generator = torch.Generator(inputs[0].hidden.device).manual_seed(1)

    def move(x: Tensor) -> Tensor:
        sign = torch.empty(x.shape, device=x.device).uniform_(-1, 1, generator=generator).sign()
        return (x.float() * (1 + sign * 2**-8)).to(x.dtype)

    floats = ("hidden", "residual")
    return [dataclasses.replace(i, **{n: move(x) for n in floats if (x := getattr(i, n, None)) is not None}) for i in inputs]


def errors(each: layer.Layer, stock: Record, got: Record) -> dict[str, float]:
    """Relative errors of one layer's record, by quantity. Must run with no feature applied.

    Floats: Frobenius norm of the difference over that of stock. ``topk_indices``: share of the selected positions that
    differ, order aside; infinite where one repeats or is out of range. ``topk_ids``: share of the tokens whose experts are not
    those that stock chooses from the *same* logits; the layer's output, and what a draft step makes of it, is compared for tokens
    with stock's experts only, since a near tie in the logits rightly changes it. ``tokens``: share of those drafted that are not
    the first best of the *same* logits.
    """
    out: dict[str, float] = {}
    same = _sorted(stock["topk_ids"]).eq(_sorted(got["topk_ids"])).all(-1)
    for name, want in stock.items():
        have = got[name]
        if have.dtype != want.dtype or have.shape != want.shape:
            out[name] = torch.inf
        elif name == "topk_indices":
            out[name] = _set_difference(want, have)
        elif name == "topk_ids":
            d = each.dims
            of_same_logits = layer.grouped_topk(
                got["hidden"],
                got["router_logits"],
                d.num_experts_per_tok,
                True,
                d.n_group,
                d.topk_group,
                "sigmoid",
                d.routed_scaling_factor,
                each.e_score_correction_bias,
            )[1]
            out[name] = 1.0 - _sorted(of_same_logits).eq(_sorted(have)).all(-1).float().mean().item()
        elif name == "tokens":
            out[name] = got["logits"].argmax(-1).ne(have).float().mean().item()
        else:
            want, have = (want[same], have[same]) if name in ("hidden", "normed", "logits") else (want, have)
            scale = want.float().norm()
            error = ((have.float() - want.float()).norm() / scale.clamp(min=torch.finfo(torch.float32).tiny)).item()
            out[name] = error if error == error else torch.inf
    return out


def draft_errors(mtp: layer.Mtp, stock: Sequence[Record], got: Sequence[Record]) -> list[dict[str, float]]:
    """:func:`errors` of each draft step, under names that begin with "draft".

    A step after the first may select what stock selects there, or what stock's first step selected: which of the two makes the
    better draft is the model's matter, and no token of the target depends on it. All else is compared on stock's own selection.
    """
    out = []
    for n, (want, have) in enumerate(zip(stock, got, strict=True)):
        errs = errors(mtp.block, want, have)
        if n > 0:
            errs["topk_indices"] = min(errs["topk_indices"], _set_difference(stock[0]["topk_indices"], have["topk_indices"]))
        out.append({f"draft {name}": err for name, err in errs.items()})
    return out


def _sorted(ids: Tensor) -> Tensor:
    return ids.sort(-1).values


def _set_difference(want: Tensor, have: Tensor) -> float:
    top = int(want.max())
    if int(have.max()) > top + layer.BLOCK_SIZE or int(have.min()) < -1:
        return torch.inf
    masks = []
    for positions in (want, have):
        mask = torch.zeros(len(want), top + layer.BLOCK_SIZE + 2, dtype=torch.int32, device=want.device)
        mask.scatter_add_(1, positions.long() + 1, torch.ones_like(positions))
        masks.append(mask[:, 1:])
    if int(masks[1].max()) > 1:
        return torch.inf
    return (masks[0] != masks[1]).sum().item() / (2 * masks[0].sum().item())


def worst(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest of each quantity over the layers."""
    out: dict[str, float] = {}
    for errs in each:
        for name, err in errs.items():
            out[name] = max(out.get(name, 0.0), err)
    return out


def judge(errs: Mapping[str, float], floors: Mapping[str, float]) -> Verdict:
    """Hold errors against :data:`MARGIN` times stock's own, and report the quantity that stands worst against its bound."""
    bounds = {name: 0.0 if name.endswith(("topk_ids", "tokens")) else MARGIN * floor for name, floor in floors.items()}

    def excess(name: str) -> float:
        return errs[name] / bounds[name] if bounds[name] else (torch.inf if errs[name] else 0.0)

    name = max(errs, key=excess)
    note = "equal" if not errs[name] else name if math.isfinite(errs[name]) else f"{name} is not finite, out of range or of another form"
    return Verdict(errs[name] <= bounds[name], note, errs[name], bounds[name])


def _layer_run(args: argparse.Namespace) -> Callable[[], Report]:
    device = bench.default_device()
    on_gpu = device.type == "cuda"
    name = args.model or "glm52"
    if name not in layer.MODELS:
        raise ValueError(f"--model: expected {' or '.join(layer.MODELS)} with --engine layer, got {name!r}")
    dims = layer.MODELS[name]
    if on_gpu:
        major = torch.cuda.get_device_capability(device)[0]
        if major < 9:
            raise ValueError(f"device: expected compute capability 9.0 or newer, got {major}.x")
        dims = dataclasses.replace(dims, kv_cache_dtype="fp8" if major == 10 else "fp8_ds_mla")
    else:
        dims = dims.scaled()
    sizes = batches(args.batch)
    options = {
        "layers": positive("layers", args.layers, 4),
        "spec": positive("spec", args.spec, 3, least=0),
        "context": positive("context", args.context, 4096 if on_gpu else 512),
        "rounds": positive("rounds", args.rounds, 30 if on_gpu else 5),
    }
    if options["context"] <= sizes[-1]:
        raise ValueError(f"--context: expected more than the largest batch ({sizes[-1]}), got {options['context']}")
    wanted, environ = choose(args.features)
    statuses = [s for s in registry.survey(registry.cuda_context(), environ, host="lldecode") if s.name in wanted]
    return lambda: measure_layers(dims, device, sizes, statuses, quiet=args.json, **options)


def measure_layers(
    dims: layer.Dims,
    device: torch.device,
    sizes: Sequence[int],
    statuses: Sequence[registry.Status],
    *,
    layers: int,
    spec: int,
    context: int,
    rounds: int,
    quiet: bool = True,
) -> Report:
    """Run the ablation on the embedded layers; whatever happens, the originals are back when it returns or raises."""
    notes = {s.name: _note(s) for s in statuses}
    features = [s.feature for s in statuses if s.feature is not None and notes[s.name].state == "measured"]
    combos = combinations([f.name for f in features])
    targets = sorted({p.attr for f in features for p in f.patches if p.host == "lldecode"})
    originals = {attr: getattr(layer, attr) for attr in targets}
    engine = Engine(features, host="lldecode")
    before = declined()
    results: list[Result] = []
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)  # at these sizes OpenMP's spinning costs more than it gives, tenfold on a busy machine
    try:
        with progress(len(sizes) * (len(combos) + rounds), quiet) as step:
            step("building the layers")
            chain = Chain.build(dims, sizes[-1], context, device, layers, spec)
            for size in sizes:
                results += _measure_size(engine, combos, chain.head(size), device, rounds, step)
    finally:
        torch.set_num_threads(threads)
        engine.reconcile(())
        if changed := [attr for attr, f in originals.items() if getattr(layer, attr) is not f]:
            raise RuntimeError(f"not restored: lldecode.layer:{', '.join(changed)}")
    for name, reasons in declined().items():
        new = {reason: n - before.get(name, {}).get(reason, 0) for reason, n in reasons.items()}
        if name in notes:
            notes[name] = dataclasses.replace(notes[name], declined={reason: n for reason, n in new.items() if n})
    return Report(
        engine="layer",
        model=dims.name,
        unit="µs a step" if spec else "µs a layer",
        note="" if device.type == "cuda" else CPU_NOTE,
        gpu=bench.gpu_name(),
        parameters={"layers": layers, "spec": spec, "context": context, "rounds": rounds},
        versions=versions(),
        utc=bench.utc(),
        features=list(notes.values()),
        results=results,
        ok=all(r.ok for r in results),
    )


def _note(status: registry.Status) -> FeatureNote:
    if status.state != "on" or status.feature is None:
        return FeatureNote(status.name, status.version, "skipped", status.reason or status.state)
    if not any(p.host == "lldecode" for p in status.feature.patches):
        return FeatureNote(status.name, status.version, "skipped", "patches nothing in the embedded layers; use --engine vllm")
    return FeatureNote(status.name, status.version, "measured")


@dataclasses.dataclass(frozen=True)
class Chain:
    """What is measured: decoder layers, then the draft steps that start from the output of the last one."""

    layers: list[layer.Layer]
    state: layer.State
    mtp: layer.Mtp | None
    draft_states: list[layer.State]

    @classmethod
    def build(cls, dims: layer.Dims, batch: int, context: int, device: torch.device, layers: int, spec: int) -> "Chain":
        stack, state = layer.build(dims, batch, context, device, layers=layers, spec=spec)
        mtp, draft_states = layer.build_draft(dims, state, spec) if spec else (None, [])
        return cls(stack, state, mtp, draft_states)

    def head(self, batch: int) -> "Chain":
        return Chain(self.layers, self.state.head(batch), self.mtp, [s.head(batch) for s in self.draft_states])

    def run(self) -> None:
        outs = layer.step(self.layers, self.state)
        if self.mtp:
            layer.propose(self.mtp, self.draft_states, outs[-1].hidden)

    def observe(self) -> tuple[tuple[list[Inputs], list[DraftInputs]], tuple[list[Record], list[Record]]]:
        """What stock's layers and draft steps started from, and what they computed."""
        inputs, records = observe(self.layers, self.state)
        drafts = observe_draft(self.mtp, self.draft_states, records[-1]["hidden"]) if self.mtp else ([], [])
        return (inputs, drafts[0]), (records, drafts[1])

    def observe_on(self, inputs: Sequence[Inputs], drafts: Sequence[DraftInputs]) -> tuple[list[Record], list[Record]]:
        return observe_on(self.layers, self.state, inputs), observe_draft_on(self.mtp, self.draft_states, drafts) if self.mtp else []

    def errors(self, stock: tuple[list[Record], list[Record]], got: tuple[list[Record], list[Record]]) -> dict[str, float]:
        """The largest of each quantity; must run with no feature applied."""
        of_layers = [errors(each, *pair) for each, *pair in zip(self.layers, stock[0], got[0], strict=True)]
        return worst(of_layers + (draft_errors(self.mtp, stock[1], got[1]) if self.mtp else []))


def _measure_size(
    engine: Engine,
    combos: Mapping[str, frozenset[str]],
    chain: Chain,
    device: torch.device,
    rounds: int,
    step: Callable[[str], None],
) -> list[Result]:
    batch = len(chain.state.hidden)
    engine.reconcile(())
    inputs, stock = chain.observe()
    floors = chain.errors(stock, chain.observe_on(moved(inputs[0]), moved(inputs[1])))
    for states, name in (([chain.state], "topk_indices"), (chain.draft_states, "draft topk_indices")):
        if any(s.seq_lens.max() > chain.layers[0].dims.index_topk for s in states):
            floors[name] = max(floors[name], TOPK_FLOOR)
    records: dict[str, tuple[list[Record], list[Record]]] = {}
    replays: dict[str, Callable[[], None]] = {}
    verdicts: dict[str, Verdict] = {}
    for combo, chosen in combos.items():
        step(f"batch {batch}: checking {combo}")
        try:
            engine.reconcile(chosen)
            records[combo] = chain.observe_on(*inputs)
            replays[combo] = bench.capture([chain.run], device)
        except Exception as e:  # one feature's failure must not cost the other combinations' results
            verdicts[combo] = Verdict(False, f"{type(e).__name__}: {e}")
    engine.reconcile(())
    for combo, record in records.items():
        if combo not in verdicts:
            verdicts[combo] = judge(chain.errors(stock, record), floors)
    samples = bench.time_rounds(
        {combo: replay for combo, replay in replays.items() if verdicts[combo].ok},
        rounds=rounds,
        device=device,
        before=(lambda combo: engine.reconcile(combos[combo])) if device.type == "cpu" else None,
        after_round=lambda: step(f"batch {batch}: timing"),
    )
    share = 1 if chain.mtp else len(chain.layers)
    each = {combo: [us / share for us in values] for combo, values in samples.items()}
    return [result(combo, chosen, batch, each.get(combo), each.get("none"), verdicts[combo]) for combo, chosen in combos.items()]
