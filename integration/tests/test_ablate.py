import argparse
import ast
import csv
import io
import json
import random
import signal
import sys
import threading
import time
import types

import pytest
import torch

from lldecode import ablate, ablate_vllm, bench, feature, layer, registry
from lldecode.engine import Engine

TINY = ("--batch", "1,2", "--layers", "1", "--rounds", "1", "--context", "140", "--spec", "0")
DRAFT = ("--batch", "2", "--layers", "1", "--rounds", "1", "--context", "140", "--spec", "2")

FEATURE = """
from lldecode.feature import Feature, Patch, decline

def wrap(original):
    def router_gemm(x, weight, out_dtype):
        {body}
    return router_gemm

FEATURE = Feature({name!r}, "test", (Patch("lldecode.layer:router_gemm", wrap, why="test", remove_when="never"),), {more})
"""
RIGHT = "return (x.double() @ weight.double().T).to(out_dtype)"
WRONG = "return original(x, weight, out_dtype) * 1.05"


@pytest.fixture
def add(install, only_fakes, monkeypatch):
    """Installs features that patch the router; the layers run on the CPU."""
    monkeypatch.setattr(bench, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench, "gpu_name", lambda: "cpu")

    def add(name, body=RIGHT, more=""):
        install(name, FEATURE.format(name=name, body=body, more=more))

    return add


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def router_is_restored():
    original = layer.router_gemm
    yield
    restored = layer.router_gemm is original
    layer.router_gemm = original
    assert restored


def run(*argv):
    parser = argparse.ArgumentParser()
    ablate.add_arguments(parser)
    return ablate.run(parser.parse_args(argv))


def run_json(capsys, *argv):
    code = run(*argv, "--json")
    out, err = capsys.readouterr()
    assert err == ""
    return code, json.loads(out)


def test_combinations_are_none_alone_left_out_and_all():
    assert ablate.combinations(["a", "b", "c"]) == {
        "none": frozenset(),
        "a": {"a"},
        "b": {"b"},
        "c": {"c"},
        "all but a": {"b", "c"},
        "all but b": {"a", "c"},
        "all but c": {"a", "b"},
        "all": {"a", "b", "c"},
    }
    assert ablate.combinations(["a", "b"]) == {"none": frozenset(), "a": {"a"}, "b": {"b"}, "all": {"a", "b"}}
    assert ablate.combinations(["a"]) == {"none": frozenset(), "a": {"a"}}
    assert ablate.combinations([]) == {"none": frozenset()}


@pytest.mark.parametrize("model", layer.MODELS)
def test_every_combination_is_measured_and_checked(add, capsys, model):
    add("right")
    add("other", "return original(x, weight, out_dtype)")
    code, report = run_json(capsys, "--model", model, *TINY)
    assert code == 0 and report["ok"] and report["engine"] == "layer" and report["model"] == f"{model}-scaled"
    assert report["note"] == ablate.CPU_NOTE and report["gpu"] == "cpu" and report["unit"] == "µs a layer"
    assert report["versions"]["torch"] and report["parameters"] == {"layers": 1, "spec": 0, "context": 140, "rounds": 1}
    assert [(r["batch"], r["combo"]) for r in report["results"]] == [(b, c) for b in (1, 2) for c in ("none", "other", "right", "all")]
    for r in report["results"]:
        assert r["ok"] and r["us_p50"] > 0 and r["us_p20"] <= r["us_p50"] <= r["us_p80"] and r["max_err"] <= r["bound"]
        base = next(n for n in report["results"] if n["batch"] == r["batch"] and n["combo"] == "none")
        assert r["speedup"] == pytest.approx(base["us_p50"] / r["us_p50"], rel=1e-3)
    assert [(f["name"], f["state"], f["reason"]) for f in report["features"]] == [("other", "measured", ""), ("right", "measured", "")]


def test_only_the_chosen_features_are_measured(add, capsys):
    add("right")
    add("other")
    _, report = run_json(capsys, *TINY, "--features", "other")
    assert {r["combo"] for r in report["results"]} == {"none", "other"}
    assert {r["features"] for r in report["results"]} == {"", "other"}


@pytest.mark.parametrize(
    ("body", "note"),
    [
        (WRONG, "router_logits"),
        ("return original(x, weight, out_dtype).bfloat16()", "router_logits is not finite, out of range or of another form"),
        ("return original(x, weight, out_dtype) * float('nan')", "router_logits is not finite, out of range or of another form"),
        ("raise RuntimeError('kernel [3, 4] broke')", "RuntimeError: kernel [3, 4] broke"),
    ],
)
def test_wrong_feature_is_a_mismatch_without_a_number(add, capsys, body, note):
    add("right")
    add("wrong", body)
    assert run(*TINY) == 1
    assert "differs from stock" in capsys.readouterr().out
    code, report = run_json(capsys, *TINY)
    assert code == 1 and not report["ok"]
    for r in report["results"]:
        assert r["ok"] == ("wrong" not in r["features"] and r["combo"] != "all")
        assert (r["us_p50"] is None) == (r["speedup"] is None) == (not r["ok"])
        if not r["ok"]:
            assert r["note"] == note


def test_cache_that_is_not_written_is_a_mismatch(install, add, capsys):
    body = FEATURE.replace("router_gemm", "fused_norm_rope").replace("(x, weight, out_dtype):", "(*args, slot_mapping, **kw):")
    install("skips", body.format(name="skips", body="return original(*args, slot_mapping=slot_mapping * 0 + 1, **kw)", more=""))
    code, report = run_json(capsys, *TINY)
    assert code == 1
    assert all("not finite" in r["note"] for r in report["results"] if r["combo"] == "skips")


def test_wrong_selection_is_a_mismatch(install, add, capsys):
    body = FEATURE.replace("router_gemm", "sparse_attn_indexer").replace("(x, weight, out_dtype)", "(*args)")
    install("selects", body.format(name="selects", body="original(*args); args[-1][:, :20] = args[-1].max() - 1", more=""))
    code, report = run_json(capsys, *TINY)
    assert code == 1
    assert {r["note"] for r in report["results"] if r["combo"] == "selects"} == {
        "topk_indices is not finite, out of range or of another form"
    }


DRAFT_FEATURE = """
import dataclasses
from lldecode.feature import Feature, Patch

def wrap(original):
    def {target}(*args, **kw):
        {body}
    return {target}

FEATURE = Feature("drafts", "test", (Patch("lldecode.layer:{target}", wrap, why="test", remove_when="never"),))
"""
SHARE = "mtp, *rest = args; return original(dataclasses.replace(mtp, block=dataclasses.replace(mtp.block, indexer=None)), *rest)"


