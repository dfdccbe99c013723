"""Measure the kernels of this feature alone, and what PDL saves in the chain of kernels around attention.

    python packages/pdl/bench/bench.py [--vllm DIR] [--out CSV] [--rounds N]

Kernel cases run without PDL on either side, each call on buffers of its own. Chain cases are one CUDA graph over layers with
distinct weights, activations and caches; a row's time is that of one layer. There ``lldecode`` is with PDL, ``pdl-off`` the
same kernels without. The chain's other kernels are those of skinny-gemm and fused-query, which must be installed; in
``chain-cublas`` the GEMMs are cuBLAS's, which do not know PDL.
"""

import argparse
import dataclasses
import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lldecode import bench
from lldecode_fused_query import fused_query  # noqa: F401, registers the operator
from lldecode_pdl import op
from lldecode_skinny_gemm import skinny_bmm, skinny_gemm

LAYERS = 12
COS_SIN: Tensor
BOUNDARIES = 6
"""From one kernel of the chain to the next, that to the next layer included."""


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype) * scale


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    q: int
    cache: str
    interleave: bool
    indexer: bool = True

    @property
    def width(self) -> int:
        return 576 if self.cache == "fp8" else 656

    def nbytes(self, tokens: int) -> int:
        per_token = 2 * (2 * self.q + 576) + self.width + (256 + 132 + 8192 if self.indexer else 0)
        return tokens * per_token + 2 * (self.q + 512) + (1024 if self.indexer else 0)


SHAPES = (
    Shape("glm52", 2048, "fp8_ds_mla", True),
    Shape("glm52-no-indexer", 2048, "fp8_ds_mla", True, indexer=False),
    Shape("glm52-fp8", 2048, "fp8", True),
    Shape("dsv32", 1536, "fp8_ds_mla", False),
)


def norm_rope_args(shape: Shape, tokens: int) -> dict[str, Any]:
    qkv, kw, i = normal(tokens, shape.q + 576), normal(tokens, 160), shape.indexer
    return {
        "q_out": empty(tokens, shape.q),
        "positions": torch.randint(0, 4096, (tokens,), device="cuda"),
        "q_c": qkv[:, : shape.q],
        "q_weight": normal(shape.q),
        "q_eps": 1e-5,
        "kv_c": qkv[:, shape.q : shape.q + 512],
        "kv_weight": normal(512),
        "kv_eps": 1e-5,
        "k_pe": qkv[:, shape.q + 512 :],
        "cos_sin_cache": COS_SIN,
        "index_k": kw[:, :128] if i else None,
        "index_k_weight": normal(128, dtype=torch.float32) if i else None,
        "index_k_bias": normal(128, dtype=torch.float32) if i else None,
        "index_k_eps": 1e-6,
        "index_cos_sin_cache": COS_SIN if i else None,
        "topk_indices": torch.zeros(tokens, 2048, dtype=torch.int32, device="cuda"),
        "slot_mapping": torch.randperm(256, device="cuda")[:tokens],
        "indexer_k_cache": torch.zeros(4, 64, 132, dtype=torch.uint8, device="cuda") if i else None,
        "mla_kv_cache": torch.zeros(4, 64, shape.width, dtype=torch.uint8, device="cuda"),
        "mla_kv_cache_dtype": shape.cache,
        "mla_k_scale": torch.ones((), device="cuda"),
        "index_rope_interleave": shape.interleave,
    }


def stock(root: Path | None) -> tuple[types.ModuleType, types.ModuleType] | None:
    """vLLM 0.26.0's kernel modules out of its source folder, without importing vLLM; None where there is none."""
    if root is None:
        spec = importlib.util.find_spec("vllm")
        root = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    files = [] if root is None else [root / "models/deepseek_v32/nvidia/kernels.py", root / "v1/attention/backends/mla/sparse_utils.py"]
    if not files or not all(f.is_file() for f in files):
        return None
    utils = types.ModuleType("vllm.triton_utils")
    utils.tl, utils.triton = tl, triton  # type: ignore[attr-defined]
    sys.modules["vllm.triton_utils"] = utils
    found = []
    for file in files:
        spec = importlib.util.spec_from_file_location(f"stock_{file.stem}", file)
        assert spec and spec.loader
        found.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(found[-1])
    return found[0], found[1]


def stock_norm_rope(function: Callable[..., Tensor], a: dict[str, Any]) -> Callable[[], Tensor]:
    keywords = ("slot_mapping", "indexer_k_cache", "mla_kv_cache", "mla_kv_cache_dtype", "mla_k_scale", "index_rope_interleave")
    positional = [a[n] for n in list(a)[1:16]]
    return lambda: function(*positional, **{n: a[n] for n in keywords}, has_indexer=a["index_k"] is not None)


