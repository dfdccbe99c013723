import csv
import itertools

import pytest
import torch

from lldecode import bench

CPU = torch.device("cpu")


def a_row(**changes) -> bench.Row:
    values = dict(
        feature="fake",
        version="1.2.3",
        src_sha="0123456789ab",
        provider="lldecode",
        case="M=4 N=8 K=16",
        us_p20=1.0,
        us_p50=2.125,
        us_p80=3.5,
        gbps=12.3,
        pct_roof=45.6,
        max_err=1.25e-3,
        gpu="NVIDIA H200",
        torch="2.11.0",
        triton="3.6.0",
        cutlass_dsl="4.6.0",
        vllm="",
        utc="2026-01-02T03:04:05Z",
    )
    return bench.Row(**(values | changes))


def test_percentiles_interpolate_and_take_one_sample():
    assert bench.percentiles([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == pytest.approx((2.0, 3.5, 5.0))
    assert bench.percentiles([7.0]) == (7.0, 7.0, 7.0)


def test_interleaved_rotates_copies_and_providers():
    log: list[str] = []
    calls = {name: [lambda tag=f"{name}{i}": log.append(tag) for i in range(3)] for name in "ab"}
    samples = bench.interleaved(calls, rounds=4, device=CPU)
    assert {name: len(s) for name, s in samples.items()} == {"a": 4, "b": 4}
    assert all(us > 0 for s in samples.values() for us in s)
    assert all(log[i : i + 3] in (["a0", "a1", "a2"], ["b0", "b1", "b2"]) for i in range(0, len(log), 3))
    order = [tag[0] for tag in log[::3]]
    timed = [tuple(pair) for pair in zip(order[-8::2], order[-7::2], strict=True)]
    assert timed == [("a", "b"), ("b", "a")] * 2


def test_interleaved_reports_time_per_call(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(ticks) * 12e-6)
    samples = bench.interleaved({"one": [lambda: None], "four": [lambda: None] * 4}, rounds=2, device=CPU)
    assert samples == {"one": pytest.approx([12.0, 12.0]), "four": pytest.approx([3.0, 3.0])}


class Clock:
    """Stands for ``perf_counter``: what runs says how many microseconds it took."""

    def __init__(self, monkeypatch):
        self.us, self.log = 0.0, []
        monkeypatch.setattr(bench.time, "perf_counter", lambda: self.us * 1e-6)

    def takes(self, name, us):
        def thunk():
            self.us += us(len(self.log)) if callable(us) else us
            self.log.append(name)

        return thunk


def test_a_call_alone_is_what_it_adds_to_the_kernel_before_it(monkeypatch):
    clock = Clock(monkeypatch)
    calls = {"one": [clock.takes("a", 5.0)], "three": [clock.takes("b", 7.0)] * 3}
    samples = bench.interleaved(calls, rounds=2, device=CPU, between=clock.takes("-", 2.0))
    assert samples == {"one": pytest.approx([5.0, 5.0]), "three": pytest.approx([7.0, 7.0])}


def test_the_kernel_between_comes_before_each_call_and_is_timed_in_the_same_rounds(monkeypatch):
    clock = Clock(monkeypatch)
    calls = {"a": [clock.takes("a", 1.0)] * 2, "b": [clock.takes("b", 1.0)] * 2}
    bench.interleaved(calls, rounds=3, device=CPU, between=clock.takes("-", 1.0))
    text = "".join(clock.log)
    captured, rounds = text[:10], text[10:]
    assert captured == "---a-a-b-b"
    assert [sorted(rounds[i : i + 10]) for i in range(0, 50, 10)] == [sorted("---a-a-b-b")] * 5
    assert all(text[i - 1] == "-" for i, ran in enumerate(text) if ran != "-")


def test_a_slow_round_of_the_kernel_between_makes_no_call_fast(monkeypatch):
    clock = Clock(monkeypatch)
    slow = iter([1.0] * 6 + [90.0] + [1.0] * 6)  # it runs twice at capture and twice a round, of which the first two warm up
    samples = bench.interleaved({"a": [clock.takes("a", 4.0)]}, rounds=3, device=CPU, between=clock.takes("-", lambda _: next(slow)))
    assert samples["a"] == pytest.approx([4.0, 4.0, 4.0])


@pytest.mark.parametrize("us", [0.0, -1.0])
def test_a_sample_that_is_not_longer_than_the_kernel_between_is_an_error(monkeypatch, us):
    clock = Clock(monkeypatch)
    calls = {"good": [clock.takes("a", 1.0)] * 2, "bad": [clock.takes("b", us)] * 2}
    message = rf"^bad: expected more than the 6.000 us of `between` alone, got {6 + 2 * us:.3f} us for 2 calls$"
    with pytest.raises(RuntimeError, match=message):
        bench.interleaved(calls, rounds=2, device=CPU, between=clock.takes("-", 3.0))


def test_hooks_run_outside_the_timed_span():
    log: list[str] = []
    bench.time_rounds({"a": lambda: log.append("run")}, rounds=1, device=CPU, before=log.append, after_round=lambda: log.append("round"))
    assert log == ["a", "run"] * 3 + ["round"]


@pytest.mark.parametrize(
    ("calls", "rounds", "message"),
    [({}, 1, "expected at least one"), ({"a": []}, 1, r"got none for \['a'\]"), ({"a": [lambda: None]}, 0, "rounds: expected at least 1")],
)
def test_interleaved_refuses(calls, rounds, message):
    with pytest.raises(ValueError, match=message):
        bench.interleaved(calls, rounds=rounds, device=CPU)


def test_cold_copies_exceed_three_times_the_l2(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"L2_cache_size": 60 << 20}))
    for nbytes in (1 << 20, 3 << 20, 32_243_712):
        n = bench.cold_copies(nbytes, "cuda")
        assert (n - 1) * nbytes <= 3 * (60 << 20) < n * nbytes
    assert bench.cold_copies(1 << 40, "cuda") == 2
    assert bench.cold_copies(1, "cuda") == bench.MAX_COPIES
    assert bench.cold_copies(1, "cpu") == 2
    with pytest.raises(ValueError, match="nbytes: expected a positive count, got 0"):
        bench.cold_copies(0, "cpu")


