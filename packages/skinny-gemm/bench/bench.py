"""Measure skinny-gemm against cuBLAS, vLLM 0.26.0's fused_a and, from its wheel, vLLM 0.33.0's skinny GEMM.

    python bench/bench.py [--sweep] [--peers DIR] [--out DIR] [--shapes 2624x6144 ...] [--dry-run]

Without --sweep: times the plan's choices and writes the results CSV. With --sweep: first checks every candidate against
fp64, times them all and rewrites the shipped plan of this GPU, which takes minutes, most of them compiling on all cores.
Every case is timed in the three situations of `lldecode.plan.SITUATIONS`, in two of which (the case ends in `behind` or `alone`)
another kernel runs between the calls, whose time is subtracted.
--peers DIR: DIR/vllm033 holds vLLM 0.33.0's `cute_dsl/` folder and quack's `compile_utils.py`, DIR/C.so (optional) is vLLM
0.26.0's `_C_stable_libtorch.abi3.so`. --dry-run: what would be compiled and measured, for an H200.
"""

import argparse
import importlib.util
import logging
import os
import sys
import time
import types
from pathlib import Path

import torch

from lldecode import bench, tune
from lldecode.plan import SIZES, Gemm, situation
from lldecode_skinny_gemm import op
from lldecode_skinny_gemm.plan import PLANS
from lldecode_skinny_gemm.tune import TUNER, configs

FEATURE = "skinny-gemm"
HERE = Path(__file__).resolve().parent
GEMM = [
    *((2624, 6144), (2048, 2048), (4096, 2048), (16384, 2048), (6144, 2048), (6144, 12288), (2112, 7168), (3072, 1536), (7168, 14336)),
    *((160, 6144), (512, 6144), (6144, 256)),
]
OTHER = [
    *(
        Gemm(512, 192, 8, True),
        Gemm(256, 512, 8),
        Gemm(512, 128, 16, True),
        Gemm(128, 512, 16),
    ),  # absorbed, GLM-5.2 and DeepSeek-V3.2 at TP8
    *(Gemm(19360, 6144), Gemm(3072, 6144), Gemm(6144, 1536), Gemm(7168, 2048), Gemm(8192, 1536), Gemm(512, 7168), Gemm(7168, 256)),
]
SHAPES = [*(Gemm(n, k) for n, k in GEMM), *OTHER]


def case(s: Gemm, m: int) -> str:
    return f"{'T' if s.batch > 1 else 'M'}={m} {s}"


def load_peers(root: Path):
    """vLLM 0.33.0's skinny GEMM ``f(x, weight)``, and None or the error; registers vLLM 0.26.0's operators where C.so is."""
    cap = torch.cuda.get_device_capability()

    class Platform:
        def is_device_capability_family(self, c):
            return cap[0] * 10 == c

        def is_device_capability(self, c):
            return cap[0] * 10 + cap[1] == (c if isinstance(c, int) else c[0] * 10 + c[1])

        def has_device_capability(self, c):
            return True

        def is_arch_support_pdl(self):
            return cap[0] >= 9

        def is_cuda(self):
            return True

        def is_rocm(self):
            return False

    def stub(name, **names):
        module = types.ModuleType(name)
        module.__dict__.update(names)
        module.__path__ = names.get("__path__", [])
        sys.modules[name] = module

    def load(name, path):
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    import triton
    import triton.language as tl

    if (root / "C.so").exists():
        torch.ops.load_library(str(root / "C.so"))
    if not (root / "vllm033").exists():
        return None
    stub("vllm", __path__=[str(root / "vllm033")])
    stub("vllm.platforms", current_platform=Platform())
    stub("vllm.triton_utils", tl=tl, triton=triton)
    stub("vllm.utils")
    stub("vllm.utils.torch_utils", current_stream=torch.cuda.current_stream)
    stub("quack")
    load("quack.compile_utils", root / "vllm033/compile_utils.py")
    stub("peer_cute", __path__=[str(root / "vllm033/cute_dsl")])
    load("peer_cute.ll_bf16", root / "vllm033/cute_dsl/ll_bf16.py")
    return load("peer_cute.skinny_gemm", root / "vllm033/cute_dsl/skinny_gemm.py").shape_dynamic_skinny_gemm


