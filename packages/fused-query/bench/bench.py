"""Measure the fused query kernel against vLLM's on the GPU at hand; about a minute on an H200.

    python bench/bench.py [--peers DIR] [--out CSV]

Providers: ``lldecode``; ``vllm-0.26.0``, its Triton kernel, with ``out=packed`` followed by its concat kernel where the wheel's
extension loads; ``vllm-0.33.0``, its CuTe DSL kernel. Both come from ``--peers``: ``DIR/vllm033`` holds ``cute_utils/`` and
``fused_q_cutedsl.py`` of 0.33.0's wheel and 0.26.0's ``kernels026.py``, ``DIR/C.so`` 0.26.0's ``_C_stable_libtorch.abi3.so``.
``lldecode`` and ``vllm-0.33.0`` are launched with programmatic dependent launch, which 0.26.0's kernels do not know.
Outputs are checked against the reference before anything is timed.
"""

import argparse
import functools
import importlib.util
import math
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from lldecode import bench
from lldecode_fused_query import reference

HEADS = ((64, 32), (16, 32), (8, 32), (128, 64), (16, 64))
TOKENS = (1, 2, 4, 8, 16, 32, 64)
CALLS = 20  # in one graph
SCALES = (128**-0.5, 0.2)


def load(name: str, path: pathlib.Path, package: str | None = None) -> Any:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[package] if package else None)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peers(root: pathlib.Path) -> tuple[Callable[..., Any], Callable[..., Any], bool]:
    """vLLM 0.26.0's Triton host function, 0.33.0's CuTe DSL one, and whether 0.26.0's concat op is there."""
    import triton

    major, minor = torch.cuda.get_device_capability()
    platform = types.SimpleNamespace(
        is_arch_support_pdl=lambda: True,
        is_cuda=lambda: True,
        is_rocm=lambda: False,
        fp8_dtype=lambda: reference.FP8,
        has_device_capability=lambda _: True,
        is_device_capability=lambda c: c in ((major, minor), 10 * major + minor),
        is_device_capability_family=lambda c: c == 10 * major,
    )
    stubs = {
        "vllm": {"__path__": [str(root / "vllm033")]},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": triton.language, "triton": triton},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"current_stream": torch.cuda.current_stream},
    }
    for name, names in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names)
    old = load("vllm_026_kernels", root / "vllm033/kernels026.py")
    load("vllm.cute_utils", root / "vllm033/cute_utils/__init__.py", str(root / "vllm033/cute_utils"))
    new = load("vllm_033_fused_q", root / "vllm033/fused_q_cutedsl.py")
    try:
        torch.ops.load_library(str(root / "C.so"))
        concat = hasattr(torch.ops._C_cache_ops, "concat_mla_q")
    except (OSError, RuntimeError):
        concat = False
    return old.fused_q, new.fused_q_cutedsl, concat


