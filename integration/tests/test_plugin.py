"""register() against a stand-in for vLLM; the real one is in tests/test_vllm_contract.py."""

import dataclasses
import importlib
import logging
import os
import sys
import textwrap
import types

import pytest

from lldecode import cache_key, plugin, registry, source
from lldecode import feature as contract
from lldecode.feature import Context
from lldecode.flags import FlagError
from lldecode.plugin import StartError

MODEL = """
    def f(x):
        return ("f", x)
    def g(x):
        return ("g", x)
"""
CONFIG = """
    class VllmConfig:
        def compute_hash(self):
            return "stock"
"""
FEATURE = """
    from lldecode.feature import Feature, Patch
    def wrap(original):
        return lambda x: ("{name}", original(x))
    FEATURE = Feature("{name}", "test", (Patch("vllm.{target}", wrap, "test", "never", frozenset({{"{hash}"}})),),
                      probe=lambda ctx: None if (9, 0) in ctx.capabilities else "capability: expected 9.0, got %s" % (ctx.capabilities,))
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch, only_fakes):
    """A package named vllm, 0.26.0 on one (9, 0) GPU, with the real cache-key patch pointed at its VllmConfig."""
    saved = {k: sys.modules.pop(k) for k in list(sys.modules) if k.split(".")[0] == "vllm"}
    root = tmp_path / "vllm"
    (root / "config").mkdir(parents=True)
    for name, text in {"__init__": "", "model": MODEL, "config/__init__": "", "config/vllm": CONFIG}.items():
        (root / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    platform = types.SimpleNamespace(
        is_cuda=lambda: True, device_count=lambda: 1, get_device_capability=lambda i: types.SimpleNamespace(major=9, minor=0)
    )
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = platform
    sys.modules["vllm.platforms"] = platforms
    real = registry.versions
    monkeypatch.setattr(registry, "versions", lambda: real() | {"vllm": "0.26.0"})
    monkeypatch.setattr(plugin, "_active", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    here = source.definition("vllm.config.vllm:VllmConfig.compute_hash").hash
    make = cache_key.feature

    def feature(fingerprint):
        made = make(fingerprint)
        return dataclasses.replace(made, patches=(dataclasses.replace(made.patches[0], expects=frozenset({here})),))

    monkeypatch.setattr(cache_key, "feature", feature)
    yield types.SimpleNamespace(platform=platform, root=root, stock_key=make)
    if plugin._active is not None:
        plugin._active.engine.reconcile([])
    for name in [m for m in sys.modules if m.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(saved)


@pytest.fixture
def two(vllm, install):
    for name, target in (("one", "model:f"), ("two", "model:g")):
        install(name, FEATURE.format(name=name, target=target, hash=source.definition(f"vllm.{target}").hash))
    return vllm


def key():
    return importlib.import_module("vllm.config.vllm").VllmConfig().compute_hash()


def model():
    return importlib.import_module("vllm.model")


def test_applies_and_keys_the_compile_cache(two):
    plugin.register()
    assert model().f(1) == ("one", ("f", 1))
    assert key() == f"stock-{plugin.active().fingerprint}"
    assert plugin.active().fingerprint != "none"


def test_all_off_is_stock_vllm(two):
    os.environ["LLDECODE_OFF"] = "all"
    plugin.register()
    assert model().f(1) == ("f", 1)
    assert key() == "stock"
    assert plugin.active().fingerprint == "none"


def test_the_key_differs_between_sets(two):
    plugin.register()
    both = key()
    plugin._active.engine.reconcile([])
    plugin._active = None
    os.environ["LLDECODE_TWO"] = "off"
    plugin.register()
    assert key() not in (both, "stock")


def test_second_call_reads_nothing(two):
    plugin.register()
    first = plugin.active()
    os.environ["LLDECODE_NO_SUCH"] = "on"
    plugin.register()
    assert plugin.active() is first


def test_typo_fails_at_start_and_lists_the_known(two):
    os.environ["LLDECODE_OEN"] = "on"
    with pytest.raises(FlagError, match=r"LLDECODE_OEN: unknown variable; known: .*LLDECODE_ONE"):
        plugin.register()
    assert plugin.active() is None


@pytest.mark.parametrize("kind", ["version", "capability", "drift", "key drift", "taken"])
def test_refused_auto_leaves_stock_with_a_reason_and_on_fails(two, monkeypatch, caplog, kind):
    expected = {
        "version": "vllm: expected >=0.26,<0.27, got 0.33.0",
        "capability": r"capability: expected 9.0, got \(\(12, 0\),\)",
        "drift": "vllm.model:f changed: expected source hash",
        "key drift": "compute_hash changed",
        "taken": "vllm.model:f was changed by somebody else",
    }[kind]
    if kind == "version":
        monkeypatch.setattr(registry, "versions", lambda: {"vllm": "0.33.0"})
    elif kind == "capability":
        two.platform.get_device_capability = lambda i: types.SimpleNamespace(major=12, minor=0)
    elif kind == "drift":
        (two.root / "model.py").write_text(textwrap.dedent(MODEL).replace('"f"', '"F"'))
    elif kind == "key drift":
        monkeypatch.setattr(cache_key, "feature", two.stock_key)
    else:
        model().f = len
    with caplog.at_level(logging.INFO, "lldecode"):
        plugin.register()
    status = {s.name: s for s in plugin.active().statuses}["one"]
    assert status.state == "refused"
    assert __import__("re").search(expected, status.reason)
    assert "one 0.1.0: refused (auto, default): " in caplog.text
    if kind in ("version", "drift", "key drift"):  # doctor, in a process of its own, says the same
        doctor = {s.name: s for s in registry.survey(Context(((9, 0),), registry.versions()), os.environ)}["one"]
        assert (doctor.state, doctor.reason) == ("refused", status.reason)
    wanted = "stock" if kind in ("version", "capability", "key drift") else f"stock-{plugin.active().fingerprint}"
    assert key() == wanted

    plugin._active.engine.reconcile([])
    plugin._active = None
    os.environ["LLDECODE_ONE"] = "on"
    with pytest.raises(StartError, match=rf"one is on \(LLDECODE_ONE\) but: .*{expected}"):
        plugin.register()
    assert key() == "stock"


def test_a_feature_dropped_at_a_later_import_leaves_the_key_and_the_statuses(two):
    (two.root / "model.py").write_text(textwrap.dedent(MODEL) + "del g\n")
    plugin.register()
    before = key()
    assert model().f(1) == ("one", ("f", 1))
    status = {s.name: s for s in plugin.active().statuses}["two"]
    assert (status.state, "it is now gone" in status.reason) == ("refused", True)
    assert key() != before


@pytest.mark.parametrize(
    ("default", "environ", "pdl"),
    [
        ("auto", {}, True),
        ("off", {}, None),
        ("auto", {"LLDECODE_PDL": "off"}, False),
        ("auto", {"LLDECODE_FEATURES": "pdl=off"}, False),
        ("off", {"LLDECODE_PDL": "on"}, True),
        ("auto", {"LLDECODE_PDL": "0%"}, None),
        ("auto", {"LLDECODE_OFF": "pdl"}, None),
    ],
)
def test_pdl_flag_reaches_the_adapters(vllm, install, default, environ, pdl):
    contract.set_pdl(None)
    install("pdl", f"from lldecode.feature import Feature\nFEATURE = Feature('pdl', '', (), default={default!r})")
    os.environ.update(environ)
    plugin.register()
    assert contract.pdl() is pdl
    contract.set_pdl(None)


def test_no_gpu_platform(two):
    two.platform.is_cuda = lambda: False
    plugin.register()
    assert {s.state for s in plugin.active().statuses} == {"refused", "not installed"}


def test_logs_through_vllms_handlers(two, monkeypatch):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    ours, theirs = logging.getLogger("lldecode"), logging.getLogger("vllm")
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "level", logging.INFO)
    monkeypatch.setattr(ours, "hasHandlers", lambda: False)
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(ours, name, getattr(ours, name))
    ours._cache.clear()
    plugin.register()
    assert "one 0.1.0: on (auto, default)" in lines
    assert any(line.startswith("fingerprint ") for line in lines)
