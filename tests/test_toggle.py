"""Any set of the installed features can be turned on and off in any order, in the embedded layer and in the real vLLM."""

import collections
import itertools
import json
import os

import pytest

from lldecode import ablate, layer, registry
from lldecode.engine import Engine
from lldecode.feature import Context, Feature
from lldecode.flags import env_name
from lldecode.testing_vllm import run_vllm, tiny_model

FEATURES = {name: registry.load(point) for name, point in registry.entry_points().items()}
SETS = list(ablate.combinations(sorted(FEATURES)).values())
TRANSITIONS = list(itertools.product(SETS, SETS))


def test_every_installed_feature_loads_and_is_in_the_catalog():
    assert all(isinstance(f, Feature) for f in FEATURES.values()), FEATURES
    assert set(FEATURES) <= set(registry.catalog())


@pytest.mark.parametrize(("start", "end"), TRANSITIONS, ids=lambda s: "+".join(sorted(s)) or "none")
def test_embedded_layer(start, end):
    patched = collections.defaultdict(set)
    for name, f in FEATURES.items():
        for p in f.patches:
            if p.host == "lldecode":
                patched[p.attr].add(name)
    originals = {attr: getattr(layer, attr) for attr in patched}
    engine = Engine(list(FEATURES.values()), "lldecode")
    try:
        for chosen in (start, end):
            engine.reconcile(chosen)
            for attr, names in patched.items():
                assert (getattr(layer, attr) is originals[attr]) == (not names & chosen), attr
    finally:
        engine.reconcile([])
    assert all(getattr(layer, attr) is f for attr, f in originals.items())


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_flag_matrix(name):
    """Each value from each source does to this feature what it says, and nothing to the others."""
    ctx = Context(((9, 0),), registry.versions())
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LLDECODE_")}

    def states(environ):
        return {s.name: s.state for s in registry.survey(ctx, clean | environ, host="lldecode")}

    default = states({})
    for environ in ({env_name(name): "off"}, {"LLDECODE_OFF": name}, {"LLDECODE_FEATURES": f"{name}=off"}, {env_name(name): "0%"}):
        assert states(environ) == default | {name: "off"}, environ
    for environ in ({env_name(name): "on"}, {"LLDECODE_FEATURES": name}, {env_name(name): "100%"}):
        assert states(environ) == default | {name: "on"}, environ
        assert states(environ | {"LLDECODE_OFF": name}) == default | {name: "off"}, environ


VLLM = """
import importlib, json, sys
from lldecode import registry
from lldecode.engine import Engine

sets = [frozenset(s) for s in json.loads(sys.argv[2])]
features = {name: registry.load(point) for name, point in registry.entry_points().items()}
sites, by_target = {}, {}
import os
os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=sys.argv[1], skip_tokenizer_init=True)  # whatever imports vLLM's own code, with the plugin standing back
for name, f in features.items():
    for p in f.patches:
        if p.host == "vllm":
            owner = importlib.import_module(p.module)
            *path, attr = p.attr.split(".")
            for part in path:
                owner = getattr(owner, part)
            sites[p.target] = (owner, attr)
            by_target.setdefault(p.target, set()).add(name)
missing = object()
before = {t: vars(o).get(a, missing) for t, (o, a) in sites.items()}
engine = Engine(list(features.values()))
wrong, steps = [], 0
for start in sets:
    for end in sets:
        for chosen in (start, end):
            engine.reconcile(chosen)
            steps += 1
            for t, (o, a) in sites.items():
                if (vars(o).get(a, missing) is before[t]) != (not by_target[t] & chosen):
                    wrong.append([sorted(start), sorted(end), t])
engine.reconcile([])
wrong += [["end", t] for t, (o, a) in sites.items() if vars(o).get(a, missing) is not before[t]]
print("RESULT" + json.dumps({"wrong": wrong, "steps": steps, "targets": len(sites)}))
"""


@pytest.mark.vllm
def test_real_vllm(tmp_path):
    model = str(tiny_model(tmp_path))
    done = run_vllm(VLLM, model, json.dumps([sorted(s) for s in SETS]), cc="9.0", env={"LLDECODE_OFF": "all"})
    got = json.loads(done.stdout.split("RESULT")[1])
    assert got["wrong"] == []
    assert got["steps"] == 2 * len(TRANSITIONS)
    assert got["targets"] == len({p.target for f in FEATURES.values() for p in f.patches if p.host == "vllm"}) > 0