@pytest.mark.parametrize(
    ("target", "body", "note"),
    [
        ("multi_step_decode", "return original(*args)", "equal"),
        ("multi_step_decode", SHARE, "equal"),
        ("multi_step_decode", f"args[1][0].topk_indices[:, 0] = 1; {SHARE}", "draft topk_indices"),
        ("multi_step_decode", "return [d._replace(tokens=d.tokens + 1) for d in original(*args)]", "draft tokens"),
        ("multi_step_decode", "return [d._replace(hidden=d.hidden * 1.05) for d in original(*args)]", "draft normed"),
        ("draft_step", "d = original(*args); return d._replace(logits=d.logits * 1.05)", "draft logits"),
        ("fused_eh_norm", "return original(*args).roll(1, -1)", "draft"),
        ("step", "layers, state = args; return original(layers, dataclasses.replace(state, slot_mapping=state.slot_mapping * 0))", "draft"),
    ],
)
def test_draft_steps_are_checked(install, add, capsys, target, body, note):
    install("drafts", DRAFT_FEATURE.format(target=target, body=body))
    original = getattr(layer, target)
    code, report = run_json(capsys, *DRAFT)
    assert getattr(layer, target) is original
    assert report["unit"] == "µs a step" and report["parameters"]["spec"] == 2
    stock, got = report["results"]
    assert stock["ok"] and stock["note"] == "equal" and stock["us_p50"] > 0
    assert got["note"].startswith(note) and got["ok"] == (note == "equal") == (code == 0)


def test_three_draft_steps_are_the_default(add, capsys):
    add("right")
    _, report = run_json(capsys, *TINY[:-2])
    assert report["ok"] and report["parameters"]["spec"] == 3 and report["unit"] == "µs a step"


def test_a_step_takes_as_long_as_its_layers_and_draft_steps(add, monkeypatch):
    """The time of a step is that of the whole chain; without draft steps it is shared out among the layers."""
    monkeypatch.setattr(bench, "time_rounds", lambda replays, **_: {name: [100.0] for name in replays})
    for spec, expected in ((0, 50.0), (1, 100.0)):
        dims, device = layer.GLM52.scaled(), torch.device("cpu")
        report = ablate.measure_layers(dims, device, [1], [], layers=2, spec=spec, context=70, rounds=1)
        assert [r.us_p50 for r in report.results] == [expected]


def test_draft_starts_from_the_output_of_the_last_layer(monkeypatch):
    chain = ablate.Chain.build(layer.GLM52.scaled(), 1, 70, torch.device("cpu"), 2, 2)
    (_, drafts), (records, _) = chain.observe()
    assert torch.equal(drafts[0].hidden, records[1]["hidden"]) and torch.equal(drafts[0].tokens, chain.state.tokens)
    started = []
    monkeypatch.setattr(layer, "propose", lambda mtp, states, hidden: started.append((len(states), hidden)))
    chain.run()
    ((steps, hidden),) = started
    assert steps == 2 and torch.equal(hidden, layer.step(chain.layers, chain.state)[-1].hidden)


def test_later_draft_steps_may_keep_the_first_selection():
    """With more context than the top-k holds, where a step's own selection and the first step's differ."""
    chain = ablate.Chain.build(layer.GLM52.scaled(), 2, 300, torch.device("cpu"), 1, 3)
    (_, inputs), (_, stock) = chain.observe()
    selections = [r["topk_indices"] for r in stock]
    assert ablate._set_difference(selections[0], selections[2]) > 0.05
    for kept in selections:
        got = [*stock[:2], {**stock[2], "topk_indices": kept}]
        assert (ablate.draft_errors(chain.mtp, stock, got)[2]["draft topk_indices"] == 0) == (kept is not selections[1])
    assert torch.equal(inputs[2].topk_before, selections[0])
    got = [{**stock[0], "topk_indices": selections[2]}, *stock[1:]]
    assert ablate.draft_errors(chain.mtp, stock, got)[0]["draft topk_indices"] > 0.05


def test_refusals_and_declined_calls_are_listed_with_their_reason(add, install, capsys, monkeypatch):
    add("refused")
    monkeypatch.setattr(registry, "refusal", lambda feature, ctx, host: f"on {host}: not here" if feature.name == "refused" else None)
    add("flagged")
    add("unset", more="default='off'")
    monkeypatch.setattr(feature, "_declined", type(feature._declined)())
    add("declining", "decline('declining', 'M > 1'); return original(x, weight, out_dtype)")
    install("elsewhere", "from lldecode.feature import Feature\nFEATURE = Feature('elsewhere', 'test', ())\n")
    monkeypatch.setenv("LLDECODE_FLAGGED", "off")
    code, report = run_json(capsys, *TINY)
    assert code == 0
    assert {f["name"]: (f["state"], f["reason"]) for f in report["features"]} == {
        "refused": ("skipped", "on lldecode: not here"),
        "flagged": ("skipped", "set by LLDECODE_FLAGGED"),
        "unset": ("measured", ""),
        "declining": ("measured", ""),
        "elsewhere": ("skipped", "patches nothing in the embedded layers; use --engine vllm"),
    }
    assert {f["name"]: f["declined"] for f in report["features"]}["declining"]["M > 1"] > 1
    assert {r["combo"] for r in report["results"]} == {"none", "declining", "unset", "all"}
    run(*TINY)
    out = capsys.readouterr().out
    assert "skipped: set by LLDECODE_FLAGGED" in out and "calls: M > 1" in out and "these times say nothing about a GPU" in out


def test_csv_and_plot_hold_every_measured_combination(add, capsys, tmp_path):
    add("right")
    add("wrong", WRONG)
    csv_path, png_path = tmp_path / "out" / "a.csv", tmp_path / "out" / "a.png"
    assert run(*TINY, "--csv", str(csv_path), "--plot", str(png_path)) == 1
    with csv_path.open() as f:
        rows = list(csv.DictReader(f))
    assert tuple(rows[0]) == ablate.CSV_COLUMNS
    assert [(r["batch"], r["combo"], r["ok"]) for r in rows[:4]] == [
        ("1", "none", "True"),
        ("1", "right", "True"),
        ("1", "wrong", "False"),
        ("1", "all", "False"),
    ]
    assert rows[1]["gpu"] == "cpu" and rows[1]["torch"] and rows[2]["us_p50"] == ""
    assert png_path.read_bytes().startswith(b"\x89PNG")


def test_interrupt_restores_the_originals(add, capsys):
    add("right")
    add("zz-interrupts", "raise KeyboardInterrupt")
    assert run(*TINY) == 130
    assert capsys.readouterr().err.endswith("lldecode ablate: interrupted; everything was put back\n")