def compare(shape: Gemm, sizes, skinny_033, rounds: int):
    """Rows of one shape: every provider that takes it, interleaved, in each situation, with the error of each against fp64."""
    device = torch.device("cuda", torch.cuda.current_device())
    nbytes = shape.batch * shape.n * shape.k * 2
    x32, weights = tune.operands(shape, bench.cold_copies(nbytes))
    exact = x32.double() @ weights[0].double().mT
    rows = []
    for m in sizes:
        x = x32[:, :m]
        if shape.batch > 1:
            calls = {"lldecode": lambda w, x=x: op.skinny_bmm(x, w.mT), "torch": lambda w, x=x: torch.bmm(x, w.mT)}
        else:
            x = x[0]
            calls = {"lldecode": lambda w, x=x: op.skinny_gemm(x, w[0])[None], "cublas": lambda w, x=x: torch.mm(x, w[0].T)[None]}
            if skinny_033 is not None and m <= 16:
                calls["vllm-0.33.0"] = lambda w, x=x: skinny_033(x, w[0])[None]
            if op.fused_a(shape, m):

                def fused_a(w, x=x):
                    out = torch.empty(len(x), shape.n, dtype=x.dtype, device=device)
                    op.run_fused_a(x[None], w, out[None])
                    return out[None]

                calls["fused_a"] = fused_a
        errors = {}
        for name, call in list(calls.items()):
            try:
                errors[name] = float((call(weights[0]) - exact[:, :m]).norm() / exact[:, :m].norm())
            except Exception as e:  # a peer that refuses a shape
                print(f"{case(shape, m)}: {name}: {type(e).__name__}: {str(e)[:100]}", file=sys.stderr)
                del calls[name]
        assert errors["lldecode"] < 2 * max(errors.get("cublas", 0), errors.get("torch", 0)) + 1e-6, (shape, m, errors)
        thunks = {n: [lambda w=w, c=c: c(w) for w in weights] for n, c in calls.items()}
        moved = nbytes + shape.batch * m * (shape.k + shape.n) * 2
        took = op.choose(device.index, *Gemm.of(weights[0]), m, torch.bfloat16, False, True)[0]
        for around, samples in tune.time_calls(thunks, x32[:, :m], rounds).items():
            name = case(shape, m) + ("" if around == "chain" else f" {around}")
            rows += [bench.row(FEATURE, n, name, samples[n], moved, errors[n]) for n in calls]
            ours = bench.percentiles(samples["lldecode"])[1]
            others = {n: bench.percentiles(s)[1] for n, s in samples.items() if n != "lldecode"}
            print(
                f"{name:38} {ours:7.2f} us {moved / ours / 1e6:5.2f} TB/s {took:8}",
                *(f"{n} {v:.2f} ({v / ours:.2f}x)" for n, v in others.items()),
                flush=True,
            )
    return rows


def drawn(rows):
    """What the figure shows."""
    return [r for r in rows if r.case.startswith("M=8 ") and situation(r.case) == "chain"]


def dry_run(shapes) -> None:
    wanted = {cfg: None for s in shapes for m in SIZES for cfg in configs(132, s, m).values()}
    tiles = sum(len(configs(132, s, m)) for s in shapes for m in SIZES)
    print(f"{len(shapes)} shapes, {len(wanted)} kernels to compile, {tiles} to time over {len(SIZES)} M")
    for s in shapes:
        for m in (8, 16, 32):
            print(f"{s} M={m}:", *(f"{','.join(map(str, t))} ({cfg.smem >> 10} KiB)" for t, cfg in configs(132, s, m).items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--out", type=Path, help="folder for the plan and the CSV instead of the package's own")
    parser.add_argument("--shapes", nargs="*", help="NxK, of the plain products; the package's plan and CSV need all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    shapes = [s for s in SHAPES if not args.shapes or (s.batch == 1 and f"{s.n}x{s.k}" in args.shapes)]
    if args.dry_run:
        return dry_run(shapes)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lldecode.tune").setLevel(logging.INFO)
    start = time.time()
    gpu = bench.gpu_name()
    skinny_033 = load_peers(args.peers) if args.peers else None
    target = PLANS.shipped(gpu)
    if args.sweep:
        path = args.out / target.name if args.out else target
        path.unlink(missing_ok=True)
        tune.tune(TUNER, shapes, path, jobs=os.cpu_count() or 1)
        PLANS.shipped = PLANS.tuned = lambda gpu: path  # the comparison below runs what was just measured
        print(f"swept in {time.time() - start:.0f} s", flush=True)
    rows = []
    results = (args.out or HERE / "results") / f"{target.stem}.csv"
    for s in shapes:
        rows += compare(s, SIZES, skinny_033, args.rounds)
        bench.write_csv(results, rows)
    bench.plot(drawn(rows), results.with_suffix(".png"), title=f"skinny-gemm, M = 8, {gpu}")
    print(f"done in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
