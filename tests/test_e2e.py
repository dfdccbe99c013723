"""vLLM's engine on a GPU, with dummy weights: each set of features gives stock's tokens, and is what ran."""

import json
import re
import subprocess
import sys

import pytest
import torch

import slice_model

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.timeout(1800)]

KERNELS = {
    "ll-bf16-router": r"cutlass_kernel_(SplitK|Dotprod)k\d",
    "skinny-gemm": r"cutlass_kernel_Configk\d",
    "fused-query": r"cutlass_kernel.*_FusedQuery",
    "pdl": r"^(fused_norm_rope|convert_req_index)_kernel$",
}
"""What a feature's kernel is called in a profile: CuTe names it by the config's class and fields."""

OPTIMIZED = {
    "kv_cache_dtype": "fp8",
    "model_class_overrides": {"GlmMoeDsaForCausalLM": "vllm.models.deepseek_v32:DeepseekV32ForCausalLM"},
}
CLASSES = {
    "generic": ({"ll-bf16-router", "skinny-gemm", "pdl"}, {}, {}),
    "deepseek_v32": (set(KERNELS), OPTIMIZED, {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}),
}
"""The features whose kernels a model class runs, what chooses it, and its environment."""
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=TWO_GPUS)])
@pytest.mark.parametrize("model_class", CLASSES)
def test_ablate_through_vllm(tmp_path, monkeypatch, model_class, ranks):
    runs, llm, environ = CLASSES[model_class]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    slice_model.write(tmp_path, layers=6, tp=8 // ranks)
    command = [sys.executable, "-c", "import sys; from lldecode.cli import main; sys.exit(main(sys.argv[1:]))", "ablate", "--json"]
    options = ["--engine", "vllm", "--model", str(tmp_path), "--load-format", "dummy", "--batch", "1,4", "--input-len", "512"]
    options += ["--features", ",".join(sorted(runs)), "--at-once", "4", "--output-len", "32", "--profile", "60"]
    options += ["--tensor-parallel-size", str(ranks), *(["--only", "all"] if ranks > 1 else [])]
    options += ["--engine-args", json.dumps(llm | {"kv_cache_memory_bytes": 1 << 30})]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == 0, json.dumps(report["results"], indent=1)
    assert {f["name"] for f in report["features"] if f["state"] == "measured"} == runs, report["features"]
    for combo, rows in report["kernels"].items():
        chosen = next(r["features"] for r in report["results"] if r["combo"] == combo).split(",")
        for feature in runs:
            kernel = KERNELS[feature]
            assert any(re.search(kernel, row["kernel"]) for row in rows) == (feature in chosen), (combo, feature)
