import dataclasses
import functools
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lldecode import feature as contract
from lldecode.engine import Engine, RefusedError, drift, refusal
from lldecode.feature import ABSENT, Context, Feature, Patch

MODULE = """
    import functools
    LIMIT = frozenset({"a"})
    def f(x):
        return ("f", x)
    def g(x):
        return ("g", x)
    class C:
        @staticmethod
        def s(x):
            return ("s", x)
        def m(self, x):
            return ("m", x)
    class D(C):
        pass
"""


def tag(label):
    def wrap(original):
        @functools.wraps(original)
        def wrapped(*args):
            return (label, original(*args))

        return wrapped

    return wrap


def test_apply_and_revert_restores_the_identical_object(host, feature):
    host.write("a", MODULE)
    a = host.load("a")
    before = (a.f, vars(a.C)["m"], vars(a.C)["s"], a.LIMIT)
    engine = Engine(
        [
            feature(
                "x",
                host.patch("a:f", tag("x")),
                host.patch("a:C.m", tag("x")),
                host.patch("a:C.s", lambda old: staticmethod(tag("x")(old.__func__))),
                host.patch("a:LIMIT", lambda old: old | {"b"}),
            )
        ],
        host.name,
    )
    engine.reconcile(["x"])
    assert (a.f(1), a.C().m(1), a.C.s(1), a.D().m(1)) == (("x", ("f", 1)), ("x", ("m", 1)), ("x", ("s", 1)), ("x", ("m", 1)))
    assert sorted(a.LIMIT) == ["a", "b"]
    engine.reconcile([])
    after = (a.f, vars(a.C)["m"], vars(a.C)["s"], a.LIMIT)
    assert all(x is y for x, y in zip(before, after, strict=True))


def test_a_target_of_another_package_applies_where_the_patch_says(host, feature):
    host.write("a", MODULE)
    a = host.load("a")
    here = host.patch("a:f", tag("x"))
    assert here.host == host.name
    features = [feature("x", dataclasses.replace(here, host="vllm"))]
    for name, applied in ((host.name, False), ("vllm", True)):
        engine, before = Engine(features, name), a.f
        engine.reconcile(["x"])
        assert (a.f is not before) == applied
        engine.reconcile([])
        assert a.f is before


def test_absent_attribute_is_added_and_deleted(host, feature):
    host.write("a", MODULE)
    a = host.load("a")
    engine = Engine([feature("x", host.patch("a:C.extra", lambda old: lambda self: old))], host.name)
    assert engine._features["x"].patches[0].expects == {ABSENT}
    engine.reconcile(["x"])
    assert a.C().extra() is None
    engine.reconcile([])
    assert not hasattr(a.C, "extra")


def test_inherited_attribute_counts_as_absent_and_the_base_keeps_its_own(host, feature):
    host.write("a", MODULE)
    a = host.load("a")
    engine = Engine([feature("x", host.patch("a:D.m", lambda old: lambda self, x: "patched"))], host.name)
    engine.reconcile(["x"])
    assert (a.D().m(1), a.C().m(1)) == ("patched", ("m", 1))
    engine.reconcile([])
    assert "m" not in vars(a.D)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(walk=st.lists(st.frozensets(st.sampled_from("abc")), max_size=8))
def test_any_walk_ends_where_a_fresh_engine_would(host, walk):
    if not (host.dir / "a.py").exists():
        host.write("a", MODULE)
    a = host.load("a")
    features = [
        Feature("a", "", (host.patch("a:f", tag("a")), host.patch("a:C.m", tag("a"), order=5))),
        Feature("b", "", (host.patch("a:f", tag("b"), order=-1), host.patch("a:g", tag("b")))),
        Feature("c", "", (host.patch("a:C.m", tag("c")),)),
    ]
    original = (a.f, a.g, vars(a.C)["m"])
    engine = Engine(features, host.name)
    for step in walk:
        engine.reconcile(step)

        def fold(names, base, step=step):
            value = base
            for name in names:
                value = (name, value) if name in step else value
            return value

        assert a.f(0) == fold("ba", ("f", 0))
        assert a.g(0) == fold("b", ("g", 0))
        assert a.C().m(0) == fold("ca", ("m", 0))
        assert engine.enabled == step
    engine.reconcile([])
    assert all(x is y for x, y in zip(original, (a.f, a.g, vars(a.C)["m"]), strict=True))


