"""The command on a CPU: the harness times plain torch, a stand-in for the GPU names it, nothing is compiled."""

import dataclasses
import importlib.metadata
import json
import os
import signal
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from lldecode import bench, cli, jit, plan, tune
from lldecode.plan import Gemm, Plans
from lldecode.testing import cross_compile
from lldecode.tune import MODELS, Tuner, products

GPU = ("NVIDIA H200", 132)
TINY = dict(
    **dict(hidden_size=64, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, num_attention_heads=2, qk_nope_head_dim=8),
    **dict(v_head_dim=8, index_n_heads=2, index_head_dim=8, intermediate_size=32, moe_intermediate_size=16, n_shared_experts=1),
    vocab_size=100,
)
OWN, WRONG = (8, 1), (16, 2)


def gemm(scale):
    def call(x, weight, out):
        torch.bmm(x * scale, weight.mT, out=out)

    return call


class Point:
    """An entry point of a tuner."""

    name = "one"

    def __init__(self, tuner):
        self.load = lambda: tuner


@pytest.fixture
def tuner(tmp_path, monkeypatch):
    (tmp_path / "kernel.py").write_text("x = 1\n")
    monkeypatch.setenv("LLDECODE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(plan, "driver", lambda: "580")
    monkeypatch.setattr(plan, "gpu", lambda: GPU)
    monkeypatch.setattr(plan, "SIZES", (1, 8))
    monkeypatch.setattr(jit, "unavailable", lambda: None)
    compiled = []
    monkeypatch.setattr(tune, "precompile", lambda kernel, configs, jobs: compiled.append((kernel, configs, jobs)) or {})
    made = Tuner(
        Plans("one", tmp_path / "kernel.py"),
        "one.kernel:KERNEL",
        lambda sms, g, m: {OWN: ("right", sms, g, m > 4), WRONG: ("wrong", sms, g, m > 4)},
        lambda cfg, x, weight, out: gemm(1.0 if cfg[0] == "right" else 1.1)(x, weight, out),
        lambda g, x: {"cublas": lambda weight, out: gemm(1.0)(x, weight, out)},
    )
    monkeypatch.setattr(tune, "test_compiled", compiled, raising=False)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Point(made)] if group == "lldecode.tuners" else [])
    return made


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path / "model")


@pytest.fixture
def fast(monkeypatch):
    """What takes a case, and in what order, is the harness's business; here the first own variant always takes half."""

    def interleaved(calls, rounds, between):
        if between:
            between()
        return {name: [2.0 if name == "cublas" else 1.0] * rounds for name in calls}

    monkeypatch.setattr(tune.bench, "interleaved", interleaved)


def test_a_plan_is_measured_written_and_its_gains_are_printed(tuner, model, fast, capsys):
    assert cli.main(["tune", "--model", model]) == 0
    path = tuner.plans.tuned(GPU[0])
    data = json.loads(path.read_text())
    assert {k: v for k, v in data.items() if k != "shapes"} == tuner.plans.stamp(GPU[0])
    wanted = list(dict.fromkeys(map(str, products(TINY, 1))))
    assert sorted(data["shapes"]) == sorted(wanted)
    expected = {"choice": ["lldecode", list(OWN)], "us": {"cublas": 2.0, "lldecode": 1.0}}
    assert all(sizes == {"1": expected, "8": expected} for sizes in data["shapes"].values())
    out = capsys.readouterr().out.splitlines()
    assert out == [*(f"{name}: M=1 2.00x lldecode, M=8 2.00x lldecode" for name in wanted), f"one: wrote {path}"]
    assert tuner.plans.choice(GPU[0], wanted[0], 5) == ("lldecode", list(OWN))


def test_every_config_is_compiled_once_ahead(tuner, model, fast):
    assert cli.main(["tune", "--model", model, "--jobs", "3"]) == 0
    ((kernel, configs, jobs),) = tune.test_compiled
    gemms = list(dict.fromkeys(products(TINY, 1)))
    assert (kernel, jobs) == ("one.kernel:KERNEL", 3)
    assert configs == [(name, GPU[1], g, large) for g in gemms for large in (False, True) for name in ("right", "wrong")]