def test_row_fills_versions_and_roof(monkeypatch):
    monkeypatch.setattr(bench, "package_sha", lambda package: {"lldecode_some_thing": "feedfeedfeed"}[package])
    monkeypatch.setattr(bench, "gpu_name", lambda: "NVIDIA H200")
    r = bench.row("some-thing", "cublas", "M=1", [10.0, 10.0, 10.0], 24_000_000, 1.23456e-3)
    assert (r.src_sha, r.us_p20, r.us_p50, r.us_p80, r.gbps, r.pct_roof, r.max_err) == ("feedfeedfeed", 10, 10, 10, 2400.0, 50.0, 1.23e-3)
    assert r.torch == torch.__version__.split("+")[0] and r.version == ""
    monkeypatch.setattr(bench, "gpu_name", lambda: "unheard of")
    assert bench.row("some-thing", "cublas", "M=1", [10.0], 1, 0.0).pct_roof is None


def test_csv_is_sorted_whole_and_reads_back(tmp_path):
    path = tmp_path / "new" / "h200.csv"
    rows = [a_row(case=f"M={m}", provider=p) for m in (16, 1, 2) for p in ("vllm-0.33.0", "cublas")]
    rows.append(a_row(case="M=1", provider="torch", pct_roof=None))
    bench.write_csv(path, [a_row(case="stale")])
    bench.write_csv(path, rows)
    assert path.read_text().splitlines()[0] == (
        "feature,version,src_sha,provider,case,us_p20,us_p50,us_p80,gbps,pct_roof,max_err,gpu,torch,triton,cutlass_dsl,vllm,utc"
    )
    back = bench.read_csv(path)
    assert [(r.case, r.provider) for r in back] == [
        ("M=1", "cublas"),
        ("M=1", "torch"),
        ("M=1", "vllm-0.33.0"),
        ("M=2", "cublas"),
        ("M=2", "vllm-0.33.0"),
        ("M=16", "cublas"),
        ("M=16", "vllm-0.33.0"),
    ]
    assert set(back) == set(rows)
    assert [p.name for p in path.parent.iterdir()] == ["h200.csv"]


def test_failed_write_leaves_the_old_csv(tmp_path, monkeypatch):
    path = tmp_path / "h200.csv"
    bench.write_csv(path, [a_row()])
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(csv.DictWriter, "writerows", fail)
    with pytest.raises(OSError, match="disk full"):
        bench.write_csv(path, [a_row(case="other")])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["h200.csv"]


def test_foreign_csv_is_refused(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("feature,us\nfake,1\n")
    with pytest.raises(ValueError, match="expected columns feature,version"):
        bench.read_csv(path)


def test_plot_draws_every_provider(tmp_path):
    path = tmp_path / "plots" / "p.png"
    bench.plot([a_row(case=c, provider=p) for c, p in (("M=1", "cublas"), ("M=1", "lldecode"), ("M=2", "lldecode"))], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_gpu_time_of_a_cold_read_is_near_the_roof():
    n = 64 << 20
    copies = [torch.ones(n // 4, device="cuda") for _ in range(bench.cold_copies(n))]
    out = torch.empty((), device="cuda")
    us = bench.percentiles(bench.interleaved({"sum": [lambda x=x: torch.sum(x, dim=0, out=out) for x in copies]}, rounds=10)["sum"])[1]
    roof = bench.MEMORY_ROOF.get(bench.gpu_name())
    if roof is None:
        pytest.skip(f"no memory roof is listed for {bench.gpu_name()}")
    assert 0.3 < n / us * 1e6 / roof <= 1.05
