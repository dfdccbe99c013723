import pytest
from hypothesis import given
from hypothesis import strategies as st

from lldecode.flags import FlagError, Setting, env_name, read, selected

INSTALLED = ["a-b", "c"]
CATALOG = ["a-b", "c", "later"]


def get(**environ):
    return read(environ, INSTALLED, CATALOG)


def toml(tmp_path, text):
    file = tmp_path / "flags.toml"
    file.write_text(text)
    return str(file)


def test_nothing_set_is_nothing_found():
    assert get() == {}
    assert get(LLDECODE_C="", LLDECODE_OFF=" ", LLDECODE_FEATURES="") == {}


@pytest.mark.parametrize("value", ["off", "auto", "on", "0%", "7%", "25%", "100%", " ON "])
def test_every_state_is_read(value):
    assert get(LLDECODE_A_B=value) == {"a-b": Setting(value.strip().lower(), "LLDECODE_A_B")}


def test_precedence_of_every_source(tmp_path):
    config = toml(tmp_path, '[features]\na-b = "auto"\nc = "30%"\n')
    environ = {"LLDECODE_CONFIG": config}
    assert get(**environ)["a-b"] == Setting("auto", f"LLDECODE_CONFIG={config}")
    environ["LLDECODE_FEATURES"] = "a-b=50%"
    assert get(**environ)["a-b"] == Setting("50%", "LLDECODE_FEATURES")
    environ["LLDECODE_A_B"] = "on"
    assert get(**environ)["a-b"] == Setting("on", "LLDECODE_A_B")
    environ["LLDECODE_OFF"] = "a-b"
    assert get(**environ)["a-b"] == Setting("off", "LLDECODE_OFF")
    assert get(**environ)["c"] == Setting("30%", f"LLDECODE_CONFIG={config}")


def test_kill_switch_for_all_and_for_a_list():
    assert {k: v.value for k, v in get(LLDECODE_OFF="all", LLDECODE_A_B="on").items()} == {"a-b": "off", "c": "off"}
    assert {k: v.value for k, v in get(LLDECODE_OFF="a-b, c").items()} == {"a-b": "off", "c": "off"}


@pytest.mark.parametrize("value", ["all", "ALL", "a-b,all"])
@pytest.mark.parametrize(
    "broken", [{"LLDECODE_C": "banana"}, {"LLDECODE_CONFIG": "/no/such"}, {"LLDECODE_TYPO": "on"}, {"LLDECODE_LATER": "on"}]
)
def test_all_off_starts_whatever_else_is_wrong(value, broken):
    assert {k: v.value for k, v in get(LLDECODE_OFF=value, **broken).items()} == {"a-b": "off", "c": "off"}


def test_an_empty_variable_is_unset():
    assert get(LLDECODE_TYPO="", LLDECODE_C=" ") == {}


def test_the_share_is_the_count_of_chosen_buckets(monkeypatch):
    class Digest:
        def digest(self):
            return (7).to_bytes(8, "big") * 4  # bucket 7

    monkeypatch.setattr("hashlib.sha256", lambda _: Digest())
    assert [selected("c", Setting(f"{n}%", ""), {})[0] for n in (0, 7, 8, 100)] == [False, False, True, True]


def test_features_list_bare_name_means_on():
    assert {k: v.value for k, v in get(LLDECODE_FEATURES="a-b, c=off,").items()} == {"a-b": "on", "c": "off"}


