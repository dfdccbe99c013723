"""The one harness: cold-L2 CUDA-graph replays, providers interleaved round by round, and the CSV that every published figure comes from."""

import csv
import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from lldecode.source import package_sha

MEMORY_ROOF = {
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA B200": 8.0e12,
    "NVIDIA B300": 8.0e12,
}
"""Peak device-memory bandwidth in bytes per second by device name (NVIDIA's data sheets)."""

MAX_COPIES = 512
"""Calls in one graph at most: beyond that a tiny weight costs more capture time than it tells."""


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def cold_copies(nbytes: int, device: torch.device | str | None = None) -> int:
    """How many rotating copies of `nbytes` of weights make each use find a cold L2.

    Returns:
        The count at which the copies exceed three times the L2, from 2 to :data:`MAX_COPIES`; 2 on a CPU.

    Raises:
        ValueError: `nbytes` is not positive.
    """
    if nbytes <= 0:
        raise ValueError(f"nbytes: expected a positive count, got {nbytes}")
    device = default_device() if device is None else torch.device(device)
    if device.type != "cuda":
        return 2
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(MAX_COPIES, 3 * l2 // nbytes + 1))


def capture(thunks: Sequence[Callable[[], object]], device: torch.device | str | None = None) -> Callable[[], None]:
    """Run `thunks` once, then return what runs them all again: the replay of one CUDA graph, or a plain loop on a CPU."""
    device = default_device() if device is None else torch.device(device)
    if device.type != "cuda":
        for thunk in thunks:
            thunk()
        return lambda: _call_all(thunks)
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _call_all(thunks)  # compiles and warms up what must not happen inside a capture
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                _call_all(thunks)
        torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def _call_all(thunks: Sequence[Callable[[], object]]) -> None:
    for thunk in thunks:
        thunk()


def time_rounds(
    replays: Mapping[str, Callable[[], None]],
    *,
    rounds: int = 30,
    device: torch.device | str | None = None,
    before: Callable[[str], object] | None = None,
    after_round: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Time each of `replays` once a round, in an order that rotates, so that drift and neighbours reach all of them alike.

    Args:
        replays: what to time, by name, as :func:`capture` returns it.
        rounds: samples of each.
        device: a CUDA device is timed by its events, a CPU by ``perf_counter``.
        before: called with the name, outside the timed span.
        after_round: called at the end of each round.

    Returns:
        By name, `rounds` samples in microseconds a replay.

    Raises:
        ValueError: nothing to time, or `rounds` is not positive.
    """
    if not replays:
        raise ValueError("replays: expected at least one, got none")
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    device = default_device() if device is None else torch.device(device)
    names = list(replays)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-2, rounds):  # two rounds of warm-up
        for j in range(len(names)):
            name = names[(i + j) % len(names)]
            if before is not None:
                before(name)
            us = _time(replays[name], device)
            if i >= 0:
                samples[name].append(us)
        if after_round is not None and i >= 0:
            after_round()
    return samples


def _time(replay: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        t = time.perf_counter()
        replay()
        return (time.perf_counter() - t) * 1e6
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_QUEUE_CYCLES)  # the launch below is enqueued before the GPU reaches it, so no launch latency is timed
        start.record()
        replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


_QUEUE_CYCLES = 400_000  # 0.2 ms, for up to 2 * MAX_COPIES nodes


def interleaved(
    calls: Mapping[str, Sequence[Callable[[], object]]],
    *,
    rounds: int = 30,
    device: torch.device | str | None = None,
    between: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Time several providers of the same work against each other.

    Without `between` a call follows the last one, and where both are launched with programmatic dependent launch (PDL) its launch, its
    ramp-up and the reads that wait for nobody hide behind that one. With `between` the kernel that it launches runs before each call.
    An ordinary one lets no dependent start early and starts itself when the call before it has ended: a call is timed alone, from launch
    to end. With one that is launched with PDL and lets its dependent start early it is what a call adds to a chain of that kernel, whose
    launches hide, too. The time of that kernel is that of a graph of as many of it and nothing else, timed in the same rounds; the
    median of these is subtracted from every sample, so that a slow round of that graph makes no sample fast.

    Args:
        calls: by provider, one thunk for each copy of the weights (see :func:`cold_copies`). On a GPU a provider's thunks
            are captured into one CUDA graph.
        rounds: samples of each provider.
        between: launches one kernel that neither reads nor writes much: what it reads from memory because a call has evicted it counts
            as the call's. No ``copy_``: of dense tensors a graph holds no kernel of it.

    Returns:
        By provider, `rounds` samples in microseconds a call, without `between`.

    Raises:
        ValueError: no provider, a provider without thunks, or `rounds` is not positive.
        RuntimeError: a sample is not longer than `between` alone: there is no time of the call in it.
    """
    if empty := [name for name, thunks in calls.items() if not thunks]:
        raise ValueError(f"calls: expected at least one thunk a provider, got none for {empty}")
    if between is None:
        replays = {name: capture(thunks, device) for name, thunks in calls.items()}
        samples = time_rounds(replays, rounds=rounds, device=device)
        return {name: [us / len(calls[name]) for us in samples[name]] for name in calls}
    counts = {len(thunks) for thunks in calls.values()}
    replays = {f"between {n}": capture([between] * n, device) for n in counts}
    replays |= {f"call {name}": capture([f for thunk in thunks for f in (between, thunk)], device) for name, thunks in calls.items()}
    samples = time_rounds(replays, rounds=rounds, device=device)
    alone = {n: percentiles(samples[f"between {n}"])[1] for n in counts}
    for name, thunks in calls.items():
        if (least := min(samples[f"call {name}"])) <= alone[len(thunks)]:
            raise RuntimeError(
                f"{name}: expected more than the {alone[len(thunks)]:.3f} us of `between` alone, got {least:.3f} us for {len(thunks)} calls"
            )
    return {name: [(us - alone[len(thunks)]) / len(thunks) for us in samples[f"call {name}"]] for name, thunks in calls.items()}


def percentiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile, interpolated linearly."""
    p20, p50, p80 = torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return p20, p50, p80


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured (case, provider): a line of a results CSV.

    Attributes:
        src_sha: hash of the feature's sources that were measured; for other providers, of the run they were compared in.
        provider: ``lldecode cublas torch vllm-0.26.0 vllm-0.33.0 fused_a``.
        us_p20, us_p50, us_p80: microseconds a call.
        gbps: bytes moved per second at p50, in 1e9.
        pct_roof: `gbps` in percent of the device's memory roof; None where the roof is not known.
        max_err: largest error found by the check that preceded the timing.
    """

    feature: str
    version: str
    src_sha: str
    provider: str
    case: str
    us_p20: float
    us_p50: float
    us_p80: float
    gbps: float
    pct_roof: float | None
    max_err: float
    gpu: str
    torch: str
    triton: str
    cutlass_dsl: str
    vllm: str
    utc: str


COLUMNS = tuple(f.name for f in dataclasses.fields(Row))
_FLOATS = ("us_p20", "us_p50", "us_p80", "gbps", "max_err")


def row(feature: str, provider: str, case: str, samples: Sequence[float], nbytes: int, max_err: float) -> Row:
    """Summarize the samples of one provider on the current device.

    Args:
        feature: name of an installed feature; its version and sources are recorded.
        samples: microseconds a call, from :func:`interleaved`.
        nbytes: bytes that one call must read and write at least.
    """
    p20, p50, p80 = percentiles(samples)
    gpu = gpu_name()
    bytes_per_s = nbytes / p50 * 1e6
    roof = MEMORY_ROOF.get(gpu)
    return Row(
        feature=feature,
        version=version_of(f"lldecode-{feature}"),
        src_sha=package_sha(f"lldecode_{feature.replace('-', '_')}"),
        provider=provider,
        case=case,
        us_p20=round(p20, 3),
        us_p50=round(p50, 3),
        us_p80=round(p80, 3),
        gbps=round(bytes_per_s / 1e9, 1),
        pct_roof=None if roof is None else round(100 * bytes_per_s / roof, 1),
        max_err=float(f"{max_err:.3g}"),
        gpu=gpu,
        torch=version_of("torch"),
        triton=version_of("triton"),
        cutlass_dsl=version_of("nvidia-cutlass-dsl"),
        vllm=version_of("vllm"),
        utc=utc(),
    )


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def version_of(dist: str) -> str:
    """Installed version of a distribution, empty where it is not installed."""
    try:
        return importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError:
        return ""


def utc() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def natural(text: str) -> list[tuple[int, int, str]]:
    """Sort key under which ``M=2`` comes before ``M=16``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text)]


def write_table(path: str | os.PathLike[str], columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Replace the CSV at `path` by `rows`; a reader sees the old file or the new one. None becomes an empty cell."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", newline="", delete=False) as f:
        try:
            writer = csv.DictWriter(f, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            f.flush()
            os.chmod(f.name, 0o644)
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


def write_csv(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Rewrite a results CSV whole, sorted by feature, case and provider, with the columns of :class:`Row`."""
    ordered = sorted(rows, key=lambda r: (r.feature, r.gpu, natural(r.case), natural(r.provider)))
    write_table(path, COLUMNS, [dataclasses.asdict(r) for r in ordered])


def read_csv(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a results CSV.

    Raises:
        ValueError: its columns are not those of :class:`Row`.
    """
    with open(path, newline="") as f:
        reader = csv.DictReader(f)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: expected columns {','.join(COLUMNS)}, got {','.join(reader.fieldnames or ())}")
        return [_parse(cells) for cells in reader]


def _parse(cells: dict[str, str]) -> Row:
    values: dict[str, object] = dict(cells)
    values.update({name: float(cells[name]) for name in _FLOATS})
    values["pct_roof"] = float(cells["pct_roof"]) if cells["pct_roof"] else None
    return Row(**values)  # type: ignore[arg-type]


def plot(rows: Sequence[Row], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Grouped bars of p50, one group a case and one bar a provider, with whiskers from p20 to p80."""
    cases = sorted({r.case for r in rows}, key=natural)
    groups = {
        provider: {r.case: (r.us_p20, r.us_p50, r.us_p80) for r in rows if r.provider == provider}
        for provider in sorted({r.provider for r in rows}, key=natural)
    }
    bars(cases, groups, path, ylabel="µs a call", title=title)


def bars(
    cases: Sequence[str],
    groups: Mapping[str, Mapping[str, tuple[float, float, float]]],
    path: str | os.PathLike[str],
    *,
    ylabel: str,
    title: str = "",
) -> None:
    """Write a figure of grouped bars: by group and case, (low, middle, high). A missing case leaves its place empty."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = 0.8 / len(groups)
    fig = Figure(figsize=(max(6.0, 2 + 0.18 * len(cases) * (len(groups) + 1)), 4.5), layout="constrained")
    FigureCanvasAgg(fig)
    ax = fig.add_subplot()
    for i, (name, values) in enumerate(groups.items()):
        at = [j + (i - (len(groups) - 1) / 2) * width for j, case in enumerate(cases) if case in values]
        low, middle, high = zip(*(values[case] for case in cases if case in values), strict=True)
        whiskers = [[m - lo for lo, m in zip(low, middle, strict=True)], [hi - m for m, hi in zip(middle, high, strict=True)]]
        ax.bar(at, middle, width, yerr=whiskers, label=name, error_kw={"linewidth": 0.8})
    ax.set_xticks(range(len(cases)), cases, rotation=45 if len(cases) > 4 else 0, ha="right" if len(cases) > 4 else "center")
    ax.set_ylabel(ylabel)
    ax.set_title(title)
    fig.legend(loc="outside right upper")
    ax.spines[["top", "right"]].set_visible(False)
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)
