"""What the features' tests share: cross-compiling, the error bound, poisoned outputs, graph replay.

Plain functions that raise ``AssertionError`` with what was expected and what was found.
"""

import atexit
import concurrent.futures
import dataclasses
import functools
import importlib
import importlib.metadata
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lldecode.feature import Context

_CUTE_DSL = {"nvidia-cutlass-dsl": "4.6.0", "apache-tvm-ffi": "0.1.5"}

CUTE_DSL_ACCEPTED = tuple(Context((c,) * 8, _CUTE_DSL, required) for c, required in (((9, 0), False), ((10, 0), True), ((10, 3), True)))
"""Where a feature with CuTe DSL kernels for SM90, SM100 and SM103 runs."""

CUTE_DSL_REFUSED = (
    (Context((), _CUTE_DSL), "no CUDA device"),
    (Context(((10, 0),), _CUTE_DSL), "capability 10.0: compiled for it, but not run on it yet; only the flag's value on has it"),
    (Context(((12, 0),), _CUTE_DSL), "capability: expected one of 9.0, 10.0, 10.3, got 12.0"),
    (Context(((9, 0), (8, 0)), _CUTE_DSL), "capability: expected one of 9.0, 10.0, 10.3, got 8.0"),
    (Context(((9, 0),), {"apache-tvm-ffi": "0.1.5"}), "nvidia-cutlass-dsl is not installed"),
    (Context(((9, 0),), {"nvidia-cutlass-dsl": "4.6.0"}), "apache-tvm-ffi is not installed"),
)
"""Where it does not, and the reason that its probe gives."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a kernel became.

    Attributes:
        ptx: PTX text.
        sass: disassembly, with the sections that describe each kernel.
        local_bytes: largest local memory of a kernel, bytes a thread: spilled registers and arrays that are not in registers.
    """

    ptx: str
    sass: str
    local_bytes: int


@functools.cache
def cross_compile(target: str, cfg: Any, arch: str) -> Compiled:
    """Compile a CuTe DSL kernel for `arch`, with or without a GPU, in a process that is kept for this `arch`.

    Args:
        target: ``"module:function"``; called with `cfg`, returns what ``cute.compile`` returned.
        cfg: hashable and picklable; its class is in an installed module.
        arch: as ``CUTE_DSL_ARCH`` takes it, e.g. ``sm_100a``.

    Raises:
        RuntimeError: the compiler's error.
    """
    ptx, cubin = _worker(arch).submit(_compile, list(sys.path), target, cfg).result()
    return disassemble(ptx, cubin)


def disassemble(ptx: str, cubin: bytes) -> Compiled:
    """What `cubin` holds; Triton's compiler gives both as ``asm["ptx"]`` and ``asm["cubin"]``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        sass = subprocess.run([_nvdisasm(), f.name], check=True, capture_output=True, text=True).stdout
    frames = re.findall(r"EIATTR_FRAME_SIZE\n(?:.*\n)*?.*index@\(.*\)\n.*\.word\s+(0x[0-9a-f]+)", sass)
    if not frames:
        raise RuntimeError("cubin: expected the frame size of a kernel in the disassembly, got none")
    return Compiled(ptx, sass, max(int(f, 16) for f in frames))


@functools.cache
def _worker(arch: str) -> concurrent.futures.Executor:
    dump = tempfile.TemporaryDirectory(prefix="lldecode-")
    context = multiprocessing.get_context("forkserver")
    # Importing torch is half of what a worker costs.
    context.set_forkserver_preload(["lldecode.testing"])
    executor = concurrent.futures.ProcessPoolExecutor(1, context, initializer=_set_up, initargs=(arch, dump.name))
    atexit.register(dump.cleanup)
    atexit.register(executor.shutdown)
    return executor


def _set_up(arch: str, dump: str) -> None:
    # The DSL reads its variables once, when it is imported.
    os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP="ptx,cubin", CUTE_DSL_DUMP_DIR=dump)


def _compile(path: list[str], target: str, cfg: Any) -> tuple[str, bytes]:
    sys.path[:] = path
    module, _, function = target.partition(":")
    try:
        compiled = getattr(importlib.import_module(module), function)(cfg)
    except Exception as e:
        # The compiler's own exceptions do not survive pickling.
        raise RuntimeError(f"{target}: {cfg}: {type(e).__name__}: {e}") from None
    return compiled.__ptx__, compiled.__cubin__


@functools.cache
def _nvdisasm() -> str:
    """nvidia-cutlass-dsl depends on this package; the one in Triton's wheel does not know sm_103a."""
    for file in importlib.metadata.files("nvidia-cuda-nvdisasm") or []:
        if file.name == "nvdisasm":
            return str(file.locate())
    raise FileNotFoundError("nvdisasm: expected in the package nvidia-cuda-nvdisasm")