def close(name: str, got: Tensor, expected: Tensor, tolerance: float) -> float:
    """Largest error relative to the largest expected value; raises where it is more than `tolerance`."""
    error = ((got.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-9)).item()
    if not error <= tolerance:
        raise SystemExit(f"{name}: expected an error of at most {tolerance}, got {error}: nothing is measured")
    return error


def kernels(rows: list[bench.Row], peers: tuple[types.ModuleType, types.ModuleType] | None, rounds: int) -> None:
    def measure(case: str, providers: dict[str, list[Callable[[], object]]], nbytes: int, error: float) -> None:
        for name, samples in bench.interleaved(providers, rounds=rounds).items():
            rows.append(bench.row("pdl", name, case, samples, nbytes, error if name == "lldecode" else 0.0))
            print(f"{case:44s} {name:12s} {rows[-1].us_p50:8.2f} us", flush=True)

    for shape in SHAPES:
        for tokens in (1, 4, 16, 64):
            copies = min(64, bench.cold_copies(shape.nbytes(tokens)))
            args = [norm_rope_args(shape, tokens) for _ in range(copies)]
            providers: dict[str, list[Callable[[], object]]] = {
                "lldecode": [lambda a=a: op.fused_norm_rope(*list(a.values()), False) for a in args]
            }
            op.fused_norm_rope(*list(args[0].values()), False)
            x, w = args[0]["q_c"].double(), args[0]["q_weight"].double()
            error = close("norm_rope", args[0]["q_out"], x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w, 2**-7)
            if peers:
                providers["vllm-0.26.0"] = [stock_norm_rope(peers[0].fused_norm_rope, a) for a in args]
            measure(f"norm_rope T={tokens} {shape.name}", providers, shape.nbytes(tokens), error)

    for tokens in (1, 4, 16):
        sets = [
            (torch.arange(tokens, device="cuda"), normal(tokens, 6144), normal(tokens, 6144), normal(6144), normal(6144), 1e-5)
            for _ in range(64)
        ]
        providers = {"lldecode": [lambda a=a: op.fused_eh_norm(*a, False) for a in sets]}
        x = sets[0][2].double()
        expected = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * sets[0][4].double()
        error = close("eh_norm", op.fused_eh_norm(*sets[0], False)[:, 6144:], expected, 2**-7)
        if peers:
            providers["vllm-0.26.0"] = [lambda a=a: peers[0].fused_eh_norm(*a) for a in sets]
        measure(f"eh_norm T={tokens} H=6144", providers, (4 * tokens + 2) * 6144 * 2, error)

    for tokens in (1, 4, 16):
        for counted in (False, True):
            req_id = torch.zeros(tokens, dtype=torch.int32, device="cuda")
            sets = [
                (
                    req_id,
                    torch.randint(0, 999, (1, 64), dtype=torch.int32, device="cuda"),
                    torch.randint(-1, 4096, (tokens, 2048), dtype=torch.int32, device="cuda"),
                )
                for _ in range(64)
            ]

            def ours(a: tuple[Tensor, ...], counted: bool = counted) -> Tensor:
                counts = a[0].new_empty(len(a[0])) if counted else None
                return op.convert_req_index(*a, 64, None, None, counts, False)

            _, table, index = sets[0]
            slots = table[0][(index.clamp(min=0) // 64).long()] * 64 + index % 64
            close("convert", ours(sets[0]), slots.where(index >= 0, -1), 0.0)
            providers = {"lldecode": [lambda a=a: ours(a) for a in sets]}
            if peers:
                theirs = functools.partial(peers[1].triton_convert_req_index_to_global_index, return_valid_counts=counted)
                providers["vllm-0.26.0"] = [lambda a=a, f=theirs: f(*a, NUM_TOPK_TOKENS=2048) for a in sets]
            measure(f"convert T={tokens} topk=2048 counts={counted}", providers, 2 * tokens * 2048 * 4 + 256, 0.0)


class Layer:
    """One layer's chain: qkv_a, norm + RoPE + cache, q_b, absorbed bmm, wq_b, query; GLM-5.2, one rank of eight."""

    def __init__(self, tokens: int) -> None:
        self.hidden = normal(tokens, 6144)
        self.qkv_a, self.q_b, self.wq_b = normal(2624, 6144, scale=0.013), normal(2048, 2048, scale=0.022), normal(4096, 2048, scale=0.022)
        self.w_uk = normal(8, 192, 512, scale=0.072)
        self.qkv, self.q, self.index_q = empty(tokens, 2624), empty(tokens, 2048), empty(tokens, 4096)
        self.ql = empty(tokens, 8, 512)
        self.kw = normal(tokens, 160)
        self.args = norm_rope_args(SHAPES[0], tokens) | {
            "q_c": self.qkv[:, :2048],
            "kv_c": self.qkv[:, 2048:2560],
            "k_pe": self.qkv[:, 2560:],
            "index_k": self.kw[:, :128],
        }
        self.out, self.q_fp8 = empty(tokens, 8, 576), empty(tokens, 32, 128, dtype=torch.float8_e4m3fn)
        self.weights = empty(tokens, 32, dtype=torch.float32)

    def run(self, pdl: bool, cublas: bool) -> None:
        def linear(x: Tensor, w: Tensor, out: Tensor) -> None:
            if not cublas:
                (skinny_bmm if x.ndim == 3 else skinny_gemm)(x, w, out=out, pdl=pdl)
            elif x.ndim == 3:
                torch.bmm(x, w, out=out)
            else:
                torch.mm(x, w.T, out=out)

        linear(self.hidden, self.qkv_a, self.qkv)
        op.fused_norm_rope(*self.args.values(), pdl)
        q = self.q.view(-1, 8, 256)
        linear(self.args["q_out"], self.q_b, self.q)
        linear(q[..., :192].transpose(0, 1), self.w_uk, self.ql.transpose(0, 1))
        linear(self.args["q_out"], self.wq_b, self.index_q)
        positions, index_q = self.args["positions"], self.index_q.view(-1, 32, 128)
        mqa = positions, q[..., 192:], COS_SIN, self.ql, None, self.out
        index = index_q, COS_SIN, self.kw[:, 128:], self.q_fp8, self.weights
        torch.ops.lldecode.fused_query(*mqa, *index, 128**-0.5, 32**-0.5, True, pdl)

    def results(self) -> list[Tensor]:
        return [self.args["q_out"], self.out, self.q_fp8, self.weights, self.args["mla_kv_cache"], self.args["indexer_k_cache"]]

    @property
    def nbytes(self) -> int:
        return sum(w.numel() * 2 for w in (self.qkv_a, self.q_b, self.wq_b, self.w_uk))


def chain(rows: list[bench.Row], rounds: int) -> None:
    for tokens in (1, 4):
        layers = [Layer(tokens) for _ in range(LAYERS)]
        for kind in ("chain", "chain-cublas"):
            cublas = kind == "chain-cublas"
            thunks = {p: [lambda x=x, p=p, c=cublas: x.run(p == "lldecode", c) for x in layers] for p in ("pdl-off", "lldecode")}
            replays = {provider: bench.capture(each) for provider, each in thunks.items()}
            replays["pdl-off"]()
            expected = [[t.clone().view(torch.uint8) for t in x.results()] for x in layers]
            error = close(kind, layers[0].qkv, layers[0].hidden.double() @ layers[0].qkv_a.double().T, 2**-6)
            for _ in range(10):
                replays["lldecode"]()
            torch.cuda.synchronize()
            if not all(
                torch.equal(a.view(torch.uint8), b)
                for x, e in zip(layers, expected, strict=True)
                for a, b in zip(x.results(), e, strict=True)
            ):
                raise SystemExit(f"{kind} T={tokens}: PDL changes the result: nothing is measured")
            p50 = {}
            for provider, samples in bench.time_rounds(replays, rounds=rounds).items():
                per_layer = [us / LAYERS for us in samples]
                rows.append(bench.row("pdl", provider, f"{kind} T={tokens} layers={LAYERS}", per_layer, layers[0].nbytes, error))
                p50[provider] = rows[-1].us_p50
            off, on = p50["pdl-off"], p50["lldecode"]
            print(f"{kind} T={tokens}: {off:.2f} us a layer without PDL, {on:.2f} with, {100 * (1 - on / off):.1f} % lower")
            print(f"{kind} T={tokens}: {(off - on) / BOUNDARIES:.2f} us saved per boundary", flush=True)
        del layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="source folder of vLLM 0.26.0 (the package itself); default: the installed one")
    parser.add_argument("--out", type=Path, help="CSV; default: results/<gpu>.csv beside this file")
    parser.add_argument("--rounds", type=int, default=30)
    a = parser.parse_args()
    torch.manual_seed(0)
    peers = stock(a.vllm)
    if peers is None:
        print("vllm-0.26.0 is left out: its sources were not found", flush=True)
    rows: list[bench.Row] = []
    chain(rows, a.rounds)
    kernels(rows, peers, a.rounds)
    gpu = bench.gpu_name().lower().replace("nvidia ", "").replace(" ", "-")
    bench.write_csv(a.out or Path(__file__).parent / "results" / f"{gpu}.csv", rows)


if __name__ == "__main__":
    COS_SIN = torch.randn(4096, 64, device="cuda")
    main()
