"""The provider of compile units, with a stand-in for vLLM's warm-up; each feature's tests run it on the real one."""

import gc
import sys
import types

import pytest

from lldecode.warmup import WarmUp


class Layer:
    def __init__(self, size, on=True):
        self.size, self.on = size, on


@pytest.fixture
def registered(monkeypatch):
    providers = []
    vllm = types.ModuleType("vllm.model_executor.warmup.cutedsl_warmup")
    vllm.register_cutedsl_warmup_provider = providers.append
    vllm.CuTeDSLCompileUnit = lambda name, key, compile: types.SimpleNamespace(name=name, key=key, compile=compile)
    parts = vllm.__name__.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    monkeypatch.setitem(sys.modules, vllm.__name__, vllm)
    return providers


def test_each_kind_of_living_layer_is_compiled_once(registered, monkeypatch):
    compiled = []
    warm_up = WarmUp("some-feature", lambda layer: {("gemm", layer.size): lambda: compiled.append(layer.size)} if layer.on else {})
    monkeypatch.setattr(Layer, "__init__", warm_up.init(Layer.__init__))
    layers = [Layer(1), Layer(2), Layer(2), Layer(3, on=False), Layer(4)]
    assert set(registered) == {warm_up} and layers[3].size == 3
    layers.pop()
    gc.collect()
    units = warm_up.get_cutedsl_warmup_compile_units()
    assert sorted((u.name, u.key) for u in units) == [("some-feature", ("some-feature", "gemm", n)) for n in (1, 2)]
    for unit in units:
        unit.compile()
    assert sorted(compiled) == [1, 2]