def test_an_unrelated_toggle_leaves_a_wrapper_alone(host, feature):
    host.write("a", MODULE)
    a = host.load("a")
    engine = Engine([feature("x", host.patch("a:f", tag("x"))), feature("y", host.patch("a:g", tag("y")))], host.name)
    engine.reconcile(["x"])
    first = a.f
    engine.reconcile(["x", "y"])
    assert a.f is first


def test_pending_target_is_patched_at_import(host, feature):
    host.write("late", MODULE)
    engine = Engine([feature("x", host.patch("late:f", tag("x")))], host.name)
    engine.reconcile(["x"])
    assert host.target("late") not in sys.modules
    assert engine.pending == {host.target("late:f")}
    assert host.load("late").f(1) == ("x", ("f", 1))
    assert not engine.pending
    engine.reconcile([])
    assert host.load("late").f(1) == ("f", 1)


@pytest.mark.parametrize("name", ["f", "mine"])
@pytest.mark.parametrize("first", ["definition", "copy"])
def test_a_copy_bound_before_or_after_its_definition_was_patched_has_the_same_original(host, feature, first, name):
    host.write("a", MODULE)
    host.write("user", f"from {host.name}.a import f as {name}")
    engine = Engine([feature("x", host.patch("a:f", tag("a")), host.patch(f"user:{name}", tag("user")))], host.name)
    original = host.load("a").f
    if first == "copy":
        host.load("user")
    engine.reconcile(["x"])
    a, user = host.load("a"), host.load("user")
    assert (a.f(1), getattr(user, name)(1)) == (("a", ("f", 1)), ("user", ("f", 1)))
    assert engine.enabled == {"x"} and not engine.dropped
    engine.reconcile([])
    assert a.f is getattr(user, name) is original


def test_a_copy_has_its_own_definitions_original_where_two_were_replaced_by_one_object(host, feature):
    for module in ("a", "c"):
        host.write(module, MODULE)
    host.write("user", f"from {host.name}.a import f")
    one = [host.patch(f"{module}:f", lambda original: len) for module in ("a", "c")]
    engine = Engine([feature("x", *one, host.patch("user:f", tag("user")))], host.name)
    original = host.load("a").f
    host.load("c")
    engine.reconcile(["x"])
    assert host.load("user").f(1) == ("user", ("f", 1))
    engine.reconcile([])
    assert host.load("user").f is original


def test_a_feature_reverted_before_the_import_never_applies(host, feature):
    host.write("late", MODULE)
    engine = Engine([feature("x", host.patch("late:f", tag("x")))], host.name)
    engine.reconcile(["x"])
    engine.reconcile([])
    assert host.load("late").f(1) == ("f", 1)


def test_later_from_imports_get_the_patched_object(host, feature):
    host.write("late", MODULE)
    host.write("user", f"from {host.name}.late import f")
    engine = Engine([feature("x", host.patch("late:f", tag("x")))], host.name)
    engine.reconcile(["x"])
    assert host.load("user").f(1) == ("x", ("f", 1))


def test_changed_source_is_refused_and_nothing_changes(host, feature):
    host.write("a", MODULE)
    a = host.load("a")
    good, bad = host.patch("a:f", tag("x")), host.patch("a:g", tag("x"), expects=frozenset({"0" * 16}))
    before = a.f
    engine = Engine([feature("x", good, bad)], host.name)
    with pytest.raises(RefusedError, match=r"x: .*a:g changed: expected source hash 0{16}, got [0-9a-f]{16}"):
        engine.reconcile(["x"])
    assert a.f is before
    assert engine.enabled == frozenset()


def test_removed_function_class_and_module_are_named(host):
    host.write("a", MODULE)
    gone = host.patch("a:h", tag("x"), expects=frozenset({"0" * 16}))
    assert drift(gone) == f"{host.target('a:h')} no longer exists"
    assert "defines no class E" in drift(host.patch("a:E.m", tag("x"), expects=frozenset({"0" * 16})))
    assert "does not exist in the installed" in drift(host.patch("b:f", tag("x"), expects=frozenset({"0" * 16})))
    elsewhere = Patch("no_such_package.m:f", tag("x"), "", "", frozenset({"0" * 16}))
    assert "no_such_package is not installed" in drift(elsewhere)