def test_a_candidate_that_does_not_compile_is_left_out_with_a_warning(tuner, fast, monkeypatch, tmp_path, caplog):
    broken = ("right", GPU[1], Gemm(16, 64), True)
    monkeypatch.setattr(tune, "precompile", lambda kernel, configs, jobs: {broken: "DSLError: no"})
    ran = []
    launch = tuner.launch
    recorded = dataclasses.replace(tuner, launch=lambda cfg, *tensors: ran.append(cfg) or launch(cfg, *tensors))
    found = tune.tune(recorded, [Gemm(16, 64)], tmp_path / "plan.json", jobs=1)
    assert {size: entry["choice"] for size, entry in found["N=16 K=64"].items()} == {"1": ["lldecode", list(OWN)], "8": ["cublas", None]}
    assert f"{broken}: left out, since it does not compile: DSLError: no" in caplog.text
    assert ("right", GPU[1], Gemm(16, 64), False) in ran
    assert broken not in ran


def test_where_nothing_compiles_no_plan_is_written(tuner, model, fast, monkeypatch, capsys):
    monkeypatch.setattr(tune, "precompile", lambda kernel, configs, jobs: dict.fromkeys(configs, "DSLError: no"))
    assert cli.main(["tune", "--model", model]) == 1
    kernels = 4 * len(dict.fromkeys(products(TINY, 1)))
    assert capsys.readouterr().err.endswith(f"lldecode tune: none of {kernels} kernels compiles: DSLError: no\n")
    assert not tuner.plans.tuned(GPU[0]).exists()