def inputs(tokens: int, heads: int, index_heads: int, output: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Strided as vLLM hands them over."""
    dev = torch.device("cuda")
    table = torch.randn(8192, 64, device=dev)
    mqa = (
        torch.randint(0, 4096, (tokens,), device=dev),
        torch.randn(tokens, heads, 192, device=dev).bfloat16()[..., 128:],
        table,
        torch.randn(heads, tokens, 512, device=dev).bfloat16().transpose(0, 1),
        torch.ones((), device=dev),
        torch.empty(tokens, heads, 64 if output == "rope" else 576, dtype=reference.FP8 if output == "fp8" else torch.bfloat16, device=dev),
    )
    index = (
        torch.randn(tokens, index_heads, 128, device=dev).bfloat16(),
        table,
        torch.randn(tokens, 128 + index_heads, device=dev).bfloat16()[:, 128:],
        torch.empty(tokens, index_heads, 128, dtype=reference.FP8, device=dev),
        torch.empty(tokens, index_heads, device=dev),
    )
    return mqa, index


def nbytes(tokens: int, heads: int, index_heads: int, output: str) -> int:
    """Bytes that must be read and written."""
    per_head = {"fp8": 576 * 3, "packed": 576 * 4, "rope": 64 * 4}[output]
    return tokens * (8 + 256 + heads * per_head + index_heads * (128 * 3 + 2 + 4))


def error(mqa: tuple[Any, ...], index: tuple[Any, ...], output: str) -> float:
    """Largest difference from the reference, relative to the largest value of its tensor."""
    positions, q_pe, table, nope, scale, out = mqa
    wanted = [reference.mqa_query(q_pe, table[positions], None if output == "rope" else nope, scale if output == "fp8" else None)]
    wanted += reference.index_query(index[0], table[positions], index[2], *SCALES, True)
    pairs = zip((out, *index[3:]), wanted, strict=True)
    return max(((got.double() - want.double()).abs().max() / want.double().abs().max()).item() for got, want in pairs)


def providers(root: pathlib.Path | None, mqa: tuple[Any, ...], index: tuple[Any, ...], output: str) -> dict[str, Callable[[], object]]:
    positions, q_pe, table, nope, scale, out = mqa
    own = (*mqa[:3], None if output == "rope" else nope, *mqa[4:], *index)
    calls: dict[str, Callable[[], object]] = {"lldecode": functools.partial(torch.ops.lldecode.fused_query, *own, *SCALES, True, True)}
    if root is None:
        return calls
    triton_q, cute_q, concat = _peers(root)
    fp8 = output == "fp8"

    def old() -> object:
        result = triton_q(positions, q_pe, table, index[0], table, nope, scale, index[2], *SCALES, True, True, fp8)
        if output == "packed":
            torch.ops._C_cache_ops.concat_mla_q(nope, result[2], out)
        return result

    if output != "packed" or concat:
        calls["vllm-0.26.0"] = old
    if output != "packed":
        new = (positions, q_pe, table, nope, scale, out, index[0], table, index[2], *SCALES, *index[3:], True, True, fp8)
        calls["vllm-0.33.0"] = functools.partial(cute_q, *new)
    return calls


_peers = functools.cache(peers)


def time_graph(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    return bench.interleaved({name: [call] * CALLS for name, call in calls.items()}, rounds=15)


def measure(root: pathlib.Path | None) -> list[bench.Row]:
    rows = []
    for heads, index_heads in HEADS:
        for output in ("fp8", "rope", "packed"):
            for tokens in TOKENS:
                mqa, index = inputs(tokens, heads, index_heads, output)
                calls, errors = providers(root, mqa, index, output), {}
                for name, call in calls.items():
                    for x in (mqa[-1], *index[3:]):
                        x.zero_()
                    result = call()
                    if name == "vllm-0.26.0":  # it allocates what it returns
                        mqa[-1].copy_(mqa[-1] if output == "packed" else result[2])  # type: ignore[index]
                        index[3].copy_(result[0])  # type: ignore[index]
                        index[4].copy_(result[1])  # type: ignore[index]
                    errors[name] = error(mqa, index, output)
                if errors["lldecode"]:
                    raise SystemExit(
                        f"T={tokens} H={heads} I={index_heads} out={output}: expected the reference, got error {errors['lldecode']}"
                    )
                case = f"T={tokens} H={heads} I={index_heads} out={output}"
                moved = nbytes(tokens, heads, index_heads, output)
                samples = time_graph(calls)
                rows += [bench.row("fused-query", name, case, samples[name], moved, errors[name]) for name in calls]
                print(case, " ".join(f"{name}={bench.percentiles(s)[1]:.2f}" for name, s in samples.items()), flush=True)
    return rows


def summarize(rows: list[bench.Row]) -> None:
    """The geometric means and the worst ratios that the acceptance is about."""
    us = {(r.case, r.provider): r.us_p50 for r in rows}
    for peer in ("vllm-0.26.0", "vllm-0.33.0"):
        ratios = {case: us[case, peer] / us[case, "lldecode"] for case, provider in us if provider == peer}
        for what, chosen in (("all", ratios), ("T >= 32", {c: r for c, r in ratios.items() if c.startswith(("T=32 ", "T=64 "))})):
            if chosen:
                worst = min(chosen, key=chosen.__getitem__)
                mean = math.exp(sum(map(math.log, chosen.values())) / len(chosen))
                print(f"over {peer}, {what}: geometric mean {mean:.2f}x, worst {chosen[worst]:.2f}x ({worst})")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=pathlib.Path)
    gpu = bench.gpu_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / f"results/{gpu}.csv")
    args = parser.parse_args()
    rows = measure(args.peers)
    bench.write_csv(args.out, rows)
    summarize(rows)


if __name__ == "__main__":
    main()
