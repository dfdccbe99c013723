import dataclasses
from pathlib import Path

import pytest

import figures
from lldecode import bench


def row(provider, case, us, gpu="NVIDIA H200", sha="0" * 12):
    made = {f.name: "" for f in dataclasses.fields(bench.Row)}
    made |= {
        "feature": "x",
        "provider": provider,
        "case": case,
        "gpu": gpu,
        "src_sha": sha,
        "torch": "2.11.0",
        "utc": "2026-01-02T03:04:05Z",
    }
    made |= {"us_p20": us, "us_p50": us, "us_p80": us, "gbps": 1.0, "pct_roof": None, "max_err": 0.0}
    return bench.Row(**made)


@pytest.fixture
def root(tmp_path):
    rows = [row("lldecode", "M=1", 2.0), row("lldecode", "M=2", 4.0), row("cublas", "M=1", 8.0), row("cublas", "M=2", 4.0)]
    bench.write_csv(tmp_path / "packages/x/bench/results/h200.csv", rows)
    return tmp_path


def test_figures_come_from_the_csv(root):
    text = figures.render("before\n<!-- figures: x -->\nold\n<!-- end figures -->\nafter\n", root)
    assert "| NVIDIA H200 | cublas | 2 | 2.00x | 1.00x (M=2) | 4.00x (M=1) |" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert figures.render(text, root) == text


def test_a_case_that_only_one_ran_is_not_compared(root):
    rows = [row("lldecode", "M=1", 1.0), row("cublas", "M=1", 3.0), row("cublas", "M=64", 1.0)]
    assert "| cublas | 1 | 3.00x |" in figures.summary(rows)


def test_cases_without_a_peer_are_told_apart():
    rows = [row("lldecode", "M=1", 1.0), row("cublas", "M=1", 3.0), row("lldecode", "M=1 pdl=0", 1.5), row("lldecode", "M=2 pdl=0", 2.5)]
    assert "NVIDIA H200: 2 more cases without a peer, 1.50 to 2.50 us." in figures.summary(rows)


def test_cases_of_calls_alone_are_summarized_apart():
    rows = [row("lldecode", "M=1", 1.0), row("cublas", "M=1", 8.0), row("lldecode", "M=1 alone", 4.0), row("cublas", "M=1 alone", 6.0)]
    lines = figures.summary(rows).splitlines()
    assert lines[2:4] == [
        "| NVIDIA H200 | cublas | 1 | 8.00x | 8.00x (M=1) | 8.00x (M=1) |",
        "| NVIDIA H200 | cublas, alone | 1 | 1.50x | 1.50x (M=1 alone) | 1.50x (M=1 alone) |",
    ]


def test_an_ablation_is_a_table_of_its_rows(tmp_path):
    columns = ["combo", "batch", "us_p50", "ok", "features", "unit", "gpu", "vllm", "utc"]
    same = {"unit": "µs a token", "gpu": "G", "vllm": "0", "utc": "2026-01-02T03:04:05Z"}
    found = [("none", 4, 4000.4, True), ("none", 16, 8000.0, True), ("x", 4, 3800.0, True), ("x", 16, 8080.0, False), ("y", 4, None, False)]
    found += [("all", 4, 3000.0, True), ("all", 16, None, False), ("y", 16, None, False)]
    features = {"none": "", "x": "x", "y": "y", "all": "x,y"}
    rows = [dict(zip(columns, (*row, features[row[0]]), strict=False)) | same for row in found]
    bench.write_table(tmp_path / figures.ENGINE / "h.csv", columns, rows)
    table = figures.render("<!-- figures: h.csv -->\n<!-- end figures -->", tmp_path).splitlines()[1:-1]
    assert table == [
        "| features | batch 4 | batch 16 |",
        "|---|---|---|",
        "| none | 4,000 | 8,000 |",
        "| x | 3,800 (-5.0 %) | 8,080 (+1.0 %), tokens differ |",
        "| x + y | 3,000 (-25.0 %) | not timed |",
        "",
        "P50 in µs a token; G, vLLM 0, measured 2026-01-02.",
    ]


def test_not_measured(tmp_path):
    assert "Not measured yet." in figures.render("<!-- figures: x -->\n<!-- end figures -->", tmp_path)


def test_the_readmes_are_current():
    for file in [figures.ROOT / "README.md", *figures.ROOT.glob("packages/*/README.md")]:
        text = Path(file).read_text()
        assert figures.render(text) == text, f"{file}: run tools/figures.py"
