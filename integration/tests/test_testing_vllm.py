import ctypes
import json

import pytest

from lldecode import testing_vllm
from lldecode.testing_vllm import run_vllm, tiny_model

CONSTRUCT = """
    import json, sys
    import torch
    from lldecode.testing_vllm import world

    with world(sys.argv[1], kv_cache_dtype="fp8") as config:
        from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
        from vllm.models.deepseek_v32 import DeepseekV32ForCausalLM
        from vllm.platforms import current_platform
        from vllm.triton_utils import HAS_TRITON

        gate = GateLinear(6144, 256, out_dtype=torch.float32, prefix="gate")
        with torch.device("meta"):
            model = DeepseekV32ForCausalLM(vllm_config=config, prefix="")
        print(json.dumps({
            "capability": current_platform.get_device_capability().as_version_str(),
            "architecture": config.model_config.architecture,
            "backend": model.model.layers[0].self_attn.attn_backend.get_name(),
            "layers": len(model.model.layers),
            "ll_bf16": gate.allow_ll_bf16_gemm,
            "triton": HAS_TRITON,
        }))
"""


@pytest.mark.vllm
@pytest.mark.parametrize(("cc", "model", "backend"), [("9.0", "glm52", "FLASHMLA_SPARSE"), ("10.0", "dsv32", "FLASHINFER_MLA_SPARSE")])
def test_vllm_configures_and_constructs_for_the_claimed_gpu(tmp_path, cc, model, backend):
    found = json.loads(run_vllm(CONSTRUCT, str(tiny_model(tmp_path, model)), cc=cc, env={"LLDECODE_OFF": "all"}).stdout.splitlines()[-1])
    architecture = {"glm52": "GlmMoeDsaForCausalLM", "dsv32": "DeepseekV32ForCausalLM"}[model]
    assert found == {
        "capability": cc,
        "architecture": architecture,
        "backend": backend,
        "layers": 4,
        "ll_bf16": True,
        "triton": True,
    }


SHOW = "import os, sys; print(sys.argv[1:], [os.environ.get(k) for k in ('LLDECODE_OFF', 'VLLM_PLUGINS', 'LLDECODE_FEATURES')])"


@pytest.mark.vllm
def test_the_callers_flags_are_not_passed_on_and_env_is(monkeypatch):
    monkeypatch.setenv("LLDECODE_OFF", "all")
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    assert run_vllm(SHOW, "a", env={"LLDECODE_FEATURES": "x=on"}).stdout == "['a'] [None, None, 'x=on']\n"


@pytest.mark.vllm
def test_a_failing_script_raises_with_its_output():
    with pytest.raises(AssertionError, match=r"(?s)exit status 1.*no such thing"):
        run_vllm("raise SystemExit('no such thing')")
    assert run_vllm("raise SystemExit(3)", check=False).returncode == 3


def test_an_unknown_gpu_or_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cc: expected one of 8\.0, .*, got '9\.1'"):
        run_vllm("", cc="9.1")
    with pytest.raises(ValueError, match="model: expected one of glm52, dsv32, got 'v4'"):
        tiny_model(tmp_path, "v4")


def test_overrides_replace_keys_of_the_config(tmp_path):
    config = json.loads((tiny_model(tmp_path / "new", num_hidden_layers=7) / "config.json").read_text())
    assert config["num_hidden_layers"] == 7 and config["model_type"] == "glm_moe_dsa"


def test_a_real_driver_is_not_shadowed(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    assert testing_vllm._driver.__wrapped__() is None


def test_the_stub_driver_answers_no_device(monkeypatch, tmp_path):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(testing_vllm, "_support", lambda: tmp_path)
    with monkeypatch.context() as m:
        m.setattr(ctypes, "CDLL", absent)
        built = testing_vllm._driver.__wrapped__()
    assert ctypes.CDLL(str(built / "libcuda.so.1")).cuInit(0) == 100


def test_no_compiler_is_said(monkeypatch, tmp_path):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(testing_vllm, "_support", lambda: tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", absent)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="C compiler"):
        testing_vllm._driver.__wrapped__()
