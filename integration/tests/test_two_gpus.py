"""Two processes, one a GPU, that start together on one compile cache: each CuTe DSL kernel is compiled once, then never again."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lldecode import jit, registry, workers

FEATURE = "ll-bf16-router"
"""An installed feature with an operator of CuTe DSL kernels, found through its entry point."""
LIMIT_S = 120.0

RANK = """
import hashlib
import json
import sys

import torch

from lldecode import jit, registry, testing

rank, feature = int(sys.argv[1]), sys.argv[2]
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
loaded = registry.load(registry.entry_points()[feature])
assert not isinstance(loaded, str), loaded
assert jit.unavailable() is None, jit.unavailable()
generator = torch.Generator().manual_seed(0)
x, weight = (torch.randn(n, 6144, generator=generator).bfloat16().to(device) for n in (32, 256))
print("ready", flush=True)
sys.stdin.readline()

digest = hashlib.sha256()
for m in (1, 8, 16, 32):
    y = torch.ops.lldecode.ll_bf16_router(x[:m], weight, torch.float32)
    oracle = x[:m].double() @ weight.double().T
    testing.assert_close_to_oracle(y, oracle, torch.mm(x[:m], weight.T, out_dtype=torch.float32))
    digest.update(y.cpu().numpy().tobytes())
print(json.dumps({"stats": jit.stats(), "result": digest.hexdigest()}))
"""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, got {torch.cuda.device_count()}"),
    pytest.mark.skipif(FEATURE not in registry.entry_points(), reason=f"{FEATURE} is not installed"),
    pytest.mark.timeout(2 * LIMIT_S + 60),
]


def start(cache: Path, logs: Path, script: str = RANK) -> list[dict[str, Any]]:
    """What each process reports; both compile from the moment that both are ready. Both are killed when the time is over."""
    logs.mkdir()
    environ = os.environ | {"LLDECODE_CACHE_DIR": str(cache)}
    end = time.monotonic() + LIMIT_S
    with workers.killed_at_end() as ranks:
        for i in range(2):
            with (logs / f"err{i}").open("w") as err, (logs / f"out{i}").open("w") as out:
                command = [sys.executable, "-c", script, str(i), FEATURE]
                ranks.append(
                    subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True, start_new_session=True)
                )
        while not all("ready" in (logs / f"out{i}").read_text() for i in range(2)):
            assert not any(r.poll() for r in ranks) and time.monotonic() < end, report(ranks, logs)
            time.sleep(0.01)
        for r in ranks:
            assert r.stdin
            with contextlib.suppress(BrokenPipeError):
                r.stdin.write("\n")
                r.stdin.close()
        assert workers.wait(ranks, end - time.monotonic()) == [0, 0], report(ranks, logs)
    return [json.loads((logs / f"out{i}").read_text().splitlines()[-1]) for i in range(2)]


def report(ranks: list[subprocess.Popen[str]], logs: Path) -> str:
    tails = "\n".join((logs / f"err{i}").read_text()[-3000:] for i in range(2))
    return f"exit status (None: not ended after {LIMIT_S:.0f} s): {[r.poll() for r in ranks]}\n{tails}"


def files(cache: Path) -> dict[str, bytes]:
    """The object files in the cache; nothing but they and their locks is there, and each is whole."""
    found = {}
    for path in cache.iterdir():
        assert path.suffix in (".o", ".lock"), path.name
        if path.suffix == ".o":
            jit._read(path, path.stem.rpartition("-")[2])  # refuses one whose digest is another
            found[path.name] = path.read_bytes()
    return found


def test_each_kernel_is_compiled_once_by_either_process(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cold = start(cache, tmp_path / "cold")
    kernels = files(cache)
    assert len(kernels) > 1
    assert all(r["stats"]["memory"] == r["stats"]["compiled"] + r["stats"]["loaded"] == len(kernels) for r in cold), cold
    assert sum(r["stats"]["compiled"] for r in cold) == len(kernels), cold

    warm = start(cache, tmp_path / "warm")
    assert [r["stats"] for r in warm] == [{"compiled": 0, "loaded": len(kernels), "memory": len(kernels)}] * 2
    assert files(cache) == kernels
    assert len({r["result"] for r in (*cold, *warm)}) == 1
