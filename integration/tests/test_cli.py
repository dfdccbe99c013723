import json

import pytest

from lldecode import cli, registry
from lldecode.feature import Context

FEATURE = """
    from lldecode.feature import Feature
    FEATURE = Feature("one", "a test feature", (),
                      probe=lambda ctx: None if (9, 0) in ctx.capabilities else "no CUDA device")
"""


@pytest.fixture
def one(install, only_fakes, monkeypatch):
    install("one", FEATURE)
    monkeypatch.setattr(registry, "cuda_context", lambda: Context(((9, 0),), {"vllm": "0.26.0", "torch": "2.11.0"}))


def test_doctor_reports_flag_state_reason_and_drift(one, capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {f["name"]: f for f in report["features"]}
    assert found["not-there"]["state"] == "not installed"
    assert (found["one"]["version"], found["one"]["flag"], found["one"]["source"]) == ("0.1.0", "auto", "default")
    assert report["capabilities"] == [[9, 0]]


def test_doctor_text_names_everything(one, capsys, monkeypatch):
    monkeypatch.setenv("LLDECODE_OFF", "one")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "one 0.1.0: off: set by LLDECODE_OFF" in out
    assert "LLDECODE_ONE: off (LLDECODE_OFF)" in out
    assert "not-there : not installed" in out


@pytest.mark.parametrize(
    ("ctx", "reason"),
    [
        (Context(((9, 0),), {}), "vllm is not installed"),
        (Context(((9, 0),), {"vllm": "0.33.0"}), "vllm: expected >=0.26,<0.27, got 0.33.0"),
        (Context(((12, 0),), {"vllm": "0.26.0"}), "no CUDA device"),
    ],
)
def test_doctor_exits_1_where_the_start_would_fail(one, capsys, monkeypatch, ctx, reason):
    monkeypatch.setattr(registry, "cuda_context", lambda: ctx)
    assert cli.main(["doctor"]) == 0
    assert f"one 0.1.0: refused: {reason}" in capsys.readouterr().out
    monkeypatch.setenv("LLDECODE_ONE", "on")
    assert cli.main(["doctor"]) == 1
    assert "would fail to start" in capsys.readouterr().out


def test_a_bad_flag_exits_2_with_one_line(one, capsys, monkeypatch):
    monkeypatch.setenv("LLDECODE_OEN", "on")
    for command in ("doctor", "flags"):
        assert cli.main([command]) == 2
        err = capsys.readouterr().err
        assert err.startswith("lldecode: LLDECODE_OEN: unknown variable; known: ")
        assert len(err.splitlines()) == 1


def test_flags_shows_where_each_value_comes_from(one, capsys, monkeypatch):
    monkeypatch.setenv("LLDECODE_FEATURES", "one=0%")
    assert cli.main(["flags", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"feature": "not-there", "variable": "LLDECODE_NOT_THERE", "value": "off", "source": "not installed", "here": "off"},
        {"feature": "one", "variable": "LLDECODE_ONE", "value": "0%", "source": "LLDECODE_FEATURES", "here": "off"},
    ]
    assert cli.main(["flags"]) == 0
    assert "LLDECODE_FEATURES" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("lldecode 0.")
