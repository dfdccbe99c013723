import sys

import pytest

from lldecode import cli, registry
from lldecode.feature import Context

GOOD = """
    from lldecode.feature import Feature
    FEATURE = Feature("{name}", "a test feature", (), probe=lambda ctx: {reason!r}, default={default!r})
"""
HERE = Context(((9, 0),), {"vllm": "0.26.0"})


def survey(environ, ctx=HERE):
    return {s.name: s for s in registry.survey(ctx, environ, host="lldecode")}


def good(name, reason=None, default="auto"):
    return GOOD.format(name=name, reason=reason, default=default)


def test_states_and_reasons(install, only_fakes):
    install("runs", good("runs"))
    install("cannot", good("cannot", reason="no CUDA device"))
    install("sleeps", good("sleeps", default="off"))
    found = survey({})
    assert (found["runs"].state, found["runs"].setting.source, found["runs"].version) == ("on", "default", "0.1.0")
    assert (found["cannot"].state, found["cannot"].reason, found["cannot"].required) == ("refused", "no CUDA device", False)
    assert (found["sleeps"].state, found["sleeps"].reason) == ("off", "off by default")
    assert found["not-there"].state == "not installed"
    assert survey({"LLDECODE_CANNOT": "on"})["cannot"].required


def test_a_broken_package_is_a_reason_not_a_crash(install, only_fakes):
    install("broken", "raise RuntimeError('needs sm_100')")
    found = survey({})["broken"]
    assert (found.state, found.required) == ("refused", False)
    assert "failed to import: RuntimeError: needs sm_100" in found.reason
    assert survey({"LLDECODE_BROKEN": "on"})["broken"].required


class Panic(BaseException):
    """What a panic in Rust becomes is no Exception either."""

    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("from test_registry import Panic; raise Panic", "Panic"),
        ("from lldecode_no_such_module import x", "ModuleNotFoundError: No module named 'lldecode_no_such_module'"),
    ],
)
def test_whatever_an_import_raises_is_a_reason(install, only_fakes, monkeypatch, statement, reason):
    monkeypatch.setitem(sys.modules, "test_registry", sys.modules[__name__])
    install("broken", statement)
    assert survey({})["broken"].reason == f"failed to import: {reason}"


