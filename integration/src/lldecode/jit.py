"""Compile cache of the CuTe DSL kernels: a function comes from memory, else from disk, else from the compiler.

A key names everything that can change the machine code: the kernel, every field of its config, the architecture, the
versions of the compiler, the bytes of its sources. What is compiled is exported to one object file a key, checked by
digest before it is loaded. Eight processes that start cold compile each key once; a warm start compiles nothing.

Importing this module imports no compiler and touches no CUDA.
"""

import collections
import contextlib
import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import filelock
import torch

logger = logging.getLogger("lldecode.jit")

# Part of every key: raise it when the file format, the key or the way a function is exported changes.
_FORMAT = 1
_ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
_DSL = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
# The compiler itself is in one of these.
_DSL_LIBS = ("nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13")
# Variables of the DSL that change the code it generates.
_DSL_ENV = ("CUTE_DSL_COMPILER_OPT", "CUTE_DSL_DEBUG", "CUTE_DSL_ENABLE_ASSERTIONS", "CUTE_DSL_LINEINFO")
_SYMBOL = "lldecode"
_LOCK_TIMEOUT_S = 300.0

# One for all kernels: the DSL keeps the state of a compile in globals.
_lock = threading.RLock()
_stats: collections.Counter[str] = collections.Counter(compiled=0, loaded=0, memory=0)
_warned: set[str] = set()
_unavailable: list[str | None] = []


class NotWarm(RuntimeError):
    """The kernel is not in memory and the current stream is capturing a CUDA graph, where nothing may be compiled."""


