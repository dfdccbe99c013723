import hashlib
import json

import pytest
import torch

from lldecode import plan
from lldecode.plan import Gemm, Plans

GPU = "NVIDIA H200"
STAMP = {"gpu": GPU, "driver": "580"}


@pytest.fixture
def plans(tmp_path, monkeypatch):
    monkeypatch.setenv("LLDECODE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(plan, "driver", lambda: "580")
    (tmp_path / "kernel.py").write_text("x = 1\n")
    return Plans("one", tmp_path / "kernel.py")


def entry(provider, variant=None):
    return {"choice": [provider, variant], "us": {"cublas": 2.0, provider: 1.0}}


def test_where_plans_are_and_what_they_carry(plans, tmp_path):
    assert plans.shipped(GPU) == tmp_path / "plans" / "h200.json"
    assert plans.shipped("NVIDIA H100 80GB HBM3").name == "h100-80gb-hbm3.json"
    assert plans.tuned(GPU) == tmp_path / "cache" / "one-h200.json"
    assert plans.tuned(GPU, tmp_path) == tmp_path / "one-h200.json"
    assert plans.stamp(GPU) == STAMP | {"source": hashlib.sha256(b"x = 1\n").hexdigest()[:12], "timed": "chain behind alone"}


def test_what_is_written_is_read(plans):
    shapes = {"b": {"8": entry("lldecode", [1, 2])}, "a": {"1": entry("cublas")}}
    path = plans.tuned(GPU)
    plan.write(path, plans.stamp(GPU), shapes)
    assert json.loads(path.read_text()) == plans.stamp(GPU) | {"shapes": shapes}
    assert plan.read(path, plans.stamp(GPU)) == (shapes, None)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_others_may_read_a_plan_in_a_directory_that_is_ones_own(plans):
    """The directory also keeps machine code, which is loaded only from one of this mode."""
    path = plans.tuned(GPU)
    path.parent.rmdir()
    plan.write(path, plans.stamp(GPU), {})
    assert [p.stat().st_mode & 0o777 for p in (path.parent, path)] == [0o700, 0o644]


def test_a_write_that_fails_leaves_the_old_file_alone(plans, monkeypatch):
    path = plans.tuned(GPU)
    plan.write(path, plans.stamp(GPU), {"a": {}})

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        plan.write(path, plans.stamp(GPU), {"b": {}})
    assert plan.read(path, plans.stamp(GPU)) == ({"a": {}}, None)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_choice_is_the_next_measured_sizes(plans):
    plan.write(plans.tuned(GPU), plans.stamp(GPU), {"a": {"4": entry("x"), "12": entry("y", [3])}})
    assert [plans.choice(GPU, "a", m) for m in (1, 4, 5, 12, 13)] == [("x", None), ("x", None), ("y", [3]), ("y", [3]), None]
    assert plans.choice(GPU, "b", 1) is None
    assert plans.choice("NVIDIA B200", "a", 1) is None
    assert plans.choice(GPU, "a", 1, without=("x",)) is None


def test_the_machines_own_plan_comes_first_and_files_are_read_once(plans):
    plan.write(plans.shipped(GPU), {"gpu": GPU, "source": plans.source}, {"a": {"1": entry("x")}, "b": {"1": entry("z")}})
    assert plans.choice(GPU, "a", 1) == ("x", None)
    plan.write(plans.tuned(GPU), plans.stamp(GPU), {"a": {"1": entry("y")}})
    assert plans.choice(GPU, "a", 1) == ("x", None)
    plans.forget()
    assert [plans.choice(GPU, s, 1) for s in "ab"] == [("y", None), ("z", None)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "\xff",
        '{"shapes": []}',
        '{"shapes": {"a": []}}',
        '{"shapes": {"a": {"1": {}}}}',
        '{"shapes": {"a": {"one": {"choice": ["x", null], "us": {"x": 1}}}}}',
        '{"shapes": {"a": {"1": {"choice": "x", "us": {"x": 1}}}}}',
        '{"shapes": {"a": {"1": {"choice": ["x", null], "us": {}}}}}',
    ],
)
def test_a_file_that_is_no_plan_is_ignored_with_a_reason(plans, caplog, text):
    stamp = json.dumps(plans.stamp(GPU))
    plan.write(plans.tuned(GPU), plans.stamp(GPU), {})
    plans.tuned(GPU).write_bytes(text.replace('{"shapes"', f'{stamp[:-1]}, "shapes"').encode("latin-1"))
    assert plans.choice(GPU, "a", 1) is None
    assert f"one: plan ignored: {plans.tuned(GPU)}: " in caplog.text


def test_a_directory_that_is_not_ones_own_holds_no_plan(plans, tmp_path, caplog):
    plan.write(plans.tuned(GPU), plans.stamp(GPU), {"a": {"1": entry("y")}})
    (tmp_path / "cache").chmod(0o755)
    assert plans.choice(GPU, "a", 1) is None
    assert "one: no plan of this machine: " in caplog.text
    assert "expected mode 0700, got 0755" in caplog.text


def test_a_decision_takes_a_margin_over_the_baseline_alone():
    assert plan.decide({"cublas": 1.039, "lldecode": 1.0}, "cublas") == "cublas"
    assert plan.decide({"cublas": 1.041, "lldecode": 1.0}, "cublas") == "lldecode"
    assert plan.decide({"cublas": 2.0, "lldecode": 1.0, "fused_a": 0.99}, "cublas") == "fused_a"
    assert plan.decide({"cublas": 1.0}, "cublas") == "cublas"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "580"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.57.08  Sat May\n", "575"),
        ("something else", ""),
    ],
)
def test_the_driver_is_its_major_version(monkeypatch, text, expected):
    monkeypatch.setattr("pathlib.Path.read_text", lambda self: text)
    assert plan.driver() == expected


def test_a_product_is_known_by_its_weight():
    assert Gemm.of(torch.empty(1, 16, 64)) == (Gemm(16, 64), 64)
    assert Gemm.of(torch.empty(1, 16, 80)[..., :64]) == (Gemm(16, 64), 80)
    assert Gemm.of(torch.empty(2, 64, 16).mT) == (Gemm(16, 64, 2, True), 16)
    assert [str(g) for g in (Gemm(16, 64), Gemm(16, 64, 2, True))] == ["N=16 K=64", "N=16 K=64 B=2 n-major"]
