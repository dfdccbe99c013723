"""vLLM's engine on a GPU, with dummy weights: each set of features gives stock's tokens, and is what ran."""

import json
import re
import subprocess
import sys

import pytest

import slice_model

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.timeout(1800)]

KERNELS = {"ll-bf16-router": r"cutlass_kernel_(SplitK|Dotprod)k\d"}
"""What a feature's kernel is called in a profile: CuTe names it by the config's class and fields."""


def test_ablate_through_vllm(tmp_path):
    slice_model.write(tmp_path, layers=6)
    command = [sys.executable, "-c", "import sys; from lldecode.cli import main; sys.exit(main(sys.argv[1:]))", "ablate", "--json"]
    options = ["--engine", "vllm", "--model", str(tmp_path), "--load-format", "dummy", "--batch", "1,4", "--input-len", "512"]
    done = subprocess.run([*command, *options, "--output-len", "32", "--profile", "60"], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == 0, json.dumps(report["results"], indent=1)
    skipped = {f["name"] for f in report["features"] if f["state"] != "measured"}
    assert skipped <= {"sm100-routing"}, report["features"]  # which SM90 gets only on demand
    for combo, rows in report["kernels"].items():
        chosen = next(r["features"] for r in report["results"] if r["combo"] == combo).split(",")
        for feature, kernel in KERNELS.items():
            assert any(re.search(kernel, row["kernel"]) for row in rows) == (feature in chosen), (combo, feature)