def test_comment_outside_the_target_is_no_drift_and_a_decorator_is(host):
    host.write("a", "def f(x):\n    return x\n")
    patch = host.patch("a:f", tag("x"))
    host.write("a", "# a comment\n\ndef f(x):\n    return x\n\ndef other(): ...\n")
    assert drift(patch) is None
    host.write("a", "import functools\n@functools.cache\ndef f(x):\n    return x\n")
    assert "changed" in drift(patch)


@pytest.mark.parametrize("applies_in", ["", "vllm"])
def test_early_bound_copy_is_named(host, feature, applies_in):
    host.write("a", MODULE)
    host.write("user", f"from {host.name}.a import f as mine")
    user, a = host.load("user"), host.load("a")
    only, copy = (dataclasses.replace(host.patch(t, tag("x")), host=applies_in or host.name) for t in ("a:f", "user:mine"))
    with pytest.raises(RefusedError, match=rf"{host.name}\.user bound .*a:f before it was patched: patch {host.name}\.user:mine"):
        Engine([feature("x", only)], only.host).reconcile(["x"])
    assert a.f(1) == ("f", 1)
    both = Engine([feature("x", only, copy)], only.host)
    both.reconcile(["x"])
    assert a.f(1) == user.mine(1) == ("x", ("f", 1))


@pytest.mark.parametrize("theirs", [lambda x: x, len, functools.partial(print), None], ids=["function", "builtin", "callable", "none"])
def test_a_target_changed_by_somebody_else_is_refused(host, feature, theirs):
    host.write("a", MODULE)
    a = host.load("a")
    engine = Engine([feature("x", host.patch("a:f", tag("x")))], host.name)
    a.f = theirs
    with pytest.raises(RefusedError, match="changed by somebody else: it is now"):
        engine.reconcile(["x"])


def test_a_target_changed_while_applied_is_refused_and_kept(host, feature):
    host.write("a", MODULE)
    a = host.load("a")
    engine = Engine([feature("x", host.patch("a:f", tag("x"))), feature("y", host.patch("a:g", tag("y")))], host.name)
    engine.reconcile(["x", "y"])
    theirs = tag("them")(a.f)
    a.f = theirs
    with pytest.raises(RefusedError, match=r"^x: .*changed by somebody else: it is now .*\.f \(.*test_engine.py:\d+\)"):
        engine.reconcile([])
    assert a.f is theirs
    assert a.g(1) == ("y", ("g", 1))


def test_failure_on_the_way_puts_back_what_was_changed(host, feature):
    host.write("a", MODULE)
    host.write(
        "b",
        """
        class Meta(type):
            def __setattr__(cls, name, value):
                raise OSError("read-only")
        class C(metaclass=Meta):
            def m(self):
                return 1
        """,
    )
    a, _ = host.load("a"), host.load("b")
    before = a.f
    engine = Engine([feature("x", host.patch("a:f", tag("x")), host.patch("b:C.m", tag("x")))], host.name)
    with pytest.raises(OSError, match="read-only"):
        engine.reconcile(["x"])
    assert a.f is before
    assert engine.enabled == frozenset()


@pytest.mark.parametrize("raised", [RuntimeError, SystemExit])
def test_a_failing_wrapper_changes_nothing(host, feature, raised):
    host.write("a", MODULE)
    a = host.load("a")
    before = a.f

    def boom(_):
        raise raised("boom")

    engine = Engine([feature("x", host.patch("a:f", tag("x")), host.patch("a:g", boom))], host.name)
    with pytest.raises(RefusedError, match=rf"^x: .*a:g: wrap failed: {raised.__name__}: boom"):
        engine.reconcile(["x"])
    assert a.f is before