def test_an_interrupt_during_an_import_is_the_users(install, only_fakes):
    install("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        survey({})


def test_one_name_from_two_distributions_names_both(install, only_fakes, capsys):
    install("one", good("one"))
    install("one", good("one"), "0.2.0", module="fake_other")
    found = survey({})["one"]
    both = "lldecode-fake_one 0.1.0, lldecode-fake_other 0.2.0"
    reason = f"failed to import: ImportError: one: expected one distribution that offers it, got {both}"
    assert (found.state, found.reason) == ("refused", reason)
    assert survey({"LLDECODE_ONE": "on"})["one"].required
    assert survey({"LLDECODE_ONE": "off"})["one"].state == "off"
    assert cli.main(["flags"]) == 0


@pytest.mark.parametrize(
    ("made", "reason"),
    [("probe=lambda ctx: exit(1)", "SystemExit: 1"), ("vllm='0.26'", "InvalidSpecifier: Invalid specifier: '0.26'")],
)
def test_a_feature_that_cannot_even_be_asked_is_refused(install, only_fakes, made, reason):
    install("odd", f"from lldecode.feature import Feature\nFEATURE = Feature('odd', '', (), {made})")
    found = {s.name: s for s in registry.survey(HERE, {})}["odd"]
    assert (found.state, found.reason) == ("refused", f"probe failed: {reason}")


@pytest.mark.parametrize("environ", [{"LLDECODE_BROKEN": "off"}, {"LLDECODE_OFF": "broken"}, {"LLDECODE_OFF": "all"}])
def test_a_feature_that_is_off_is_never_imported(install, only_fakes, environ, tmp_path):
    install("broken", f"open({str(tmp_path / 'imported')!r}, 'w')")
    assert survey(environ)["broken"].state == "off"
    assert not (tmp_path / "imported").exists()


def test_wrong_object_or_name_behind_the_entry_point(install, only_fakes):
    install("wrong", good("other"))
    install("worse", "FEATURE = 3")
    patch = "Patch('torch.x:f', id, 'why', 'never', frozenset({'0' * 16}))"
    install("lost", f"from lldecode.feature import Feature, Patch\nFEATURE = Feature('lost', 'test', ({patch},))")
    found = survey({})
    assert "expected patches that apply in vllm or lldecode (Patch.host), got torch" in found["lost"].reason
    assert "expected a Feature named 'wrong'" in found["wrong"].reason
    assert "expected a Feature named 'worse'" in found["worse"].reason


def test_share_that_does_not_select(install, only_fakes):
    install("runs", good("runs"))
    assert survey({"LLDECODE_RUNS": "0%"})["runs"].reason == "0% does not select this replica"


def test_a_probe_sees_whether_the_user_insisted(install, only_fakes):
    body = """
        from lldecode.feature import Feature
        FEATURE = Feature("shy", "", (), probe=lambda ctx: None if ctx.required else "only when asked for")
    """
    install("shy", body)
    assert survey({})["shy"].reason == "only when asked for"
    assert survey({"LLDECODE_SHY": "on"})["shy"].state == "on"
    assert survey({"LLDECODE_SHY": "100%"})["shy"].state == "on"


def test_fingerprint_follows_what_is_on(install, only_fakes):
    install("one", good("one"))
    install("two", good("two"))
    prints = [
        registry.fingerprint(list(survey(e).values()))
        for e in ({}, {"LLDECODE_ONE": "off"}, {"LLDECODE_TWO": "off"}, {"LLDECODE_OFF": "all"})
    ]
    assert len(set(prints)) == 4
    assert prints[3] == "none"
    assert prints[0] == registry.fingerprint(list(reversed(survey({}).values())))


def test_fingerprint_follows_what_features_read_by_themselves(install, only_fakes, monkeypatch):
    install("one", good("one"))
    install("pdl", good("pdl"))
    off = [survey(e) for e in ({"LLDECODE_OFF": "pdl"}, {"LLDECODE_PDL": "off"})]
    prints = [registry.fingerprint(list(s.values())) for s in off]
    monkeypatch.setenv("LLDECODE_SKINNY_GEMM_LAYERS", "*.o_proj")
    prints.append(registry.fingerprint(list(off[0].values())))
    assert len(set(prints)) == 3


def test_only_a_flag_that_says_off_is_for_every_kernel(install, only_fakes, monkeypatch):
    monkeypatch.setattr(registry, "catalog", lambda: {"pdl": "lldecode-pdl"})
    assert survey({})["pdl"].state == "not installed"
    assert not registry.says_no_pdl(list(survey({}).values()))
    install("pdl", good("pdl"))
    said = {"": False, "off": True, "on": False, "0%": False}
    assert {v: registry.says_no_pdl(list(survey({"LLDECODE_PDL": v}).values())) for v in said} == said


def test_off_by_default_is_not_said_by_a_user(install, only_fakes):
    install("pdl", good("pdl", default="off"))
    found = survey({})
    assert (found["pdl"].state, registry.says_no_pdl(list(found.values()))) == ("off", False)


def test_fingerprint_follows_the_source(install, only_fakes, tmp_path):
    install("one", good("one"))
    before = registry.fingerprint(list(survey({}).values()))
    with (tmp_path / "site/fake_one.py").open("a") as f:
        f.write("# changed\n")
    assert registry.fingerprint(list(survey({}).values())) != before


def test_an_allow_list_of_plugins_without_this_one_is_a_reason(install, only_fakes, monkeypatch):
    install("one", good("one"))
    monkeypatch.setattr(registry, "drift", lambda patch: None)  # of the cache key, where vLLM is not installed
    environ = {"VLLM_PLUGINS": "other,another"}
    found = {s.name: s for s in registry.survey(HERE, environ)}["one"]
    assert found.reason == "VLLM_PLUGINS: expected lldecode among the plugins that vLLM loads, got 'other,another'"
    assert {s.name: s for s in registry.survey(HERE, {"VLLM_PLUGINS": "lldecode,other"})}["one"].state == "on"


def test_the_real_catalog_and_versions():
    assert "ll-bf16-router" in registry.catalog()
    assert not {"all", "vllm"} & set(registry.catalog())
    assert registry.versions()["torch"].startswith("2.")


def test_a_distribution_that_is_missing_is_not_in_versions(monkeypatch):
    monkeypatch.setattr(registry, "_PROBED_DISTRIBUTIONS", ("torch", "no-such-distribution"))
    assert set(registry.versions()) == {"torch"}