def test_originals_that_do_not_come_back_are_an_error(add, monkeypatch):
    class Sticky(Engine):
        def reconcile(self, enabled, required=()):
            if enabled:
                super().reconcile(enabled, required)

    add("right")
    monkeypatch.setattr(ablate, "Engine", Sticky)
    original = layer.router_gemm
    try:
        with pytest.raises(RuntimeError, match=r"not restored: lldecode\.layer:router_gemm"):
            run(*TINY)
    finally:
        layer.router_gemm = original


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--engine", "trt"), "--engine: expected layer or vllm, got 'trt'"),
        (("--model", "llama"), "--model: expected glm52 or dsv32 with --engine layer, got 'llama'"),
        (("--batch", "1,x"), "--batch: expected a whole number from 1, got 'x'"),
        (("--batch", ""), "--batch: expected a whole number from 1, got ''"),
        (("--rounds", "0"), "--rounds: expected a whole number from 1, got '0'"),
        (("--layers", "-1"), "--layers: expected a whole number from 1, got '-1'"),
        (("--spec", "-1"), "--spec: expected a whole number from 0, got '-1'"),
        (("--context", "16"), "--context: expected more than the largest batch (16), got 16"),
        (("--features", " ,"), "--features: expected names, got ' ,'"),
        (("--features", "typo"), "--features: unknown feature 'typo'; installed: right"),
        (("--features", "not-there"), "--features: not-there is not installed (package lldecode-not-there)"),
        (("--plot", "x.bmp"), "--plot: expected a name that ends in .png, .svg, .pdf, got 'x.bmp'"),
        (("--csv", "/"), "--csv: expected a file, got the directory '/'"),
        (("--csv", "/dev/null/x.csv"), "[Errno 17] File exists: '/dev/null'"),
        (("--input-len", "4"), "--input-len: not with --engine layer"),
        (("--at-once", "2"), "--at-once: not with --engine layer"),
        (("--gpus", "0"), "--gpus: not with --engine layer"),
        (("--trace", "t"), "--trace: not with --engine layer"),
        (("--engine", "vllm", "--layers", "4"), "--layers: not with --engine vllm"),
        (("--engine", "vllm", "--spec", "1"), "--spec: not with --engine vllm"),
        (("--engine", "vllm"), "--model: expected a path or model id with --engine vllm"),
        (("--engine", "vllm", "--model", "m", "--trace", "t"), "--trace: expected --profile beside it"),
        (
            ("--engine", "vllm", "--model", "m", "--gpus", "0", "--tensor-parallel-size", "2"),
            "--gpus: not with --tensor-parallel-size: set CUDA_VISIBLE_DEVICES",
        ),
        (("--engine", "vllm", "--model", "m", "--engine-args", "[1]"), "--engine-args: expected a JSON object, got '[1]'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(add, capsys, monkeypatch, argv, message):
    add("right")
    monkeypatch.setattr(bench, "version_of", lambda dist: "0.26.0")
    assert run(*argv) == 2
    assert capsys.readouterr() == ("", f"lldecode ablate: {message}\n")


def test_a_feature_that_is_named_is_asked_for(add, monkeypatch):
    for name in ("one", "two", "three"):
        add(name)
    monkeypatch.setenv("LLDECODE_THREE", "off")

    def flags_of(text):
        return {name: ablate.choose(text)[1][f"LLDECODE_{name.upper()}"] for name in ("one", "two", "three")}

    assert flags_of("two,three") == {"one": "auto", "two": "on", "three": "off"}
    assert flags_of(None) == {"one": "auto", "two": "auto", "three": "off"}


def test_bad_flag_is_exit_2(add, capsys, monkeypatch):
    add("right")
    monkeypatch.setenv("LLDECODE_RIGHT", "maybe")
    assert run(*TINY) == 2
    assert "LLDECODE_RIGHT: expected off, auto, on" in capsys.readouterr().err


def test_other_rounding_passes_and_a_small_scale_error_does_not(add, monkeypatch):
    layers, state = layer.build(layer.DSV32.scaled(), 4, 512, "cpu", layers=1)
    inputs, stock = ablate.observe(layers, state)
    floors = ablate.errors(layers[0], stock[0], ablate.observe_on(layers, state, ablate.moved(inputs))[0])
    linear = layer.linear

    def halves(x, weight):
        k = x.shape[1] // 2
        return (linear(x[:, :k], weight[:, :k]).float() + linear(x[:, k:], weight[:, k:]).float()).to(x.dtype)

    def verdict(fake):
        monkeypatch.setattr(layer, "linear", fake)
        record = ablate.observe_on(layers, state, inputs)[0]
        monkeypatch.setattr(layer, "linear", linear)
        return ablate.judge(ablate.errors(layers[0], stock[0], record), floors)

    assert verdict(linear) == ablate.Verdict(True, "equal", 0.0, verdict(linear).bound)
    rounded = verdict(halves)
    assert rounded.ok and rounded.max_err > 0
    assert not verdict(lambda x, weight: linear(x, weight) * 1.02).ok


def test_tokens_with_other_experts_leave_the_output_out_of_the_comparison():
    layers, state = layer.build(layer.GLM52.scaled(), 4, 140, "cpu")
    _, (stock,) = ablate.observe(layers, state)
    got = {name: t.clone() for name, t in stock.items()}
    logits = got["router_logits"]
    kept, out = stock["topk_ids"][1, 0], next(e for e in range(32) if e not in stock["topk_ids"][1].tolist())
    logits[1, kept], logits[1, out] = -20.0, 20.0
    got["topk_ids"] = torch.where(got["topk_ids"] == kept, out, got["topk_ids"]).where(torch.arange(4)[:, None] == 1, stock["topk_ids"])
    got["hidden"][1] = 99.0
    errs = ablate.errors(layers[0], stock, got)
    assert errs["hidden"] == 0.0 and errs["topk_ids"] == 0.0 and errs["router_logits"] > 0.1
    got["topk_ids"][2] = (got["topk_ids"][2] + 1) % 32
    assert ablate.errors(layers[0], stock, got)["topk_ids"] == 0.25


@pytest.mark.parametrize(
    ("have", "difference"),
    [
        ([[2, 1, 0], [5, 3, -1]], 0.0),
        ([[0, 1, 4], [3, 5, -1]], 0.2),
        ([[0, 1, -1], [3, 5, -1]], 0.1),
        ([[0, 1, 1], [3, 5, -1]], float("inf")),
        ([[0, 1, 2], [3, 5, -2]], float("inf")),
        ([[0, 1, 2], [3, 5000, -1]], float("inf")),
    ],
)
def test_selections_are_compared_as_sets(have, difference):
    want = torch.tensor([[0, 1, 2], [3, 5, -1]], dtype=torch.int32)
    assert ablate._set_difference(want, torch.tensor(have, dtype=torch.int32)) == pytest.approx(difference)


def test_layers_are_compared_each_on_its_own_stock_input(add):
    layers, state = layer.build(layer.GLM52.scaled(), 2, 140, "cpu", layers=2)
    inputs, stock = ablate.observe(layers, state)
    records = ablate.observe_on(layers, state, inputs)
    assert torch.equal(inputs[1].hidden, stock[0]["hidden"]) and torch.equal(inputs[1].topk_before, stock[0]["topk_indices"])
    for each, a, b in zip(layers, stock, records, strict=True):
        assert set(ablate.errors(each, a, b).values()) == {0.0}


WORKER = """
import json, os, pathlib, sys, time
spec, out = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
on = sorted(k[9:].lower() for k, v in os.environ.items() if k.startswith("LLDECODE_") and v == "on")
assert sorted([*on, *filter(None, os.environ["LLDECODE_OFF"].split(","))]) == ["absent", "crash", "far", "near", "refused", "stuck"]
assert "LLDECODE_FEATURES" not in os.environ and spec["noise"] == (not on)
print("loading", spec["llm"]["model"])
if "crash" in on:
    raise SystemExit("CUDA error: misaligned address")
(out / "ready").touch()
assert sys.stdin.readline() == "\\n"
timeline = pathlib.Path(__file__).with_name("timeline")
with timeline.open("a") as f:
    f.write(f"{sorted(p.parent.name for p in out.parent.glob('*/ready'))} begin\\n")
time.sleep(0.1)
with timeline.open("a") as f:
    f.write("end\\n")
with pathlib.Path(__file__).with_name("given").open("a") as f:
    memory = spec["llm"].get("gpu_memory_utilization")
    f.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {spec['trace']} {memory}\\n")

def prompt(i, size):
    tokens, logprobs = [7, 8, 9, 10], [-1.0 + 0.01 * (size == 2)] * 4
    if "near" in on and i == 1:
        tokens[2] = 11
    if "far" in on:
        tokens[3] = 12
    return dict(tokens=tokens, logprobs=logprobs, margins=[1.0, 1.0, 0.015, 1.0])

batches = {str(b): dict(us=[100.0 * b / (1 + len(on)), 110.0 * b], prompts=[prompt(i, b) for i in range(b)]) for b in spec["batches"]}
applied = [] if "stuck" in on else on
state = dict(applied=None if "absent" in on else applied, declined={"near": {"M > 32": 3}} if "near" in on else {})
kernels = [dict(kernel="gemm", launches=2.0, us=3.5)] if spec["profile"] else []
(out / "result").write_text(json.dumps(dict(batches=batches, state=state, kernels=kernels, gpu="fake")) + "\\n")
"""
DOCTOR = """
import json
found = [dict(name=n, version="1", state="on", reason="") for n in ("crash", "near", "far", "stuck", "absent")]
found.append(dict(name="refused", version="2", state="refused", reason="capability: got 8.0"))
print(json.dumps(dict(features=found)))
"""
VLLM = ("--engine", "vllm", "--model", "some/model", "--batch", "1,2")


@pytest.fixture
def engine(add, monkeypatch, tmp_path):
    for name in ("crash", "near", "far", "stuck", "absent", "refused"):
        add(name)
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "doctor.py").write_text(DOCTOR)
    monkeypatch.setattr(ablate_vllm, "WORKER", (sys.executable, str(tmp_path / "worker.py")))
    monkeypatch.setattr(ablate_vllm, "DOCTOR", (sys.executable, str(tmp_path / "doctor.py")))
    monkeypatch.setattr(bench, "version_of", lambda dist: "0.26.0")
    return tmp_path


