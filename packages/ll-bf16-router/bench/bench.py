"""Time the router GEMM against cuBLAS and vLLM 0.33.0's own kernel, with weights that are not in the L2.

    python bench.py [--peers DIR] [--rounds 30] [--out results]

DIR/vllm033 holds, unpacked from their wheels, vLLM 0.33.0's ``model_executor/kernels/linear/cute_dsl`` and quack-kernels'
``compile_utils.py``; without it that provider is left out. Every provider of a cell is checked before anything is timed.
"""

import argparse
import functools
import importlib
import importlib.util
import math
import pathlib
import sys
import types
from collections.abc import Callable

import torch

import lldecode_ll_bf16_router as router
from lldecode import bench
from lldecode.testing import assert_close_to_oracle
from lldecode_ll_bf16_router import reference

SHAPES = ((6144, 256), (7168, 256), (7168, 384), (4096, 256), (2880, 128))
MS = (1, 2, 4, 5, 8, 16, 32)
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def vllm_033(peers: pathlib.Path) -> Call:
    """Its kernel imports the platform from vLLM, and from quack one file that quack's own ``__init__`` does not need."""

    class Platform:
        def is_device_capability_family(self, capability: int) -> bool:
            return torch.cuda.get_device_capability()[0] * 10 == capability

        def is_device_capability(self, capability: int) -> bool:
            major, minor = torch.cuda.get_device_capability()
            return major * 10 + minor == capability

        def is_cuda(self) -> bool:
            return True

        def is_arch_support_pdl(self) -> bool:
            return True

    def package(name: str, path: list[str], **attributes: object) -> None:
        module = types.ModuleType(name)
        module.__path__ = path
        vars(module).update(attributes)
        sys.modules[name] = module

    root = peers / "vllm033"
    package("vllm", [])
    package("vllm.platforms", [], current_platform=Platform())
    package("vllm.utils", [])
    package("vllm.utils.torch_utils", [], current_stream=torch.cuda.current_stream)
    package("quack", [str(root)])
    package("peer", [str(root / "cute_dsl")])
    call: Call = importlib.import_module("peer.ll_bf16").ll_bf16_gemm
    return call


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    args = parser.parse_args()

    calls: dict[str, Call] = {
        "lldecode": lambda x, w: router.ll_bf16_router(x, w, pdl=True),
        "lldecode pdl=0": router.ll_bf16_router,
        "cublas": lambda x, w: torch.mm(x, w.T, out_dtype=torch.float32),
    }
    if args.peers:
        calls["vllm-0.33.0"] = vllm_033(args.peers)

    torch.manual_seed(0)
    rows: list[bench.Row] = []
    speedup: dict[str, dict[str, float]] = {name: {} for name in calls if not name.startswith("lldecode")}
    for k, n in SHAPES:
        weights = [torch.randn(n, k, device="cuda").mul_(k**-0.5).bfloat16() for _ in range(bench.cold_copies(2 * n * k))]
        for m in MS:
            x = torch.randn(m, k, device="cuda").bfloat16()
            oracle = reference.ll_bf16_router(x, weights[0], torch.float64, torch.float64)
            baseline = calls["cublas"](x, weights[0])
            errors = {}
            for name, call in calls.items():
                got = call(x, weights[0])
                assert_close_to_oracle(got, oracle, baseline)
                errors[name] = (got.double() - oracle).abs().max().item()
            thunks = {name: [functools.partial(call, x, w) for w in weights] for name, call in calls.items()}
            samples = bench.interleaved(thunks, rounds=args.rounds)
            cell = f"M={m} N={n} K={k} out=fp32"
            for name in calls:
                provider, _, launch = name.partition(" ")
                nbytes = 2 * n * k + 2 * m * k + 4 * m * n
                rows.append(bench.row("ll-bf16-router", provider, f"{cell} {launch or 'pdl=1'}", samples[name], nbytes, errors[name]))
            p50 = {name: bench.percentiles(samples[name])[1] for name in calls}
            for name in speedup:
                speedup[name][cell] = p50[name] / p50["lldecode"]
            print(cell, *(f"{name} {us:.2f}" for name, us in p50.items()), flush=True)

    gpu = bench.gpu_name().removeprefix("NVIDIA ").split()[0].lower()
    bench.write_csv(args.out / f"{gpu}.csv", rows)
    bench.plot([r for r in rows if r.case.endswith("pdl=1")], args.out / f"{gpu}.png", title=f"router GEMM, cold L2, {bench.gpu_name()}")
    for name, cells in speedup.items():
        worst = min(cells, key=lambda c: cells[c])
        print(f"speed-up over {name}: geometric mean {geomean(list(cells.values())):.2f}, worst {cells[worst]:.2f} at {worst}")


if __name__ == "__main__":
    main()