def test_late_surprise_drops_only_the_feature_concerned(host, feature, caplog):
    host.write("late", MODULE + "    import builtins\n    g = builtins.len\n    del g\n")
    surprised = feature("x", host.patch("late:g", tag("x")), host.patch("late:C.m", tag("x")))
    fine = feature("y", host.patch("late:f", tag("y")), host.patch("late:C.m", tag("y")))
    engine = Engine([surprised, fine], host.name)
    engine.reconcile(["x", "y"])
    late = host.load("late")
    assert late.f(1) == ("y", ("f", 1))
    assert late.C().m(1) == ("y", ("m", 1))
    assert engine.enabled == {"y"}
    assert "changed by somebody else: it is now gone" in engine.dropped["x"]
    assert "x: off:" in caplog.text


def test_a_site_changed_by_somebody_else_does_not_disturb_a_later_import(host, feature, caplog):
    host.write("a", MODULE)
    host.write("late", MODULE)
    a = host.load("a")
    engine = Engine([feature("x", host.patch("a:f", tag("x"))), feature("y", host.patch("late:f", tag("y")))], host.name)
    engine.reconcile(["x", "y"])
    a.f = theirs = tag("them")(a.f)
    assert host.load("late").f(1) == ("y", ("f", 1))
    assert a.f is theirs
    assert engine.enabled == {"x", "y"}


def test_a_dropped_feature_leaves_a_site_that_somebody_else_changed(host, feature):
    host.write("a", MODULE)
    host.write("late", MODULE + "    del g\n")
    a = host.load("a")
    engine = Engine([feature("x", host.patch("a:f", tag("x")), host.patch("a:g", tag("x")), host.patch("late:g", tag("x")))], host.name)
    engine.reconcile(["x"])
    a.f = theirs = tag("them")(a.f)
    host.load("late")
    assert engine.enabled == frozenset()
    assert a.f is theirs
    assert a.g(1) == ("g", 1)


def test_pdl_is_not_on_after_the_feature_was_dropped(host, feature):
    host.write("late", MODULE + "    del g\n")
    engine = Engine([feature("pdl", host.patch("late:g", tag("x")))], host.name)
    engine.reconcile(["pdl"])
    assert contract.pdl() is True
    host.load("late")
    assert contract.pdl() is None


def test_a_failed_import_of_a_required_feature_is_remembered(host, feature):
    host.write("late", MODULE + "    del g\n")
    engine = Engine([feature("x", host.patch("late:g", tag("x")))], host.name)
    engine.reconcile(["x"], required=["x"])
    with pytest.raises(RefusedError):
        host.load("late")
    host.load("late")  # whoever swallowed the error gets stock, and the engine says so
    assert engine.enabled == frozenset()
    assert "it is now gone" in engine.dropped["x"]


def test_a_wrap_that_fails_at_a_later_import_is_a_reason(host, feature):
    host.write("late", MODULE)

    def boom(_):
        raise KeyError("boom")

    engine = Engine([feature("x", host.patch("late:f", boom))], host.name)
    engine.reconcile(["x"])
    assert host.load("late").f(1) == ("f", 1)
    assert "wrap failed: KeyError" in engine.dropped["x"]


def test_a_module_that_is_just_being_imported_is_refused(host, feature):
    host.write("half", "import sys\nsys.modules['reconcile_here'].go()\ndef f(x):\n    return x\n")
    engine = Engine([feature("x", host.patch("half:f", tag("x")))], host.name)
    sys.modules["reconcile_here"] = type(sys)("reconcile_here")
    errors = []

    def go():
        try:
            engine.reconcile(["x"])
        except RefusedError as e:
            errors.append(e.reason)

    sys.modules["reconcile_here"].go = go
    try:
        assert host.load("half").f(1) == 1
    finally:
        del sys.modules["reconcile_here"]
    assert errors == [f"{host.target('half:f')}: its module is just being imported"]
    assert engine.enabled == frozenset()


def test_late_surprise_of_a_required_feature_fails_the_import(host, feature):
    host.write("late", MODULE + "    del g\n")
    engine = Engine([feature("x", host.patch("late:g", tag("x")))], host.name)
    engine.reconcile(["x"], required=["x"])
    with pytest.raises(RefusedError, match=r"^x: "):
        host.load("late")


def test_unknown_and_duplicate_names(host, feature):
    with pytest.raises(ValueError, match=r"enabled: expected names among \['x'\], got \['y'\]"):
        Engine([feature("x")], host.name).reconcile(["y"])
    with pytest.raises(ValueError, match="expected distinct names"):
        Engine([feature("x"), feature("x")])