def test_vllm_compares_tokens_and_excuses_only_noise(engine, capsys, monkeypatch):
    monkeypatch.setenv("LLDECODE_FEATURES", "near=on")
    code, report = run_json(capsys, *VLLM, "--features", "near,refused", "--profile", "3")
    assert code == 0 and report["unit"] == "µs a token" and report["gpu"] == "fake" and report["model"] == "some/model"
    one, two = (next(r for r in report["results"] if (r["combo"], r["batch"]) == ("near", b)) for b in (1, 2))
    assert one["note"] == "tokens equal" and one["us_p50"] == pytest.approx(80.0) and one["speedup"] == pytest.approx(105 / 80, rel=1e-4)
    assert two["ok"] and two["note"] == "prompt 1 differs at token 2, stock's margin 0.015 is noise" and two["bound"] is None
    assert [(f["name"], f["state"], f["reason"], f["declined"]) for f in report["features"]] == [
        ("near", "measured", "", {"M > 32": 3}),
        ("refused", "skipped", "capability: got 8.0", {}),
    ]
    assert report["parameters"]["noise"] == {"margin": pytest.approx(0.01), "typical": pytest.approx(0.01), "step": 0.125}
    assert report["kernels"] == {c: [{"kernel": "gemm", "launches": 2.0, "us": 3.5}] for c in ("none", "near")}
    assert run(*VLLM, "--features", "near", "--profile") == 0
    assert "gemm" in capsys.readouterr().out


def test_vllm_says_what_went_wrong_before_the_end_of_the_log(engine, capsys):
    cause = 'print("(EngineCore pid=7) ValueError: Free memory on device"); print("ValueError: again"); print("x\\n" * 30)'
    (engine / "worker.py").write_text(WORKER.replace('if "crash" in on:\n', f'if "crash" in on:\n    {cause}\n'))
    _, report = run_json(capsys, *VLLM, "--features", "crash")
    note = next(r["note"] for r in report["results"] if r["combo"] == "crash").splitlines()
    assert note[:3] == ["worker failed: exit status 1", "(EngineCore pid=7) ValueError: Free memory on device", "..."]
    assert note[-1] == "CUDA error: misaligned address"


def test_vllm_reports_each_failure_and_runs_the_rest(engine, capsys):
    code, report = run_json(capsys, *VLLM, "--features", "crash,far,stuck,absent", "--csv", str(engine / "v.csv"))
    assert code == 1
    notes = {r["combo"]: r for r in report["results"] if r["batch"] == 1}
    assert notes["none"]["ok"] and notes["none"]["us_p50"]
    assert notes["crash"]["note"] == "worker failed: exit status 1\nloading some/model\nCUDA error: misaligned address"
    assert notes["far"]["note"] == "prompt 0 differs at token 3, stock's margin 1"
    assert notes["stuck"]["note"] == "applied: expected ['stuck'], got []"
    assert notes["absent"]["note"] == "lldecode's plugin did not run in the engine's process"
    assert [r["ok"] for r in notes.values()] == [c == "none" for c in notes]
    with (engine / "v.csv").open() as f:
        rows = {r["combo"]: r for r in csv.DictReader(f) if r["batch"] == "1"}
    for r in (notes["far"], rows["far"]):  # timed, though its tokens are other ones
        assert (float(r["us_p50"]), float(r["speedup"])) == (80.0, pytest.approx(105 / 80, rel=1e-4)) and str(r["ok"]) == "False"
    assert {c for c, r in notes.items() if r["us_p50"]} == {"none", "far"} and rows.keys() == notes.keys()


