"""``python -m lldecode_skinny_gemm.tune``: measure this GPU on the shapes of a model, and write the plan that the op loads."""

import argparse
import concurrent.futures
import functools
import json
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from lldecode import bench
from lldecode_skinny_gemm import kernel, op, plan
from lldecode_skinny_gemm.plan import Shape, Tile

logger = logging.getLogger("lldecode.skinny_gemm")

_TILES = 12  # candidates that are measured for a shape and a tile of tokens


def of_model(config: dict[str, Any], tp: int) -> Iterator[Shape]:
    """The products of a DeepSeek-Sparse-Attention model, one tensor-parallel rank's share, from its Hugging Face config."""
    hidden, q, latent, rope = (config[k] for k in ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"))
    heads, nope, v = config["num_attention_heads"] // tp, config["qk_nope_head_dim"], config["v_head_dim"]
    yield from (Shape(q + latent + rope, hidden), Shape(heads * (nope + rope), q), Shape(hidden, heads * v), Shape(hidden, 2 * hidden))
    yield from (
        Shape(config["index_n_heads"] * config["index_head_dim"], q),
        Shape(config["index_head_dim"] + config["index_n_heads"], hidden),
    )
    for inter in (config["intermediate_size"], config["moe_intermediate_size"] * config["n_shared_experts"]):
        yield from (Shape(2 * inter // tp, hidden), Shape(hidden, inter // tp))
    yield Shape(-(-config["vocab_size"] // (64 * tp)) * 64, hidden)
    yield from (Shape(latent, nope, heads, True), Shape(v, latent, heads))


def operands(shape: Shape, copies: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Random activations ``[batch, 32, k]`` and `copies` of weights ``[batch, k, n]``, laid out as the shape says."""
    size = (shape.batch, shape.k, shape.n) if shape.n_major else (shape.batch, shape.n, shape.k)
    weights = [torch.randn(size, dtype=dtype, device=device).mul_(shape.k**-0.5) for _ in range(copies)]
    x = torch.randn(shape.batch, plan.MAX_M, shape.k, dtype=dtype, device=device)
    return x, weights if shape.n_major else [w.transpose(1, 2) for w in weights]


def configs(sms: int, shape: Shape, m: int, dtype: torch.dtype = torch.bfloat16, tiles: int = _TILES) -> dict[Tile, kernel.Config]:
    """By tile, the configs that are measured for a shape at M."""
    stride = shape.n if shape.n_major else shape.k
    return {
        t: kernel.Config(shape.k, stride, plan.tokens(m), *t, dtype, shape.n_major, False, True)
        for t in plan.candidates(sms, shape, m)[:tiles]
    }


def measure(
    shape: Shape, m: int, x: torch.Tensor, weights: list[torch.Tensor], exact: torch.Tensor, sms: int, rounds: int
) -> dict[str, Any]:
    """The entry of a plan for a shape at M; a tile that is less exact than twice cuBLAS is left out.

    Args:
        exact: the fp64 product of `x` with the first of `weights`.
    """
    x, exact = x[:, :m], exact[:, :m]
    out = torch.empty(shape.batch, m, shape.n, dtype=x.dtype, device=x.device)

    def error(call: Any) -> float:
        out.fill_(math.nan)
        call(weights[0])
        return float((out - exact).norm() / exact.norm())

    calls: dict[Any, Any] = {"cublas": lambda w: torch.bmm(x, w, out=out) if shape.batch > 1 else torch.mm(x[0], w[0], out=out[0])}
    if shape[:2] == plan.FUSED_A and shape.batch == 1 and m <= 16 and hasattr(torch.ops._C, "dsv3_fused_a_gemm"):
        calls["fused_a"] = lambda w: torch.ops._C.dsv3_fused_a_gemm(out[0], x[0], w[0])

    def launch(cfg: kernel.Config, w: torch.Tensor) -> None:
        op.run(cfg, x, w, None, out)

    bound = 2 * error(calls["cublas"]) + 1e-6
    for tile, cfg in configs(sms, shape, m, x.dtype).items():
        call = functools.partial(launch, cfg)
        if (off := error(call)) <= bound:
            calls[tile] = call
        else:
            print(f"{shape} M={m}: {tile} is wrong: error {off:.2e}, expected at most {bound:.2e}", file=sys.stderr)
    thunks = {name: [functools.partial(call, w) for w in weights] for name, call in calls.items()}
    us: dict[Any, float] = {name: round(bench.percentiles(s)[1], 3) for name, s in bench.interleaved(thunks, rounds=rounds).items()}
    tiles = sorted((t for t in us if isinstance(t, Tile)), key=lambda t: us[t])
    found = {name: v for name, v in us.items() if isinstance(name, str)} | ({"lldecode": us[tiles[0]]} if tiles else {})
    logger.info("%s M=%d: %s; %s", shape, m, found, ", ".join(f"{tuple(t)} {us[t]}" for t in tiles))
    return {"choice": list(plan.decide(found, tiles[0] if tiles else None)), "us": found}


def precompile(wanted: Sequence[kernel.Config], jobs: int) -> None:
    """Compile into the disk cache, in processes of their own: the compiler takes seconds and one core for each."""
    # Inherited: the compiler reads it when it is imported, which may be before an initializer runs.
    os.environ["CUTE_DSL_ARCH"] = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for _ in track(pool.map(_compile, wanted, chunksize=4), "compiling", len(wanted), console=Console(stderr=True)):
            pass


def _compile(cfg: kernel.Config) -> None:
    kernel.KERNEL.get(cfg, torch.device("cpu"))


def tune(shapes: Sequence[Shape], path: Path | None = None, *, jobs: int | None = None, rounds: int = 7) -> dict[str, Any]:
    """Measure what a plan file lacks, with cold weights, on the current device; the file is rewritten after each shape.

    A run that was interrupted goes on where it was. The plan's shapes are returned.

    Args:
        path: the plan file; the one that the op loads if None.
    """
    gpu, sms = plan.device(torch.cuda.current_device())
    path, stamp = path or plan.tuned(gpu), plan.stamp(gpu)
    done, reason = plan.read(path, stamp)
    if reason:
        print(f"measuring again: {reason}", file=sys.stderr)
    todo = [s for s in dict.fromkeys(shapes) if str(s) not in done]
    wanted = {cfg: None for s in todo for m in plan.MEASURED_M for cfg in configs(sms, s, m).values()}
    precompile(list(wanted), jobs or os.cpu_count() or 1)
    device = torch.device("cuda", torch.cuda.current_device())
    for s in track(todo, "measuring", console=Console(stderr=True)):
        x, weights = operands(s, bench.cold_copies(s.batch * s.n * s.k * 2), torch.bfloat16, device)
        exact = x.double() @ weights[0].double()
        done[str(s)] = {str(m): measure(s, m, x, weights, exact, sms, rounds) for m in plan.MEASURED_M}
        plan.write(path, stamp, done)
    return done


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, type=Path, help="a model's directory, or its config.json")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    parser.add_argument("--out", type=Path, help="plan file (default: the one that the op loads)")
    parser.add_argument("--jobs", type=int, help="processes that compile (default: one a core)")


def run(args: argparse.Namespace) -> int:
    """Tune for a model and print what it gained. Exit status 1 where there is no GPU that the kernel runs on."""
    if not torch.cuda.is_available() or (reason := op._unavailable(torch.device("cuda", torch.cuda.current_device()))):
        print(reason if torch.cuda.is_available() else "no CUDA device", file=sys.stderr)
        return 1
    config = json.loads((args.model / "config.json" if args.model.is_dir() else args.model).read_text())
    shapes = list(of_model(config, args.tp))
    try:
        found = tune(shapes, args.out, jobs=args.jobs)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    for s in shapes:
        gains = [f"M={m} {e['us']['cublas'] / e['us'][e['choice'][0]]:.2f}x {e['choice'][0]}" for m, e in found[str(s)].items()]
        print(f"{s}: {', '.join(gains)}")
    return 0


COMMAND = ("tune", "measure the GEMMs of a model on this GPU and write the plan that skinny-gemm uses", add_arguments, run)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=COMMAND[1])
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