def test_only_patches_of_the_engines_host_apply(host, feature):
    host.write("a", MODULE)
    other = Patch("lldecode.no_such_module:f", tag("x"), "", "")
    engine = Engine([feature("x", host.patch("a:f", tag("x")), other)], host.name)
    engine.reconcile(["x"])
    assert host.load("a").f(1) == ("x", ("f", 1))


def test_pdl_follows_the_pdl_feature(host, feature):
    engine = Engine([feature("pdl"), feature("x")], host.name)
    engine.reconcile(["x"])
    assert contract.pdl() is None
    engine.reconcile(["pdl"])
    assert contract.pdl() is True
    contract.set_pdl(None)
    Engine([feature("x")], host.name).reconcile(["x"])
    assert contract.pdl() is None


def test_refusal_order_and_reasons(feature):
    x = feature("x", probe=lambda ctx: "no CUDA device" if not ctx.capabilities else None)
    assert refusal(x, Context(), "vllm") == "vllm is not installed"
    assert refusal(x, Context(versions={"vllm": "0.27.1"}), "vllm") == "vllm: expected >=0.26,<0.27, got 0.27.1"
    assert refusal(x, Context(versions={"vllm": "0.26.0"}), "vllm") == "no CUDA device"
    assert refusal(x, Context(((9, 0),), {"vllm": "0.26.0"}), "vllm") is None
    assert refusal(x, Context(((9, 0),)), "lldecode") is None
    broken = feature("broken", probe=lambda ctx: 1 / 0)
    assert refusal(broken, Context(((9, 0),), {"vllm": "0.26.0"}), "vllm") == "probe failed: ZeroDivisionError: division by zero"
    never = feature("never", probe=lambda ctx: "never")
    assert refusal(never, Context(((9, 0),)), "lldecode") == "never"
    assert refusal(never, Context(), "lldecode") is None


def test_contract_rejects_malformed_data(feature):
    with pytest.raises(ValueError, match="target: expected"):
        Patch("vllm.a", tag("x"), "", "", frozenset({ABSENT}))
    with pytest.raises(ValueError, match="expected at least one source hash"):
        Patch("vllm.a:f", tag("x"), "", "")
    with pytest.raises(ValueError, match="16 hex digits"):
        Patch("vllm.a:f", tag("x"), "", "", frozenset({"xyz"}))
    with pytest.raises(ValueError, match="kebab-case"):
        feature("Not_Kebab")
    twice = Patch("lldecode.layer:f", tag("x"), "", "")
    with pytest.raises(ValueError, match="one patch a target"):
        feature("x", twice, twice)


def test_missing_distributions():
    ctx = Context(versions={"torch": "2.11.0"})
    assert ctx.missing() is None and ctx.missing("torch") is None
    assert ctx.missing("triton", "torch", "numpy") == "numpy is not installed"


def test_unproven_capabilities():
    proven = ((9, 0), (10, 3))
    assert Context(((9, 0),)).unproven(proven) is None
    assert Context(((9, 0), (10, 3)), required=True).unproven(proven) is None
    new = "capability 10.3: compiled for it, but not run on it yet; only the flag's value on has it"
    assert Context(((9, 0), (10, 3))).unproven(proven) == new and Context(((10, 3),)).unproven(proven, run=proven) is None
    assert Context().unproven(proven) == "no CUDA device"
    assert Context(((12, 0), (9, 0))).unproven(proven) == "capability: expected one of 9.0, 10.3, got 12.0"


def test_decline_counts_and_logs_each_reason_once(caplog, monkeypatch):
    monkeypatch.setattr(contract, "_declined", type(contract._declined)())
    with caplog.at_level("INFO", "lldecode"):
        for _ in range(3):
            contract.decline("x", "bias")
        contract.decline("x", "dtype")
    assert contract.declined() == {"x": {"bias": 3, "dtype": 1}}
    assert caplog.text.count("stock path: bias") == 1
    for n in range(100):
        contract.decline("x", f"{n} tokens")
    assert len(contract.declined()["x"]) == contract.MAX_REASONS + 1
    assert sum(contract.declined()["x"].values()) == 104
