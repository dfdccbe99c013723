"""What bench/bench.py measures, on a CPU with a harness that measures nothing."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from lldecode.plan import Gemm

_spec = importlib.util.spec_from_file_location("skinny_gemm_bench", Path(__file__).parents[1] / "bench" / "bench.py")
assert _spec and _spec.loader
bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)


@pytest.mark.parametrize(("shape", "first", "peer"), [(Gemm(48, 64), "M", "cublas"), (Gemm(64, 24, 2, True), "T", "torch")])
def test_every_case_is_timed_in_every_situation(monkeypatch, shape, first, peer):
    def interleaved(calls, *, rounds, between=None):
        assert all(len(thunks) == 2 for thunks in calls.values())
        if between is not None:
            between()
        return {name: [(3.0 if between else 1.0) * (1 if name == "lldecode" else 2)] * rounds for name in calls}

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench.op, "choose", lambda *args: ("lldecode", None))
    monkeypatch.setattr(bench.bench, "interleaved", interleaved)
    rows = bench.compare(shape, (1, 8), None, 4)
    assert [(r.provider, r.case, r.us_p50) for r in rows] == [
        (provider, f"{first}={m} {shape}{situation}", us * slower)
        for m in (1, 8)
        for situation, us in (("", 1.0), (" behind", 3.0), (" alone", 3.0))
        for provider, slower in (("lldecode", 1), (peer, 2))
    ]
    assert all(r.max_err < 0.01 for r in rows), "M = 8 was checked with what the kernel between wrote"
    assert [r.case for r in bench.drawn(rows)] == ([f"M=8 {shape}"] * 2 if first == "M" else [])
