"""The plugin inside the real vLLM 0.26.0, on a machine without a GPU."""

import json
import subprocess

import pytest

from lldecode.testing_vllm import run_vllm, tiny_model

pytestmark = pytest.mark.vllm

START = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, load_format="dummy", max_model_len=512).create_engine_config()
import torch
from lldecode import plugin
assert not torch.cuda.is_initialized()
active = plugin.active()
names = {s.name: [s.state, s.reason] for s in active.statuses}
print("RESULT" + json.dumps({"statuses": names, "hash": config.compute_hash(), "fingerprint": active.fingerprint}))
"""


AUTO = {"LLDECODE_LL_BF16_ROUTER": "auto"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model")))


def start(model, **kw):
    return run_vllm(START, model, check=False, **kw)


def result(done: subprocess.CompletedProcess[str]):
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.split("RESULT")[1])


def test_applies_on_a_proven_gpu_and_says_so(model):
    done = start(model, cc="9.0", env=AUTO)
    got = result(done)
    assert got["statuses"]["ll-bf16-router"] == ["on", ""]
    assert got["hash"].endswith(f"-{got['fingerprint']}")
    assert "ll-bf16-router 0.1.0: on (auto, LLDECODE_LL_BF16_ROUTER)" in done.stdout + done.stderr
    off = result(start(model, cc="9.0", env={"LLDECODE_OFF": "all"}))
    assert off["fingerprint"] == "none"
    assert got["hash"] == f"{off['hash']}-{got['fingerprint']}"


def test_auto_on_an_unproven_gpu_is_stock_with_one_line(model):
    done = start(model, cc="12.0", env=AUTO)
    reason = "capability: expected one of 9.0, 10.0, 10.3, got 12.0"
    assert result(done)["statuses"]["ll-bf16-router"] == ["refused", reason]
    assert result(done)["fingerprint"] == "none"
    assert (done.stdout + done.stderr).count(f"ll-bf16-router 0.1.0: refused (auto, LLDECODE_LL_BF16_ROUTER): {reason}") == 1


def test_on_for_an_unproven_gpu_stops_the_start(model):
    done = start(model, cc="12.0", env={"LLDECODE_LL_BF16_ROUTER": "on"})
    assert done.returncode != 0
    assert "StartError: ll-bf16-router is on (LLDECODE_LL_BF16_ROUTER) but: capability: expected one of 9.0" in done.stderr


def test_a_typo_stops_the_start_and_lists_the_known(model):
    done = start(model, env={"LLDECODE_LL_BF16_RUOTER": "on"})
    assert done.returncode != 0
    assert "FlagError: LLDECODE_LL_BF16_RUOTER: unknown variable; known: " in done.stderr
    assert "LLDECODE_LL_BF16_ROUTER" in done.stderr.split("known: ")[-1]