class Kernel:
    """A CuTe DSL kernel and its compiled functions.

    Args:
        name: kebab-case, unique; names the files on disk.
        compile: takes a config, calls ``cute.compile(..., options="--enable-tvm-ffi")`` and returns its result. Streams are
            ``cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)``, so that torch's current stream is read at each launch.
        sources: every file whose text shapes the machine code; usually ``[__file__]``.

    Raises:
        ValueError: `name` is not kebab-case.
        OSError: a source cannot be read.
    """

    def __init__(self, name: str, compile: Callable[[Any], Any], sources: Sequence[str | Path]) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
            raise ValueError(f"name: expected kebab-case, got {name!r}")
        self.name = name
        self.compile = compile
        # Read at import, when the text is that of the code being imported.
        self._sources = [hashlib.sha256(Path(s).read_bytes()).hexdigest() for s in sources]
        self._memory: dict[tuple[Hashable, int | None], Callable[..., Any]] = {}

    def get(self, cfg: Any, device: torch.device) -> Callable[..., Any]:
        """The function compiled for `cfg`, taking its runtime arguments by position.

        When it is in memory this is one dict lookup, so an op should build its config once, not at each call. What it
        returned outside a capture may be launched for the first time inside one.

        Args:
            cfg: frozen dataclass; its fields are every constexpr, dtype, alignment, pdl ... Two configs that compare equal
                must mean the same kernel.
            device: a CUDA device, or the CPU to compile for ``CUTE_DSL_ARCH`` where there is no GPU.

        Raises:
            NotWarm: it is not in memory and the current stream is capturing a CUDA graph.
            ValueError: `cfg` has a field that cannot be part of a key, or `device` is not of a proven architecture.
            RuntimeError: the DSL compiles for another architecture than that of `device`.
        """
        try:
            return self._memory[cfg, device.index]
        except KeyError:
            pass
        return self._get(cfg, device)

    def is_warm(self, cfg: Any, device: torch.device) -> bool:
        """Whether :meth:`get` would answer from memory."""
        return (cfg, _index(device)) in self._memory

    def _get(self, cfg: Any, device: torch.device) -> Callable[..., Any]:
        slot = cfg, _index(device)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            if slot not in self._memory and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                raise NotWarm(
                    f"{self.name}: expected a compiled kernel inside a CUDA graph capture, got none for {cfg} on {device}; "
                    "warm up: call the op once with these arguments before the capture"
                )
            with _lock:
                if slot not in self._memory:
                    arch = _arch(device)
                    self._memory[slot] = self._load_or_compile(cfg, arch, self._key(cfg, arch))
                    _stats["memory"] += 1
        return self._memory[slot]

    def _key(self, cfg: Any, arch: str) -> str:
        parts = {
            "format": _FORMAT,
            "kernel": self.name,
            "sources": self._sources,
            "cfg": _canonical(cfg, "cfg"),
            "arch": arch,
            "versions": {d: _version(d) for d in (*_DSL, *_DSL_LIBS)},
            "env": {v: os.environ.get(v) for v in _DSL_ENV},
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _load_or_compile(self, cfg: Any, arch: str, key: str) -> Callable[..., Any]:
        directory, reason = disk_cache()
        if directory is None:
            _warn_once(f"kernels are kept in memory only: {reason}")
            return _load(self._compile(cfg, arch))
        path = directory / f"{self.name}-{key}.o"
        if (fn := self._from_disk(path, key)) is not None:
            return fn
        lock = filelock.FileLock(path.with_suffix(".lock"), timeout=_LOCK_TIMEOUT_S)
        try:
            held = lock.acquire()
        except (OSError, NotImplementedError) as e:
            _warn_once(f"kernels are kept in memory only: {directory}: no lock: {e}")
            return _load(self._compile(cfg, arch))
        with held:
            if (fn := self._from_disk(path, key)) is not None:
                return fn
            obj = self._compile(cfg, arch)
            _write(path, obj + _digest(key, obj))
            return _load(obj)

    def _from_disk(self, path: Path, key: str) -> Callable[..., Any] | None:
        try:
            obj = _read(path, key)
            fn = _load(obj)
        except FileNotFoundError:
            return None
        except Exception as e:
            _warn_once(f"{self.name}: compiling again: {path}: {one_line(e)}")
            return None
        _stats["loaded"] += 1
        logger.debug("%s: loaded %s", self.name, path)
        return fn

    def _compile(self, cfg: Any, arch: str) -> bytes:
        """Object file of the kernel, which :func:`_load` takes."""
        start = time.perf_counter()
        obj = _export(self.compile, cfg, arch)
        _stats["compiled"] += 1
        logger.info("%s: compiled %s for %s in %.1f s", self.name, cfg, arch, time.perf_counter() - start)
        return obj


def disk_cache() -> tuple[Path | None, str | None]:
    """The directory that compiled kernels are kept in, created if missing, or None and why there is none.

    ``$LLDECODE_CACHE_DIR``, else ``$XDG_CACHE_HOME/lldecode``, else ``~/.cache/lldecode``. Machine code is loaded from it, so
    it must be a real directory, owned by the effective user and closed to everybody else.
    """
    if own := os.environ.get("LLDECODE_CACHE_DIR"):
        path = Path(own)
        if not path.is_absolute():
            return None, f"LLDECODE_CACHE_DIR: expected an absolute path, got {own!r}"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            path = (base if base.is_absolute() else Path.home() / ".cache") / "lldecode"
        except RuntimeError as e:
            return None, str(e)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        st = path.lstat()
    except OSError as e:
        return None, f"{path}: {e.strerror}"
    if not stat.S_ISDIR(st.st_mode):
        return None, f"{path}: expected a real directory, got a symbolic link"
    if st.st_uid != os.geteuid():
        return None, f"{path}: expected owner {os.geteuid()}, got {st.st_uid}"
    if stat.S_IMODE(st.st_mode) & 0o077:
        return None, f"{path}: expected mode 0700, got {stat.S_IMODE(st.st_mode):04o}"
    return path, None


def unavailable() -> str | None:
    """Why CuTe DSL cannot compile for the current CUDA device, or None.

    The first call of a process compiles and loads a trivial kernel; it also initialises CUDA, so it belongs in a process
    that launches kernels and never before a fork.
    """
    with _lock:
        if not _unavailable:
            _unavailable.append(_probe())
        return _unavailable[0]


def stats() -> dict[str, int]:
    """Since the process started: kernels ``compiled``, kernels ``loaded`` from disk, functions in ``memory``."""
    return dict(_stats)


def _index(device: torch.device) -> int | None:
    """What the memory is keyed by; -1 is the CPU, None never occurs: ``cuda`` is the current device."""
    if device.type == "cpu":
        return -1
    if device.type != "cuda":
        raise ValueError(f"device: expected a CUDA device, got {device}")
    return torch.cuda.current_device() if device.index is None else device.index


def _arch(device: torch.device) -> str:
    if device.type == "cpu":
        if arch := os.environ.get("CUTE_DSL_ARCH"):
            return arch
        raise ValueError("device: expected a CUDA device, or CUTE_DSL_ARCH to compile for, got cpu")
    capability = torch.cuda.get_device_capability(device)
    if capability not in _ARCHS:
        raise ValueError(f"device: expected compute capability {_proven()}, got {capability[0]}.{capability[1]}")
    return _ARCHS[capability]


def _proven() -> str:
    return " or ".join(f"{major}.{minor}" for major, minor in _ARCHS)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _canonical(value: Any, name: str) -> Any:
    """`value` as JSON that is the same in every process and differs wherever the value or its type does."""
    if isinstance(value, enum.Enum):
        return [type(value).__qualname__, value.name]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return ["torch.dtype", str(value)]
    if isinstance(value, type):
        return ["type", f"{value.__module__}.{value.__qualname__}"]
    if isinstance(value, tuple):
        return ["tuple", *(_canonical(v, name) for v in value)]
    if dataclasses.is_dataclass(value) and vars(type(value))["__dataclass_params__"].frozen:
        fields = dataclasses.fields(value)
        # A field left out of == would let one kernel answer for another.
        if left_out := [f.name for f in fields if not f.compare]:
            raise ValueError(f"{name}: expected every field to be compared, got compare=False for {left_out}")
        return [type(value).__qualname__, {f.name: _canonical(getattr(value, f.name), f"{name}.{f.name}") for f in fields}]
    raise ValueError(f"{name}: expected a frozen dataclass of plain values, got {value!r}")


def _export(compile: Callable[[Any], Any], cfg: Any, arch: str) -> bytes:
    from cutlass.cutlass_dsl import CuTeDSL

    # The DSL reads the architecture once, from CUTE_DSL_ARCH or the first GPU.
    if (target := CuTeDSL._get_dsl().envar.arch) != arch:
        raise RuntimeError(f"device: expected {target}, which CuTe DSL compiles for in this process, got {arch}")
    compiled = compile(cfg)
    with open(os.memfd_create("lldecode"), "rb") as f:
        compiled.export_to_c(f"/proc/self/fd/{f.fileno()}", function_name=_SYMBOL)
        return f.read()


def _load(obj: bytes) -> Callable[..., Any]:
    """Callable of an object file. Cold and warm starts both end here, so they run the same thing."""
    from cutlass.cute.runtime import load_module

    # Loaded from memory: what was checked is what runs.
    with open(os.memfd_create("lldecode"), "wb") as f:
        f.write(obj)
        f.flush()
        return load_module(f"/proc/self/fd/{f.fileno()}", enable_tvm_ffi=True)[_SYMBOL]


def _digest(key: str, obj: bytes) -> bytes:
    return hashlib.sha256(key.encode() + obj).digest()


def _read(path: Path, key: str) -> bytes:
    """Object file at `path`, without the digest that ends it."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as f:
        st = os.fstat(f.fileno())
        if st.st_uid != os.geteuid():
            raise PermissionError(f"expected owner {os.geteuid()}, got {st.st_uid}")
        data = f.read()
    obj, digest = data[:-32], data[-32:]
    if digest != _digest(key, obj):
        raise ValueError(f"expected the digest of its {len(data)} bytes, got another: truncated or corrupted")
    return obj


def _write(path: Path, data: bytes) -> None:
    """Called with the key's lock held, so a temporary file that is already there is a dead writer's."""
    tmp = path.with_suffix(".tmp")
    try:
        tmp.write_bytes(data)
        os.replace(tmp, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            tmp.unlink()
        _warn_once(f"kernels are kept in memory only: {path.parent}: {e.strerror}")


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning("%s", message)


def one_line(error: Exception) -> str:
    """The DSL's errors are coloured paragraphs."""
    return " ".join([f"{type(error).__name__}:", *re.sub(r"\x1b\[[\d;]*m", "", str(error)).split()])


def _probe() -> str | None:
    for distribution in _DSL:
        if _version(distribution) is None:
            return f"{distribution} is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        arch = _arch(torch.device("cuda", torch.cuda.current_device()))
        _load(_export(_compile_trivial, None, arch))
    except Exception as e:
        return one_line(e)
    return None


def _compile_trivial(_: None) -> Any:
    from cutlass import cute
    from cutlass.cute.typing import Int32

    @cute.kernel
    def kernel(mX: cute.Tensor) -> None:
        mX[0] = 0

    @cute.jit
    def launch(mX: cute.Tensor, stream: Any) -> None:
        kernel(mX).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

    x = cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4)
    return cute.compile(launch, x, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi")