def test_vllm_shows_but_does_not_draw_the_time_of_a_failed_check(engine, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(bench, "bars", lambda cases, groups, *_, **__: drawn.extend((g, c) for g, cs in groups.items() for c in cs))
    assert run(*VLLM, "--features", "far", "--plot", str(engine / "v.png")) == 1
    assert drawn == [("none", "batch 1"), ("none", "batch 2")]
    (row,) = (line for line in capsys.readouterr().out.splitlines() if " far " in line and "80.0" in line)
    assert "1.312x" in row and "NO" in row


def test_vllm_runs_only_what_is_asked_for_and_none(engine, capsys):
    code, report = run_json(capsys, *VLLM, "--features", "near,far,refused", "--only", "near ,none")
    assert code == 0 and {r["combo"] for r in report["results"]} == {"none", "near"}
    code, report = run_json(capsys, *VLLM, "--features", "near,refused", "--only", "refused")
    note = "not run: a feature of it was skipped, or it is another combination without that one"
    assert code == 1 and {(r["combo"], r["note"]) for r in report["results"]} == {("none", "tokens equal"), ("refused", note)}
    assert run(*VLLM, "--features", "near,far", "--only", "al") == 2
    assert capsys.readouterr().err == "lldecode ablate: --only: expected some of none, far, near, all, got 'al'\n"


def test_vllm_without_a_stock_result_compares_nothing(engine, capsys):
    (engine / "worker.py").write_text(WORKER.replace('if "crash" in on:', "if not on:"))
    code, report = run_json(capsys, *VLLM, "--features", "near")
    assert code == 1
    assert {r["combo"]: (r["ok"], r["note"].splitlines()[0]) for r in report["results"]} == {
        "none": (False, "worker failed: exit status 1"),
        "near": (True, "not compared: stock failed"),
    }


@pytest.mark.parametrize(("at_once", "ready"), [("1", [1, 1, 1, 1]), ("3", [3, 3, 3, 1])])
def test_vllm_workers_start_together_and_measure_one_by_one(engine, at_once, ready):
    run(*VLLM, "--features", "near,far", "--at-once", at_once)  # none, each, both
    lines = (engine / "timeline").read_text().splitlines()
    assert lines[1::2] == ["end"] * (len(lines) // 2)
    started = [len(ast.literal_eval(line.removesuffix(" begin"))) for line in lines[::2]]
    assert started == ready


def test_vllm_workers_take_turns_on_gpus_and_each_has_its_timeline(engine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    options = ("--features", "near,far", "--profile", "1")
    run(*VLLM, *options)
    run(*VLLM, *options, "--gpus", "0, 3", "--at-once", "3", "--trace", str(engine / "t"))
    names = ["none", "far", "near", "all"]
    assert sorted((engine / "given").read_text().splitlines()) == sorted(
        ["7 None None"] * 4 + [f"{gpu} {engine / 't' / name}.json.gz 0.45" for name, gpu in zip(names, "0303", strict=True)]
    )
    assert run(*VLLM, *options, "--at-once", "3", "--engine-args", '{"gpu_memory_utilization": 0.2}') in (0, 1)
    assert (engine / "given").read_text().splitlines()[-1] == "7 None 0.2"
    assert (engine / "t").is_dir()


@pytest.mark.parametrize("what", ["started", "done"])
def test_vllm_does_not_wait_for_an_engine_that_hangs(engine, capsys, what):
    hang = 'if on == ["near"]:\n    time.sleep(60)\n'
    at = '(out / "ready").touch()\n' if what == "started" else "timeline = "
    (engine / "worker.py").write_text(WORKER.replace(at, hang + at))
    begun = time.monotonic()
    code, report = run_json(capsys, *VLLM, "--features", "near,far", "--timeout", "3")
    notes = {r["combo"]: r["note"].splitlines()[0] for r in report["results"] if r["batch"] == 1}
    assert code == 1 and time.monotonic() < begun + 30
    assert notes["none"] == "tokens equal" and notes["near"] == f"worker failed: not {what} in 3 s"
    assert notes["all"].startswith("prompt 0 differs")


def test_vllm_reports_what_was_measured_before_an_interrupt(engine, capsys):
    stop = "import signal; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    (engine / "worker.py").write_text(WORKER.replace('if "crash" in on:\n', f'if on == ["near"]:\n    {stop}\nif "crash" in on:\n'))
    code, report = run_json(capsys, *VLLM, "--features", "far,near", "--csv", str(engine / "v.csv"))
    notes = {r["combo"]: r["note"] for r in report["results"] if r["batch"] == 1}
    assert code == 130 and notes.pop("none") == "tokens equal" and notes.pop("far").startswith("prompt 0 differs")
    assert notes == {"near": "interrupted before it was measured", "all": "interrupted before it was measured"}
    assert (engine / "v.csv").exists()


@pytest.mark.parametrize("received", [signal.SIGINT, signal.SIGTERM])
def test_vllm_worker_and_its_children_end_with_an_interrupt(engine, capsys, received, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    pids = engine / "pids"
    sleeper = "import subprocess, sys, os, time; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    sleeper += f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{c.pid}}\\n'); time.sleep(60)\n"
    (engine / "worker.py").write_text(sleeper)

    def interrupt():
        while not (pids.exists() and pids.read_text().endswith("\n")):
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, received)

    threading.Thread(target=interrupt, daemon=True).start()
    assert run(*VLLM, "--features", "near") == 130
    deadline = time.monotonic() + 10
    while any(_alive(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_step_is_a_line_where_stderr_is_no_terminal(add, capsys):
    add("right")
    run(*TINY)
    lines = capsys.readouterr().err.splitlines()
    assert "lldecode ablate: batch 1: checking right" in lines
    assert lines.count("lldecode ablate: batch 1: timing") == 1
    run(*TINY, "--json")
    assert capsys.readouterr().err == ""


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class FakeEngine:
    """vLLM's ``LLMEngine`` on a clock of its own: a step prefills one request in 0.5 s and gives each earlier one `step_tokens` in 1 ms."""

    def __init__(self, clock, step_tokens=1):
        self.clock, self.step_tokens, self.waiting, self.running, self.prompts = clock, step_tokens, [], {}, []
        self.model_config = types.SimpleNamespace(get_vocab_size=lambda: 100, max_model_len=60)

    def add_request(self, name, prompt, params):
        assert params.temperature == 0 and params.ignore_eos and params.output_kind == "delta"
        self.prompts.append(prompt)
        self.waiting.append((name, params.max_tokens))

    def step(self):
        self.clock[0] += 0.5 if self.waiting else 1e-3
        outs = []
        for name in list(self.running):
            self.running[name] -= self.step_tokens
            outs.append((name, self.step_tokens, self.running[name] <= 0))
        if self.waiting:
            name, tokens = self.waiting.pop(0)
            self.running[name] = tokens - 1
            outs.append((name, 1, False))
        return [
            types.SimpleNamespace(request_id=name, outputs=[types.SimpleNamespace(token_ids=[7] * n)], finished=finished)
            for name, n, finished in outs
        ]

    def abort_request(self, names):
        for name in names:
            del self.running[name]


@pytest.fixture
def fake_vllm(monkeypatch):
    """A ``vllm`` whose LLM holds a :class:`FakeEngine`."""
    clock = [0.0]
    made = types.SimpleNamespace(kwargs=None, calls=[], generated=[], engine=FakeEngine(clock))
    made.states = lambda: [ablate_vllm.WorkerExtension().lldecode_state()]

    class LLM:
        def __init__(self, **kwargs):
            made.kwargs = kwargs
            self.llm_engine = made.engine

        def generate(self, prompts, params, use_tqdm):
            assert not made.engine.running
            assert params.temperature == 0 and params.min_tokens == params.max_tokens and params.ignore_eos
            made.generated.append(prompts)
            tokens = list(range(params.max_tokens))
            found = [{t: types.SimpleNamespace(logprob=-0.5), 99: types.SimpleNamespace(logprob=-2.0)} for t in tokens]
            output = types.SimpleNamespace(token_ids=tokens, logprobs=found if params.logprobs else None)
            return [types.SimpleNamespace(outputs=[output]) for _ in prompts]

        def reset_prefix_cache(self):
            pass

        def collective_rpc(self, method):
            assert method != "lldecode_spread" or not made.engine.prompts
            made.calls.append(method)
            return [None] if method == "lldecode_spread" else made.states()

    fake, sampling = types.ModuleType("vllm"), types.ModuleType("vllm.sampling_params")
    fake.LLM, fake.SamplingParams = LLM, lambda **kw: types.SimpleNamespace(**{"logprobs": None, **kw})
    sampling.RequestOutputKind = types.SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    monkeypatch.setattr(ablate_vllm.time, "perf_counter", lambda: clock[0])
    return made


def work(tmp_path, monkeypatch, **changed):
    llm = {"model": "m", "max_num_seqs": 3}
    spec = dict(batches=[1, 3], input_len=5, output_len=4, rounds=2, profile=0, trace=None, llm=llm, noise=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    ablate_vllm.main([json.dumps(spec | changed), str(tmp_path)])
    assert (tmp_path / "ready").exists() and sys.stdin.read() == ""
    return json.loads((tmp_path / "result").read_text())


def test_worker_times_a_token_where_all_requests_decode(fake_vllm, tmp_path, monkeypatch):
    report = work(tmp_path, monkeypatch)
    assert fake_vllm.kwargs == {"model": "m", "max_num_seqs": 3, "worker_extension_cls": "lldecode.ablate_vllm.WorkerExtension"}
    assert [len(p["prompt_token_ids"]) for p in fake_vllm.engine.prompts] == [5, 5, 5, 5]
    assert len({tuple(p["prompt_token_ids"]) for p in fake_vllm.engine.prompts}) == 3
    assert {size: len(b["prompts"]) for size, b in report["batches"].items()} == {"1": 1, "3": 3}
    assert report["batches"]["3"]["us"] == pytest.approx([1000.0, 1000.0])
    prompt = report["batches"]["1"]["prompts"][0]
    assert prompt["tokens"] == list(range(20)) and set(prompt["logprobs"]) == {-0.5} and set(prompt["margins"]) == {1.5}
    assert report["state"] == {"applied": None, "fingerprint": None, "declined": feature.declined()} and report["kernels"] == []
    assert report["again"] == {}


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([1], []),
        ([2], [[0], [1]]),
        ([1, 2], [[1]]),
        ([1, 3], [[0, 1], [2], [1]]),
        ([3], [[0, 1], [2], [0], [1]]),
        ([1, 4, 16], [[*range(8)], [*range(8, 16)], *([*range(i, i + 4)] for i in (4, 8, 12))]),
        ([8, 16], [[*range(8, 16)], *([*range(i, i + 4)] for i in (0, 4, 8, 12))]),
        ([1, 5], [[0, 1, 2], [3, 4], [0, 1], [2, 3], [4]]),
    ],
)
def test_every_prompt_is_decoded_in_batches_of_other_sizes(fake_vllm, tmp_path, monkeypatch, sizes, parts):
    report = work(tmp_path, monkeypatch, batches=sizes, noise=True)
    before = len(sizes) * 2  # short ones, then those whose tokens are compared
    prompts = fake_vllm.generated[before - 1]
    assert len(prompts) == sizes[-1] and fake_vllm.generated[before:] == [[prompts[i] for i in part] for part in parts]
    found = {}
    for i in range(sizes[-1]):
        new = {len(part) for part in parts if i in part} - {size for size in sizes if i < size}
        if new:
            found[str(i)] = [report["batches"][str(sizes[-1])]["prompts"][0]] * len(new)
        assert len(new | {size for size in sizes if i < size}) > 1 or sizes == [1]
    assert report["again"] == found


def test_no_prefill_is_in_a_decoded_token(fake_vllm, tmp_path, monkeypatch):
    fake_vllm.engine.model_config.max_model_len = 200  # the first request decodes for 24 steps before the last has prefilled
    assert work(tmp_path, monkeypatch, batches=[24])["batches"]["24"]["us"] == pytest.approx([1000.0, 1000.0])


def test_a_step_of_several_tokens_is_shared_among_them(fake_vllm, tmp_path, monkeypatch):
    fake_vllm.engine.step_tokens = 2
    assert work(tmp_path, monkeypatch)["batches"]["3"]["us"] == pytest.approx([500.0, 500.0])


def test_requests_that_end_before_they_are_measured(fake_vllm, tmp_path, monkeypatch):
    fake_vllm.engine.model_config.max_model_len = 25
    with pytest.raises(RuntimeError, match="max-model-len: expected room for 2 rounds of 4 tokens, got 25"):
        work(tmp_path, monkeypatch)


def test_ranks_with_different_features_are_refused(fake_vllm, tmp_path, monkeypatch):
    state = {"applied": ["a"], "fingerprint": "1", "declined": {}}
    fake_vllm.states = lambda: [state, state | {"declined": {"a": {"M": 1}}}]
    assert work(tmp_path, monkeypatch)["state"] == state
    for other in ({"applied": []}, {"fingerprint": "2"}):
        fake_vllm.states = lambda other=other: [state, state | other]
        with pytest.raises(RuntimeError, match="features of rank 1: expected those of rank 0"):
            work(tmp_path, monkeypatch)


def test_kernels_are_counted_per_decoded_token():
    before = {"a": (10, 100.0), ablate_vllm.BUSY: (10, 90.0)}
    after = {"a": (30, 500.0), "b": (40, 80.0), "c": (1, 1.0), ablate_vllm.BUSY: (71, 540.0)}
    assert ablate_vllm.top_kernels(before, after, 10, 2) == [
        {"kernel": "a", "launches": 2.0, "us": 40.0},
        {"kernel": "b", "launches": 4.0, "us": 8.0},
        {"kernel": "all kernels", "launches": pytest.approx(6.1), "us": pytest.approx(48.1)},
        {"kernel": ablate_vllm.BUSY, "launches": pytest.approx(6.1), "us": pytest.approx(45.0)},
    ]


def test_overlapping_kernels_count_once():
    assert ablate_vllm.union([(5, 6), (0, 3), (1, 2), (2, 4)]) == 5
    assert ablate_vllm.union([]) == 0


def test_spread_weights_keep_the_variance_and_norms_are_one():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.W_UK_T, self.W_UV = torch.empty(4, 24, 64), torch.nn.Parameter(torch.empty(4, 64, 40))

    model = torch.nn.Sequential(
        torch.nn.Embedding(500, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 300), Attention(), torch.nn.Linear(8, 8).to(torch.float64)
    )
    tensors = [*model.parameters(), model[3].W_UK_T]
    for x in tensors:
        x.data.uniform_(-1e-3, 1e-3)
    before, at = [x.clone() for x in tensors], [x.data_ptr() for x in tensors]
    ablate_vllm.spread(model)
    embedding, norm, norm_bias, linear, bias, w_uv, other, other_bias, w_uk_t = tensors
    for x, std in ((embedding, 1), (linear, 1 / 8), (w_uv, 1 / 8), (w_uk_t, 1 / 8)):
        assert x.std().item() == pytest.approx(std, rel=1e-2)
    assert (norm == 1).all() and [x.data_ptr() for x in tensors] == at
    for i, x in ((2, norm_bias), (4, bias), (6, other), (7, other_bias)):
        assert torch.equal(x, before[i])


def test_spread_weights_do_not_repeat_the_last_token():
    """vLLM draws the same for the head as for the embedding: a token then scores highest after itself, whatever the layers compute."""

    class ParallelLMHead(torch.nn.Linear):
        tp_size = 1

    model = torch.nn.Sequential(torch.nn.Embedding(500, 64), ParallelLMHead(64, 500, bias=False))
    for x in model.parameters():
        x.data.uniform_(-1e-3, 1e-3, generator=torch.Generator().manual_seed(1234))
    assert torch.equal(model[0].weight, model[1].weight)
    ablate_vllm.spread(model)
    logits = model(torch.arange(500))
    assert (logits.argmax(-1) == torch.arange(500)).float().mean() < 0.05
    assert logits.std().item() == pytest.approx(1, rel=0.05)


def test_spread_gives_each_rank_a_share_of_its_own():
    class ColumnParallelLinear(torch.nn.Linear):
        tp_size = 2

    class QkvA(ColumnParallelLinear):
        tp_size = 1

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w2_weight = torch.nn.Parameter(torch.empty(2, 8, 8))

    ranks = []
    for rank in (0, 1):
        model = torch.nn.Sequential(ColumnParallelLinear(8, 8), QkvA(8, 8), torch.nn.Linear(8, 8), Experts(), torch.nn.Module())
        model[4].W_UV = torch.empty(2, 8, 8)
        generator = torch.Generator().manual_seed(0)
        tensors = [*(p.data for p in model.parameters() if p.ndim > 1), model[4].W_UV]
        for x in tensors:
            x.copy_(torch.randn(x.shape, generator=generator))
        ablate_vllm.spread(model, rank)
        ranks.append(tensors)
    assert [torch.equal(a, b) for a, b in zip(*ranks, strict=True)] == [False, True, True, False, False]
    assert torch.equal(ranks[1][0], ranks[0][0].roll(1, -1))


def test_dummy_weights_are_spread_before_anything_is_measured(fake_vllm, tmp_path, monkeypatch):
    for load_format, calls in (("dummy", ["lldecode_spread", "lldecode_state"]), ("auto", ["lldecode_state"])):
        fake_vllm.calls.clear()
        fake_vllm.engine.prompts.clear()
        work(tmp_path, monkeypatch, llm={"load_format": load_format})
        assert fake_vllm.calls == calls


def test_noise_is_stocks_own_between_batch_sizes():
    def size(*prompts):
        return {"prompts": [{"tokens": t, "logprobs": lp, "margins": [1.0] * len(t)} for t, lp in prompts]}

    stock = {
        "batches": {
            "1": size(([1, 2, 3], [-1.0, -1.0, -9.0])),
            "2": size(([1, 2, 4], [-1.0, -1.25, -1.0]), ([5], [-1.0])),
            "4": size(([1, 2, 3], [-1.0, -1.0, -9.0]), ([5], [-1.1])),
        }
    }
    stock["batches"]["1"]["prompts"][0]["margins"] = [9.0, 9.0, 0.5]
    assert ablate_vllm.own_noise(stock) == ablate_vllm.Noise(margin=1.0, typical=0.0, step=0.125)  # where the second and the third part
    never = {"batches": {"1": size(([1, 2, 3], [-1.0, -1.0, -9.0])), "5": size(([1, 2, 3], [-1.5, -1.5, -9.5]))}}
    assert ablate_vllm.own_noise(never) == ablate_vllm.Noise(margin=0.5, typical=0.5, step=0.125)
    assert ablate_vllm.own_noise({"batches": {"1": stock["batches"]["1"]}}) == ablate_vllm.Noise()


def test_each_prompt_of_the_largest_batch_counts_as_noise():
    def prompt(tokens, change=0.0):
        return {"tokens": tokens, "logprobs": [-1.0 - change] * 4, "margins": [9.0, 9.0, 2.5, 1.5]}

    largest = [prompt([7, 7, 7, 7]), prompt([7, 7, 7, 7])]
    stock = {"batches": {"1": {"prompts": largest[:1]}, "2": {"prompts": largest}}, "again": {"1": [prompt([7, 7, 7, 8], 0.25)]}}
    noise = ablate_vllm.own_noise(stock)
    # The median of four positions without a change and three with one.
    assert noise == ablate_vllm.Noise(margin=1.5, typical=0.0, step=0.125)
    del stock["again"]
    assert ablate_vllm.own_noise(stock) == ablate_vllm.Noise(step=0.125)
    got = [largest[0], prompt([7, 7, 8, 8])]
    assert ablate_vllm.compare(largest, got, noise).ok and not ablate_vllm.compare(largest, got, ablate_vllm.own_noise(stock)).ok


@pytest.mark.parametrize(("change", "ok"), [(0.02, True), (0.04, False)])
def test_log_probabilities_that_are_off_everywhere_are_no_noise(change, ok):
    def prompt(change):
        return {"tokens": [1] * 40, "logprobs": [-1.0 - change] * 40, "margins": [1.0] * 40}

    noise = ablate_vllm.Noise(margin=1.0, typical=0.01)
    verdict = ablate_vllm.compare([prompt(0)], [prompt(change)], noise)
    assert (verdict.ok, verdict.max_err, verdict.bound) == (ok, pytest.approx(change), pytest.approx(0.03))
    assert verdict.note == ("tokens equal" if ok else "log-probabilities change by 0.04 in the median, stock's own noise 0.01")
    assert ablate_vllm.compare([prompt(0)], [prompt(change)], ablate_vllm.Noise()).ok


@pytest.mark.parametrize(("steps", "ok"), [(1, True), (3, True), (4, False)])
def test_a_step_of_a_logit_is_noise(steps, ok):
    """In bf16 less than half of stock's log-probabilities moved, by a step each: the median is what the others' sums changed."""

    def prompt(moved, steps):
        return {
            "tokens": [1] * 40,
            "logprobs": [-1 - steps / 64] * moved + [-1.0001] * (40 - moved),
            "margins": [0.0, *[1 / 64, 0.5, 2.0] * 13],
        }

    stock, other = (prompt(moved, 1) for moved in (0, 18))
    noise = ablate_vllm.own_noise({"batches": {"1": {"prompts": [stock | {"logprobs": [-1.0] * 40}]}, "2": {"prompts": [other]}}})
    assert (noise.typical, noise.step) == (pytest.approx(0.0001, abs=1e-6), 1 / 64)
    assert ablate_vllm.compare([stock], [prompt(22, steps)], noise).ok == ok


@pytest.mark.parametrize(
    ("margins", "step"),
    [
        ([n / 64 for n in (1, 6, 11, 12, 22, 49)], 1 / 64),
        ([0.0] * 9 + [n / 64 + 1e-6 for n in (1, 3, 12, 23)] + [5 / 1024], 1 / 64),  # one of them in a finer binade
        ([4.0, 5.0, 8.0, 12.0], 1 / 8),  # no coarser: nothing near a tie says so
        ([4.0091, 5.3137, 8.8713, 12.2139], 0.0),  # fp32
        ([0.0, 0.0], 0.0),
    ],
)
def test_the_step_of_logits_is_what_their_margins_are_multiples_of(margins, step):
    assert ablate_vllm._step(margins) == step


def test_confident_tokens_make_no_noise():
    def prompt(change):
        return {"tokens": [1] * 40, "logprobs": [-1.0 - change] * 40, "margins": [4.0 + 0.1737 * i for i in range(40)]}

    noise = ablate_vllm.own_noise({"batches": {"1": {"prompts": [prompt(0)]}, "2": {"prompts": [prompt(0.001)]}}})
    assert not ablate_vllm.compare([prompt(0)], [prompt(0.01)], noise).ok


@pytest.mark.parametrize(("margin", "ok"), [(0.4, True), (0.41, False)])
def test_a_token_may_differ_where_stock_differs_from_itself(margin, ok):
    stock = {"tokens": [1] * 40, "logprobs": [-1.0] * 40, "margins": [9.0] * 9 + [margin] + [9.0] * 30}
    verdict = ablate_vllm.compare([stock], [stock | {"tokens": [1] * 9 + [2] * 31}], ablate_vllm.Noise(margin=0.2, typical=0.01))
    assert (verdict.ok, verdict.bound) == (ok, None)
    assert verdict.note == f"prompt 0 differs at token 9, stock's margin {margin}{' is noise' if ok else ''}"


@pytest.mark.parametrize("common", [31, 32])
def test_the_median_of_few_tokens_says_nothing(common):
    stock = {"tokens": [1] * 40, "logprobs": [-1.0] * 40, "margins": [0.0] * 40}
    other = {"tokens": [1] * common + [2] * (40 - common), "logprobs": [-2.0] * 40, "margins": [0.0] * 40}
    assert ablate_vllm.compare([stock], [other], ablate_vllm.Noise(0.2, 0.01)).ok == (common < 32)


def test_unrelated_tokens_are_no_noise():
    rng = random.Random(0)

    def prompt():
        return {"tokens": [rng.randrange(9) for _ in range(40)], "logprobs": [-1.0] * 40, "margins": [rng.random() for _ in range(40)]}

    assert not ablate_vllm.compare([prompt() for _ in range(16)], [prompt() for _ in range(16)], ablate_vllm.Noise(0.2, 0.05)).ok


@pytest.mark.parametrize(
    ("at_once", "gpus", "share"),
    [(1, "", 0.9), (3, "", 0.3), (4, "01", 0.45), (3, "01", 0.45), (2, "01", 0.9), (1, "01", 0.9), (4, "0110", 0.45), (2, "0011", 0.45)],
)
def test_memory_is_shared_by_the_engines_on_a_gpu(at_once, gpus, share):
    assert ablate_vllm.memory_share(at_once, list(gpus)) == share


def test_speculation_needs_more_room(engine, monkeypatch):
    rooms = []
    monkeypatch.setattr(ablate_vllm, "measure", lambda spec, *_, **__: rooms.append(spec.llm["max_model_len"]) or sys.exit())
    for extra in ("{}", '{"speculative_config": {"num_speculative_tokens": 3}}'):
        with pytest.raises(SystemExit):
            run(*VLLM, "--input-len", "100", "--output-len", "10", "--rounds", "2", "--engine-args", extra)
    assert rooms == [140, 384]  # 260, but an odd number of 64-token blocks stops vLLM with speculation
    with pytest.raises(SystemExit):
        run(*VLLM, "--input-len", "224", "--output-len", "10", "--rounds", "2", "--engine-args", extra)
    assert rooms[2] == 384


def test_default_run_fits_its_time_budget(add, capsys):
    for i in range(3):
        add(f"right-{i}")
    begun = time.process_time()
    assert run() == 0
    assert time.process_time() - begun < 60


@pytest.mark.gpu
def test_gpu_run_on_the_real_shapes(install, only_fakes, capsys):
    install("right", FEATURE.format(name="right", body="return (x.float() @ weight.float().T).to(out_dtype)", more=""))
    install("wrong", FEATURE.format(name="wrong", body=WRONG, more=""))
    for model in layer.MODELS:
        code, report = run_json(capsys, "--model", model, "--batch", "1,16", "--rounds", "5", "--layers", "2")
        assert code == 1 and report["note"] == "" and report["model"] == model
        assert {r["combo"] for r in report["results"] if r["ok"]} == {"none", "right"}
        assert all(10 < r["us_p50"] < 20000 for r in report["results"] if r["ok"])
