"""Runs vLLM's CUDA classes on a machine without a GPU, for the tests marked ``vllm``.

Two things stand in for the hardware. A ``libcuda.so.1`` whose every function answers "no device" lets vLLM's extension modules
load; it is built with the C compiler and found through ``LD_LIBRARY_PATH``, which must be set before a process starts, so scripts
run in a subprocess. A platform that claims a compute capability is registered as a ``vllm.platform_plugins`` entry point, which
every process that vLLM starts finds too. Triton's kernels run in its interpreter, on CPU tensors.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Compute capability: name, memory in GiB, multiprocessors, whether it shares the host's memory.
_GPUS = {
    "8.0": ("NVIDIA A100-SXM4-80GB", 80, 108, False),
    "8.9": ("NVIDIA L40S", 48, 142, False),
    "9.0": ("NVIDIA H200", 141, 132, False),
    "10.0": ("NVIDIA B200", 180, 148, False),
    "10.3": ("NVIDIA B300 SXM6", 268, 148, False),
    "11.0": ("NVIDIA Thor", 128, 20, True),
    "12.0": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, 188, False),
    "12.1": ("NVIDIA GB10", 128, 48, True),
}

# What vLLM 0.26.0's extension modules import from the driver; 100 is CUDA_ERROR_NO_DEVICE.
_DRIVER = (
    "cuInit",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemGetAllocationGranularity",
)


def run_vllm(
    script: str | Path,
    *args: str,
    cc: str = "9.0",
    device: str = "cpu",
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script in a process where vLLM believes in eight CUDA GPUs.

    Args:
        script: source text (it is dedented) or the path of a file.
        args: the script's arguments.
        cc: compute capability that the platform claims.
        device: the platform's ``device_type``: what vLLM's classes allocate on, ``cpu`` or ``meta``.
        env: added to the environment; the caller's own ``LLDECODE_*``, ``VLLM_*`` and ``TRITON_*`` are not passed on.
        timeout: seconds.
        check: raise on a non-zero exit status.

    Raises:
        ValueError: `cc` is not in the table of GPUs.
        RuntimeError: vLLM or a C compiler is missing.
        AssertionError: the script failed; carries the end of what it wrote.
        subprocess.TimeoutExpired: it took longer than `timeout`.
    """
    if cc not in _GPUS:
        raise ValueError(f"cc: expected one of {', '.join(_GPUS)}, got {cc!r}")
    if importlib.util.find_spec("vllm") is None:
        raise RuntimeError("vLLM is not installed; deselect these tests with -m 'not vllm and not gpu and not e2e'")
    support = _support()
    if isinstance(script, str):
        path = Path(tempfile.mkdtemp(dir=support)) / "script.py"
        path.write_text(textwrap.dedent(script))
    else:
        path = script
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("LLDECODE_", "VLLM_", "TRITON_"))}
    full = inherited | {
        "FAKE_CC": cc,
        "FAKE_DEV": device,
        "PYTHONPATH": _joined(support, inherited.get("PYTHONPATH")),
        "CUDA_VISIBLE_DEVICES": "",  # empty, not unset: vLLM then keeps Triton although no driver is active
        "TRITON_INTERPRET": "1",
        "VLLM_CACHE_ROOT": str(support / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if (driver := _driver()) is not None:
        full["LD_LIBRARY_PATH"] = _joined(driver, inherited.get("LD_LIBRARY_PATH"))
    done = subprocess.run([sys.executable, str(path), *args], env=full | dict(env or {}), capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return done


def _joined(first: Path, rest: str | None) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else str(first)


@functools.cache
def _support() -> Path:
    """A directory that lives as long as this process, with the entry point of the platform."""
    root = Path(tempfile.mkdtemp(prefix="lldecode-vllm-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    info = root / "lldecode_fake_cuda-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lldecode-fake-cuda\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.platform_plugins]\nfake_cuda = {__name__}:platform\n")
    return root


@functools.cache
def _driver() -> Path | None:
    """The directory of the stub ``libcuda.so.1``, or None on a machine that has the real one."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return None
    except OSError:
        pass
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("libcuda.so.1: neither the library nor a C compiler (gcc or cc) to build a stub was found")
    out = _support() / "driver"
    out.mkdir()
    source = "\n".join(f"int {name}(void) {{ return 100; }}" for name in _DRIVER)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(out / "libcuda.so.1"), "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return out


def platform() -> str:
    """The ``vllm.platform_plugins`` entry point: qualified name of the platform's class."""
    # This backend allocates CUDA memory when it is imported; vLLM skips a backend that cannot be.
    sys.modules["vllm.v1.attention.backends.mla.cutlass_mla"] = None  # type: ignore[assignment]
    return f"{__name__}.FakeCuda"


def __getattr__(name: str) -> Any:
    if name == "FakeCuda":
        return _fake_cuda()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _fake_cuda() -> type:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*map(int, os.environ["FAKE_CC"].split(".")))
    name, gib, multiprocessors, integrated = _GPUS[os.environ["FAKE_CC"]]

    class FakeCuda(CudaPlatformBase):
        device_type = os.environ["FAKE_DEV"]

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return capability

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return gib << 30

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return multiprocessors

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return integrated

        @classmethod
        def is_arch_support_pdl(cls) -> bool:
            return capability.major >= 9

    return FakeCuda


_SHARED = {
    "dtype": "bfloat16",
    "num_hidden_layers": 4,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "vocab_size": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_MODELS: dict[str, dict[str, Any]] = {
    "glm52": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "n_group": 1,
        "topk_group": 1,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True,
    },
    "dsv32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "n_group": 4,
        "topk_group": 2,
    },
}


def tiny_model(out: Path, model: str = "glm52", **overrides: Any) -> Path:
    """Write the config of a small model with GLM-5.2's or DeepSeek-V3.2's structure: 3 dense layers, 1 MoE layer, 1 MTP layer.

    Args:
        out: directory, made if missing.
        model: ``glm52`` or ``dsv32``.
        overrides: replace or add keys of ``config.json``.
    """
    if model not in _MODELS:
        raise ValueError(f"model: expected one of {', '.join(_MODELS)}, got {model!r}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(_SHARED | _MODELS[model] | overrides))
    return out


@contextlib.contextmanager
def world(model: str | Path, **engine_args: Any) -> Iterator[Any]:
    """Inside a script of :func:`run_vllm`: vLLM's config for `model`, current, in a world of one process.

    Layers and whole models can be constructed inside, on ``torch.device("meta")`` where they are large.

    Args:
        model: directory that holds ``config.json``.
        engine_args: for ``EngineArgs``; the defaults here are a dummy-weight model of 4,096 positions.

    Yields:
        the ``VllmConfig``.
    """
    import torch
    import vllm.utils.torch_utils
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.workspace import init_workspace_manager

    args = {"skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": 4096, "max_num_batched_tokens": 256} | engine_args
    config = EngineArgs(model=str(model), **args).create_engine_config()
    vllm.utils.torch_utils._aux_stream = object()  # a MoE layer asks for a second CUDA stream when it is constructed
    init_workspace_manager(torch.device(os.environ["FAKE_DEV"]))
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    with tempfile.TemporaryDirectory() as rendezvous, set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous}/store", 0, "gloo")
        parallel_state.initialize_model_parallel()
        try:
            yield config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            torch.set_default_dtype(before)
