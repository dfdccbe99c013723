"""Tensor-parallel ranks of vLLM 0.26.0 on one host, for tests and benchmarks that are processes of their own."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import torch

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
"""Environment of ranks that leave NVLink multicast off; FlashInfer's ``mnnvl`` workspace, which vLLM prefers, needs it."""


def rendezvous() -> str:
    """A TCP address that was free just now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{s.getsockname()[1]}"


def device(rank: int) -> torch.device:
    """The GPU of a rank, now the current one, or the CPU.

    Raises:
        RuntimeError: NVLink multicast is on.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    from torch._C._distributed_c10d import _SymmetricMemory

    torch.cuda.set_device(rank)
    if _SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CUDA, rank):
        raise RuntimeError("TORCH_SYMM_MEM_DISABLE_MULTICAST: expected 1 to have turned multicast off")
    return torch.device("cuda", rank)


@contextlib.contextmanager
def tensor_parallel(rank: int, ranks: int, rendezvous: str) -> Iterator[Any]:
    """vLLM's tensor-parallel group, over NCCL where there are GPUs, else gloo."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        parallel_state.init_distributed_environment(ranks, rank, rendezvous, rank, backend)
        parallel_state.initialize_model_parallel(ranks)
        yield parallel_state.get_tp_group()