def test_a_variable_that_a_feature_reads_by_itself_is_known():
    assert get(LLDECODE_SKINNY_GEMM_LAYERS="lm_head", LLDECODE_MTP_SPEC_SHARE="1", LLDECODE_MTP_SPEC_LOCAL_ARGMAX="1") == {}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"LLDECODE_AB": "on"}, r"LLDECODE_AB: unknown variable; known: .*LLDECODE_A_B.*LLDECODE_OFF"),
        ({"LLDECODE_SKINNY_GEM": "on"}, "LLDECODE_SKINNY_GEM: unknown variable"),
        ({"LLDECODE_SKINNY_GEMM_LAYER": "lm_head"}, "LLDECODE_SKINNY_GEMM_LAYER: unknown variable; known: .*LLDECODE_SKINNY_GEMM_LAYERS"),
        ({"LLDECODE_OFF": "a_b"}, r"LLDECODE_OFF: unknown feature 'a_b'; known: a-b, c, later"),
        ({"LLDECODE_FEATURES": "d=on"}, "LLDECODE_FEATURES: unknown feature 'd'"),
        ({"LLDECODE_FEATURES": "c=on,c=off"}, "LLDECODE_FEATURES: c is set twice"),
        ({"LLDECODE_C": "yes"}, r"LLDECODE_C: expected off, auto, on, or a share like 25% for c, got 'yes'"),
        ({"LLDECODE_C": "101%"}, "LLDECODE_C: expected"),
        ({"LLDECODE_C": "-1%"}, "LLDECODE_C: expected"),
        ({"LLDECODE_C": "shadow"}, "LLDECODE_C: shadow is not available yet"),
        ({"LLDECODE_FEATURES": "c="}, "LLDECODE_FEATURES: expected"),
        ({"LLDECODE_LATER": "on"}, r"LLDECODE_LATER: later is not installed \(package lldecode-later\)"),
        ({"LLDECODE_CONFIG": "/no/such.toml"}, "LLDECODE_CONFIG=/no/such.toml: .*No such file"),
    ],
)
def test_errors_name_the_source_and_what_is_known(environ, message):
    with pytest.raises(FlagError, match=message):
        get(**environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[features\n", "LLDECODE_CONFIG=.*Expected"),
        ("[feature]\nc = 'on'\n", r"expected one table \[features\]"),
        ("features = 1\n", r"expected one table \[features\]"),
        ("[features]\nc = true\n", "expected off, auto, on"),
        ("[features]\nzz = 'on'\n", "unknown feature 'zz'"),
    ],
)
def test_malformed_files(tmp_path, text, message):
    with pytest.raises(FlagError, match=message):
        get(LLDECODE_CONFIG=toml(tmp_path, text))


def test_config_that_is_not_text(tmp_path):
    file = tmp_path / "flags.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FlagError, match="LLDECODE_CONFIG"):
        get(LLDECODE_CONFIG=str(file))


def test_off_for_a_feature_that_is_not_installed_never_prevents_a_start():
    assert get(LLDECODE_LATER="off", LLDECODE_OFF="later") == {}


def test_selected_states():
    assert selected("c", Setting("off", ""), {}) == (False, False)
    assert selected("c", Setting("auto", ""), {}) == (True, False)
    assert selected("c", Setting("on", ""), {}) == (True, True)
    assert selected("c", Setting("0%", ""), {}) == (False, False)
    assert selected("c", Setting("100%", ""), {}) == (True, True)


@given(replica=st.text(min_size=1).filter(str.strip), shares=st.tuples(st.integers(0, 100), st.integers(0, 100)))
def test_raising_the_share_keeps_the_selected(replica, shares):
    low, high = sorted(shares)
    environ = {"LLDECODE_REPLICA": replica}
    if selected("c", Setting(f"{low}%", ""), environ)[0]:
        assert selected("c", Setting(f"{high}%", ""), environ)[0]


def test_share_is_met_and_independent_between_features():
    chosen = {f: {r for r in range(4000) if selected(f, Setting("25%", ""), {"LLDECODE_REPLICA": str(r)})[0]} for f in ("a-b", "c")}
    for picked in chosen.values():
        assert 0.22 < len(picked) / 4000 < 0.28
    assert 0.04 < len(chosen["a-b"] & chosen["c"]) / 4000 < 0.085


def test_share_defaults_to_the_host_name(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node-1")
    one = selected("c", Setting("50%", ""), {})
    assert one == selected("c", Setting("50%", ""), {"LLDECODE_REPLICA": "node-1"})
    results = set()
    for i in range(20):
        monkeypatch.setattr("socket.gethostname", lambda i=i: f"node-{i}")
        results.add(selected("c", Setting("50%", ""), {}))
    assert len(results) == 2


def test_env_name():
    assert env_name("ll-bf16-router") == "LLDECODE_LL_BF16_ROUTER"
