import importlib.util
import io
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

Args = dict[str, Any]

WIDTH = {"fp8": 576, "fp8_ds_mla": 656}
POSITIONS, BLOCKS, BLOCK_SIZE = 64, 2, 64


@pytest.fixture(scope="session")
def norm_rope_args() -> Callable[..., Args]:
    """Arguments of ``reference.fused_norm_rope``: column slices as the projections give them, poisoned outputs."""

    def make(
        slots: list[int] | None,
        cache: str = "fp8_ds_mla",
        *,
        interleave: bool = True,
        indexer: bool = True,
        q: int = 1536,
        topk: int = 2048,
        tokens: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        seed: int = 0,
    ) -> Args:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

        def whole(*shape: int, dtype: torch.dtype, fill: float) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        n = len(slots or ()) if tokens is None else tokens
        qkv, kw = normal(n, q + 576), normal(n, 160)
        return {
            "q_out": whole(n, q, dtype=dtype, fill=torch.nan),
            "positions": torch.randint(0, POSITIONS, (n,), generator=generator, device=device),
            "q_c": qkv[:, :q],
            "q_weight": normal(q),
            "q_eps": 1e-5,
            "kv_c": qkv[:, q : q + 512],
            "kv_weight": normal(512),
            "kv_eps": 1e-6,
            "k_pe": qkv[:, q + 512 :],
            "cos_sin_cache": normal(POSITIONS, 64, dtype=torch.float32),
            "index_k": kw[:, 32:] if indexer else None,
            "index_k_weight": normal(128, dtype=torch.float32) if indexer else None,
            "index_k_bias": normal(128, dtype=torch.float32) if indexer else None,
            "index_k_eps": 1e-6,
            "index_cos_sin_cache": normal(POSITIONS, 64, dtype=torch.float32) if indexer else None,
            "topk_indices": whole(n + 2, topk, dtype=torch.int32, fill=7) if indexer else None,
            "slot_mapping": None if slots is None else torch.tensor(slots, dtype=torch.int64, device=device),
            "indexer_k_cache": whole(BLOCKS, BLOCK_SIZE, 132, dtype=torch.uint8, fill=0xAB) if indexer and slots is not None else None,
            "mla_kv_cache": None if slots is None else whole(BLOCKS, BLOCK_SIZE, WIDTH[cache], dtype=torch.uint8, fill=0xAB),
            "mla_kv_cache_dtype": cache,
            "mla_k_scale": torch.tensor(0.375, device=device),
            "index_rope_interleave": interleave,
        }

    return make


@pytest.fixture(scope="session")
def copy() -> Callable[[Args], Args]:
    """Arguments with tensors of their own for everything that is written."""
    written = ("q_out", "topk_indices", "indexer_k_cache", "mla_kv_cache")
    return lambda args: {k: v.clone() if k in written and v is not None else v for k, v in args.items()}


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls ``module:function`` (a module's name, or the path of its file) under Triton's interpreter.

    Returns (result, arguments, keywords), the latter two as the call left them.
    """
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("interpret.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    assert process.stdin and process.stdout

    def call(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
        assert process.stdin and process.stdout
        buffer = io.BytesIO()
        torch.save((module, function, args, kwargs), buffer)
        process.stdin.write(struct.pack("q", buffer.tell()) + buffer.getvalue())
        process.stdin.flush()
        (size,) = struct.unpack("q", process.stdout.read(8))
        answer = torch.load(io.BytesIO(process.stdout.read(size)), weights_only=False)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    yield call
    process.stdin.close()
    process.wait(timeout=30)
    process.stdout.close()


@pytest.fixture(scope="session")
def vllm_root() -> Path:
    """Folder of the installed vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return Path(spec.submodule_search_locations[0])