def test_precompiling_tells_what_does_not_compile_and_why(monkeypatch):
    """The environment stands for a kernel: it answers for a text and refuses anything else."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "")  # and back
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert tune.precompile("os:environ", ["HOME", 3, "PATH"], 1) == {3: "TypeError: str expected, not int"}


def test_a_candidate_that_is_wrong_is_left_out_with_a_warning(tuner, fast, caplog):
    entry = tune.measure(tuner, Gemm(16, 64))["8"]
    assert entry["choice"] == ["lldecode", list(OWN)]
    assert f"N=16 K=64 M=8: {WRONG} is wrong: expected an error of at most " in caplog.text
    assert str(OWN) not in caplog.text


@pytest.mark.parametrize("launch", [lambda cfg, x, weight, out: None, lambda cfg, x, weight, out: gemm(float("nan"))(x, weight, out)])
def test_a_candidate_that_writes_nothing_or_nan_is_left_out(tuner, fast, launch):
    assert tune.measure(dataclasses.replace(tuner, launch=launch), Gemm(16, 64))["1"]["choice"] == ["cublas", None]


def test_each_size_runs_its_own_configs(tuner, fast):
    ran = set()

    def launch(cfg, x, weight, out):
        ran.add((x.shape[1], cfg[3]))

    tune.measure(dataclasses.replace(tuner, launch=launch), Gemm(16, 64))
    assert ran == {(1, False), (8, True)}


def test_the_fastest_of_several_variants_is_the_plans(tuner, monkeypatch):
    took = {"cublas": 3.0, "(8, 1)": 2.0, "(9, 1)": 1.0, "(10, 1)": 2.5}
    monkeypatch.setattr(tune.bench, "interleaved", lambda calls, rounds, between: {name: [took[name]] for name in calls})
    several = dataclasses.replace(tuner, configs=lambda sms, g, m: {(n, 1): ("right", n) for n in (8, 9, 10)})
    found = {"choice": ["lldecode", [9, 1]], "us": {"cublas": 3.0, "lldecode": 1.0}}
    assert tune.measure(several, Gemm(16, 64)) == {"1": found, "8": found}


def test_what_counts_is_the_mean_of_all_situations(tuner, monkeypatch):
    took = {"cublas": iter([3.0, 3.0, 3.0] * 2), "(8, 1)": iter([1.0, 1.0, 4.0] * 2), "(9, 1)": iter([2.0, 2.0, 1.4] * 2)}
    asked = []

    def interleaved(calls, rounds, between):
        asked.append(rounds)
        return {name: [0.0, (us := next(took[name])), us, us, 9.0] for name in calls}  # the median is neither the first nor the mean

    monkeypatch.setattr(tune.bench, "interleaved", interleaved)
    two = dataclasses.replace(tuner, configs=lambda sms, g, m: {(n, 1): ("right", n) for n in (8, 9)})
    found = {"choice": ["lldecode", [9, 1]], "us": {"cublas": 3.0, "lldecode": 1.8}}
    assert tune.measure(two, Gemm(16, 64), rounds=5) == {"1": found, "8": found}
    assert asked == [5] * 6


def test_what_is_timed_goes_through_all_copies_of_the_weight(tuner, monkeypatch):
    read = []

    def interleaved(calls, rounds, between):
        read.clear()  # of the check that came before
        for call in calls["cublas"]:
            call()
        return {name: [1.0] for name in calls}

    monkeypatch.setattr(tune.bench, "interleaved", interleaved)
    monkeypatch.setattr(tune.bench, "cold_copies", lambda nbytes: 3)
    tune.measure(
        dataclasses.replace(tuner, providers=lambda g, x: {"cublas": lambda weight, out: read.append(weight) or gemm(1.0)(x, weight, out)}),
        Gemm(16, 64),
    )
    assert len({weight.data_ptr() for weight in read}) == len(read) == 3


def test_the_kernel_between_writes_the_activations_and_they_come_back(tuner, monkeypatch):
    ran, read = [], []

    def interleaved(calls, rounds, between):
        ran.append((between is None, read[0].clone()))
        if between is not None:
            between()
            assert (read[0] == 1).all()
        return {name: [1.0] for name in calls}

    def providers(g, x):
        read[:] = [x]
        return {"cublas": lambda weight, out: gemm(1.0)(x, weight, out)}

    monkeypatch.setattr(tune.bench, "interleaved", interleaved)
    tune.measure(dataclasses.replace(tuner, providers=providers), Gemm(16, 24, 2, True))
    assert [chain for chain, _ in ran] == [situation == "chain" for situation in plan.SITUATIONS] * 2
    one, eight = ran[0][1], ran[3][1]
    assert (one.shape, eight.shape) == ((2, 1, 24), (2, 8, 24))
    assert torch.equal(eight[:, :1], one)  # what was written is gone again: the next size is checked against fp64
    assert not (one == 1).all()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_the_neighbour_lets_go_before_it_waits_and_waits_before_it_writes(arch):
    compiled = cross_compile("lldecode.neighbour:compile", None, arch)
    marks = ("griddepcontrol.launch_dependents", "griddepcontrol.wait", "fma.rn.f32", "st.global")
    assert sorted(marks, key=compiled.ptx.index) == list(marks)
    assert "ld.global" not in compiled.ptx
    assert compiled.local_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1, 6144), (1, 32, 14336), (8, 6, 192)])
def test_the_neighbour_fills_strided_rows_in_about_two_microseconds(shape):
    from lldecode.neighbour import launch

    batch, rows, k = shape
    whole = torch.zeros(batch, 40, k + 8, dtype=torch.bfloat16, device="cuda")
    x = whole[:, :rows, :k]
    launch(x)
    assert (x == 1).all()
    assert whole.sum(dtype=torch.float64).item() == x.numel()
    (us,) = bench.interleaved({"neighbour": [lambda: launch(x)] * 100}, rounds=5).values()
    assert 1 < bench.percentiles(us)[1] < 5, us


def test_each_situation_has_its_kernel_between(monkeypatch):
    """``behind`` the neighbour, which on a CPU is a fill as well; ``alone`` a fill."""
    ran = []
    monkeypatch.setattr(tune.neighbour, "launch", lambda x: ran.append("neighbour"))
    monkeypatch.setattr(torch.Tensor, "fill_", lambda x, value: ran.append("fill"))

    def interleaved(calls, rounds, between):
        ran.append("-")
        if between is not None:
            between()
        return ran[-1]

    monkeypatch.setattr(tune.bench, "interleaved", interleaved)
    assert tune.time_calls({}, torch.ones(1, 2, 8), 3) == {"chain": "-", "behind": "neighbour", "alone": "fill"}


def test_activations_of_two_dimensions_are_refused():
    with pytest.raises(ValueError, match=r"^x: expected shape \[batch, M, k\], got \[2, 8\]$"):
        tune.time_calls({"a": [lambda: None]}, torch.ones(2, 8), 1)


@pytest.mark.gpu
def test_a_call_is_timed_on_a_gpu_in_every_situation():
    x, weights = tune.operands(Gemm(2048, 2048), 20)
    kept = x.clone()
    out = torch.empty(1, 4, 2048, dtype=x.dtype, device=x.device)
    calls = {"bmm": [lambda w=w: torch.bmm(x[:, :4], w.mT, out=out) for w in weights]}
    timed = tune.time_calls(calls, x[:, :4], 5)
    assert torch.equal(x, kept)
    for situation in plan.SITUATIONS:  # cuBLAS lets nobody start early and does not start early itself
        assert 2 < bench.percentiles(timed[situation]["bmm"])[1] < 20, timed


def test_no_candidate_is_no_reason_to_leave_the_baseline(tuner, fast):
    bare = dataclasses.replace(tuner, configs=lambda sms, g, m: {WRONG: ("wrong",)})
    assert tune.measure(bare, Gemm(16, 64))["1"] == {"choice": ["cublas", None], "us": {"cublas": 2.0}}


@pytest.mark.parametrize("shape", [Gemm(48, 64), Gemm(16, 24, 2, True)])
def test_the_harness_times_for_real(tuner, shape):
    entry = tune.measure(tuner, shape)["1"]  # of fewer rounds, a busy machine could slow most of those of the kernel between
    assert set(entry["us"]) == {"cublas", "lldecode"}
    assert all(us > 0 for us in entry["us"].values())


def interrupted(monkeypatch, after):
    """From now on the measurement of the product number `after` is interrupted; yields the products measured."""
    measured, original = [], tune.measure

    def measure(tuner, g):
        if len(measured) == after:
            raise KeyboardInterrupt
        measured.append(g)
        return original(tuner, g)

    monkeypatch.setattr(tune, "measure", measure)
    return measured


def test_an_interrupt_keeps_what_was_measured(tuner, model, fast, monkeypatch, capsys):
    gemms = list(dict.fromkeys(products(TINY, 1)))
    measured = interrupted(monkeypatch, 3)
    assert cli.main(["tune", "--model", model]) == 130
    assert "lldecode tune: interrupted; the same command goes on from here" in capsys.readouterr().err
    assert measured == gemms[:3]
    assert len(json.loads(tuner.plans.tuned(GPU[0]).read_text())["shapes"]) == 3


def test_the_same_command_goes_on_where_it_was(tuner, model, fast, monkeypatch):
    gemms = list(dict.fromkeys(products(TINY, 1)))
    path = tuner.plans.tuned(GPU[0])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, 3)
        tune.tune(tuner, gemms, path, jobs=1)
    measured = interrupted(monkeypatch, 99)
    found = tune.tune(tuner, gemms, path, jobs=1)
    assert measured == gemms[3:]
    assert sorted(found) == sorted(map(str, gemms))
    measured.clear()
    tune.test_compiled.clear()
    assert tune.tune(tuner, gemms, path, jobs=1) == found
    assert (measured, tune.test_compiled) == ([], [])


@pytest.mark.parametrize(("key", "value"), [("gpu", "NVIDIA B200"), ("driver", "570"), ("source", "0" * 12)])
def test_a_stale_plan_is_measured_again_with_the_reason(tuner, model, fast, capsys, key, value):
    path = tuner.plans.tuned(GPU[0])
    stamp = tuner.plans.stamp(GPU[0])
    plan.write(path, stamp | {key: value}, {"N=1 K=1": {}})
    assert cli.main(["tune", "--model", model]) == 0
    assert f"measuring again: {path}: stale: {key}: expected {stamp[key]}, got {value}" in capsys.readouterr().err
    shapes, reason = plan.read(path, stamp)
    assert reason is None
    assert "N=1 K=1" not in shapes


def test_out_is_where_the_plan_goes(tuner, model, fast, tmp_path):
    assert cli.main(["tune", "--model", model, "--out", str(tmp_path / "new" / "dir")]) == 0
    assert [p.name for p in (tmp_path / "new" / "dir").iterdir()] == ["one-h200.json"]
    assert not tuner.plans.tuned(GPU[0]).exists()


def test_no_tuner(monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert cli.main(["tune"]) == 2
    assert capsys.readouterr().err == "lldecode tune: no installed feature has anything to tune; pip install lldecode-skinny-gemm\n"


def test_a_compiler_that_is_killed_exits_1_with_one_line(tuner, model, monkeypatch, capsys):
    def killed(*args, **kwargs):
        raise BrokenProcessPool

    monkeypatch.setattr(tune, "precompile", killed)
    assert cli.main(["tune", "--model", model, "--jobs", "3"]) == 1
    reason = "a process that compiles was killed, for want of memory perhaps; try less than --jobs 3"
    assert capsys.readouterr().err == f"lldecode tune: {reason}\n"


def test_a_tuner_that_cannot_be_loaded(tuner, monkeypatch, capsys):
    broken = Point(None)
    broken.name, broken.load = "broken", lambda: exit(3)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Point(tuner), broken])
    assert cli.main(["tune"]) == 2
    assert capsys.readouterr().err == "lldecode tune: broken: failed to import: SystemExit: 3\n"
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Point(3)])
    assert cli.main(["tune"]) == 2
    assert capsys.readouterr().err == "lldecode tune: one: expected a Tuner, got 3\n"


def test_no_gpu(tuner, monkeypatch, capsys):
    monkeypatch.setattr(jit, "unavailable", lambda: "no CUDA device")
    assert cli.main(["tune"]) == 1
    assert capsys.readouterr().err == "lldecode tune: no CUDA device\n"


def test_no_place_for_a_plan(tuner, model, tmp_path, capsys):
    (tmp_path / "cache").mkdir(mode=0o755)
    assert cli.main(["tune", "--model", model]) == 1
    err = capsys.readouterr().err
    assert err == f"lldecode tune: {tmp_path / 'cache'}: expected mode 0700, got 0755; see --out\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "/no/such"], "--model: expected glm52, dsv32, a directory with a config.json, or that file; got '/no/such'"),
        (["--model", "{empty}"], "--model: expected glm52, dsv32, a directory with a config.json, or that file; got '{empty}'"),
        (["--model", "{broken}"], "--model: expected glm52, dsv32, a directory with a config.json, or that file; got '{broken}'"),
        (["--model", "{other}"], "--model: expected a DeepSeek-Sparse-Attention model, got a config without 'kv_lora_rank': {other}"),
        (["--model", "{null}"], "--model: n_shared_experts: expected a whole number from 1, got None"),
        (["--model", "{text}"], "--model: hidden_size: expected a whole number from 1, got '64'"),
        (["--tp", "0"], "--tp: expected a whole number from 1, got 0"),
        (["--jobs", "-1"], "--jobs: expected a whole number from 1, got -1"),
        (["--tp", "7"], "--tp: expected a divisor of 64 attention heads, got 7"),
    ],
)
def test_bad_input_exits_2_with_one_line(tuner, tmp_path, capsys, args, message):
    paths = {"empty": tmp_path} | {name: tmp_path / f"{name}.json" for name in ("broken", "other", "null", "text")}
    paths["null"].write_text(json.dumps(TINY | {"n_shared_experts": None}))
    paths["text"].write_text(json.dumps(TINY | {"hidden_size": "64"}))
    paths["broken"].write_text("[]")
    paths["other"].write_text('{"hidden_size": 64}')
    assert cli.main(["tune", *(a.format(**paths) for a in args)]) == 2
    assert capsys.readouterr().err == f"lldecode tune: {message.format(**paths)}\n"


def test_an_out_that_cannot_be_written_exits_2_before_the_measurement(tuner, model, fast, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert cli.main(["tune", "--model", model, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"lldecode tune: --out: no permission to write in '{tmp_path}'\n"
    assert tune.test_compiled == []


def test_an_out_that_is_a_file_exits_2(tuner, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["tune", "--out", str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().err


def test_the_products_of_a_rank_of_glm52():
    assert {str(g) for g in products(MODELS["glm52"], 8)} == {
        *("N=2624 K=6144", "N=2048 K=2048", "N=6144 K=2048", "N=6144 K=12288", "N=4096 K=2048", "N=160 K=6144", "N=3072 K=6144"),
        *("N=6144 K=1536", "N=512 K=6144", "N=6144 K=256", "N=19360 K=6144", "N=512 K=192 B=8 n-major", "N=256 K=512 B=8"),
    }


@pytest.mark.parametrize(("tp", "rows"), [(1, 128), (2, 64)])
def test_a_vocabulary_is_padded_to_a_multiple_of_64_before_it_is_divided(tp, rows):
    assert Gemm(rows, 64) in products(TINY | {"intermediate_size": 1000}, tp)


def test_the_products_of_a_rank_of_deepseek_v32():
    got = {str(g) for g in products(MODELS["dsv32"], 8)}
    assert {"N=2112 K=7168", "N=3072 K=1536", "N=7168 K=2048", "N=7168 K=14336", "N=16160 K=7168", "N=512 K=128 B=16 n-major"} <= got


def test_interrupted_compilation_leaves_no_work_behind(monkeypatch):
    """The processes that compile know the arch when they start, and leave Ctrl-C to their parent."""
    cancelled, started = [], []

    class Pool:
        def __init__(self, jobs, context, *start):
            started.append((jobs, context.get_start_method(), *start, os.environ["CUTE_DSL_ARCH"]))

        def map(self, *args, chunksize):
            raise KeyboardInterrupt

        def shutdown(self, cancel_futures):
            cancelled.append(cancel_futures)

    monkeypatch.setenv("CUTE_DSL_ARCH", "")  # and back
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        tune.precompile("a:b", [1], 1)
    assert started == [(1, "spawn", signal.signal, (signal.SIGINT, signal.SIG_IGN), "sm_90a")]
    assert cancelled == [True]