def assert_close_to_oracle(got: torch.Tensor, oracle_fp64: torch.Tensor, baseline: torch.Tensor) -> None:
    """`got` is at most twice as far from the oracle as plain torch is, plus one unit in the last place.

    Both the norm of the error and its largest element are bounded. NaN and infinities must be where the oracle, rounded to the
    dtype, has them. Integers must be equal.

    Args:
        got: result under test.
        oracle_fp64: same shape; the result computed in float64 from the same inputs.
        baseline: same shape and dtype as `got`; plain torch's result in that dtype.
    """
    assert got.shape == oracle_fp64.shape == baseline.shape, f"shape: expected {tuple(oracle_fp64.shape)}, got {tuple(got.shape)}"
    assert got.dtype == baseline.dtype, f"dtype: expected {baseline.dtype}, got {got.dtype}"
    rounded = oracle_fp64.to(got.dtype)
    if not got.is_floating_point():
        assert torch.equal(got, rounded), _worst(got, oracle_fp64, baseline, got != rounded, "integers differ")
        return
    info = torch.finfo(got.dtype)
    got, expected, baseline = got.double(), rounded.double(), baseline.double()
    finite = expected.isfinite()
    stray = ~finite & ~((got == expected) | (got.isnan() & expected.isnan())) | finite & ~got.isfinite()
    assert not stray.any(), _worst(got, expected, baseline, stray, "NaN or infinity")

    oracle = oracle_fp64.double().where(finite, 0)
    error = (got - oracle).where(finite, 0).abs()
    # A baseline that overflowed where the oracle did not bounds nothing there.
    baseline_error = (baseline - oracle).where(finite & baseline.isfinite(), 0).abs()
    bound = 2 * baseline_error.norm() + info.eps * oracle.norm() + info.tiny
    norm = error.norm()
    assert norm <= bound, _worst(got, oracle, baseline, error, f"norm of the error: expected <= {bound:.3e}, got {norm:.3e}")
    if error.numel():
        bounds = 2 * baseline_error.max() + info.eps * oracle.abs() + info.tiny
        over = (error - bounds).clamp(min=0)
        limit = bounds.flatten()[over.argmax()]
        assert not over.any(), _worst(got, oracle, baseline, over, f"error of an element: expected <= {limit:.3e}")


def _worst(got: torch.Tensor, oracle: torch.Tensor, baseline: torch.Tensor, badness: torch.Tensor, what: str) -> str:
    i = int(badness.double().argmax())
    where = tuple(int(x) for x in torch.unravel_index(torch.tensor(i), badness.shape))
    values = f"oracle {oracle.flatten()[i].item():.9g}, torch {baseline.flatten()[i].item():.9g}, got {got.flatten()[i].item():.9g}"
    return f"{what}; worst of {int((badness != 0).sum())} of {badness.numel()} elements at {where}: {values}"


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill in place with NaN, or with bytes 0xAB where the dtype has none, so that what a kernel leaves unwritten shows."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    info = torch.iinfo(tensor.dtype)
    return tensor.fill_(int.from_bytes(b"\xab" * (info.bits // 8), "little", signed=info.min < 0))


def graph_replay(fn: Callable[..., Any], inputs: Sequence[Any], fresh: Sequence[Any]) -> None:
    """A CUDA graph of ``fn(*inputs)``, replayed after `fresh` was copied into `inputs`, does what ``fn(*fresh)`` does.

    Outputs and inputs (which `fn` may write) are compared bit for bit; outputs are poisoned before the replay.

    Args:
        fn: returns a tensor, a sequence of them, or None.
        inputs: tensors are overwritten; anything else is passed as it is.
        fresh: a tensor of the same shape and dtype for each tensor of `inputs`.
    """
    tensors = [(x, f) for x, f in zip(inputs, fresh, strict=True) if isinstance(x, torch.Tensor)]

    def load() -> None:
        for x, f in tensors:
            x.copy_(f)

    def results(out: Any) -> list[torch.Tensor]:
        return [x for x in ((out,) if isinstance(out, torch.Tensor) else out or ()) if isinstance(x, torch.Tensor)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(fn(*inputs))

    load()
    expected = [x.clone() for x in (*results(fn(*inputs)), *(x for x, _ in tensors))]
    for out in captured:
        poison(out)
    load()
    graph.replay()
    torch.cuda.synchronize()
    for i, (replayed, eager) in enumerate(zip((*captured, *(x for x, _ in tensors)), expected, strict=True)):
        name = f"output {i}" if i < len(captured) else f"input {i - len(captured)}"
        torch.testing.assert_close(replayed, eager, rtol=0, atol=0, equal_nan=True, msg=f"replayed {name}: {{}}".format)


def opcheck(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
    """Every check of ``torch.library.opcheck``: schema, fake tensor, autograd registration, AOT dispatch."""
    torch.library.opcheck(op, tuple(args), dict(kwargs or {}))
