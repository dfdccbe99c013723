"""The compile cache, with a real CuTe DSL kernel that is compiled and loaded, and launched where there is a GPU."""

import dataclasses
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lldecode import jit, testing

CPU = torch.device("cpu")

TINY = """
import dataclasses
import os

import torch
from cutlass import Constexpr, Float32, cute

from lldecode import jit


@dataclasses.dataclass(frozen=True)
class Cfg:
    add: int = 1


@cute.kernel
def add(mX: cute.Tensor, n: Constexpr):
    i, _, _ = cute.arch.thread_idx()
    mX[i] = mX[i] + n


def compile(cfg):
    # One line a compile, whichever process it runs in.
    with open(os.environ["TINY_COMPILES"], "a") as f:
        f.write(f"{os.getpid()}\\n")

    @cute.jit
    def launch_tiny(mX: cute.Tensor, stream):
        add(mX, cfg.add).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    x = cute.runtime.make_fake_compact_tensor(Float32, (32,), assumed_align=16)
    return cute.compile(launch_tiny, x, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi")


def kernel():
    return jit.Kernel("tiny", compile, [__file__])
"""

PROCESSES = """
import json
import multiprocessing
import os
import signal
from pathlib import Path

import tiny
import torch
from lldecode import jit

context = multiprocessing.get_context("fork")


def cold(barrier, results):
    barrier.wait()
    tiny.kernel().get(tiny.Cfg(), torch.device("cpu"))
    results.put(jit.stats())


def start(n):
    barrier, results = context.Barrier(n), context.SimpleQueue()
    processes = [context.Process(target=cold, args=(barrier, results)) for _ in range(n)]
    for p in processes:
        p.start()
    stats = [results.get() for _ in processes]
    for p in processes:
        p.join()
    return stats


def killed():
    def half(path, data):
        with open(path, "wb") as f:
            f.write(data[: len(data) // 2])
            f.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    Path.write_bytes = half
    tiny.kernel().get(tiny.Cfg(), torch.device("cpu"))


eight = start(8)
ninth = start(1)
os.environ["LLDECODE_CACHE_DIR"] += "-killed"
writer = context.Process(target=killed)
writer.start()
writer.join()
left = sorted(p.suffix for p in Path(os.environ["LLDECODE_CACHE_DIR"]).iterdir())
print(json.dumps({"eight": eight, "ninth": ninth, "killed": writer.exitcode, "left": left, "next": start(1), "after": start(1)}))
"""


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "tiny.py").write_text(TINY)
    return path


@pytest.fixture(scope="session")
def tiny_module(tiny_dir: Path) -> Any:
    spec = importlib.util.spec_from_file_location("tiny", tiny_dir / "tiny.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def arch(tiny_module: Any) -> str:
    """What the DSL compiles for in this process; it decides once."""
    from cutlass.cutlass_dsl import CuTeDSL

    return CuTeDSL._get_dsl().envar.arch


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, not yet created."""
    monkeypatch.setenv("LLDECODE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TINY_COMPILES", str(tmp_path / "compiles"))
    monkeypatch.setattr(jit, "_warned", set())
    monkeypatch.setattr(jit, "_stats", dict.fromkeys(jit.stats(), 0))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tiny_module: Any, arch: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the kernel; each ``tiny.kernel()`` starts with an empty memory, as a new process does."""
    monkeypatch.setenv("CUTE_DSL_ARCH", arch)
    return tiny_module


def compiles() -> int:
    marks = Path(os.environ["TINY_COMPILES"])
    return len(marks.read_text().split()) if marks.exists() else 0


def is_tiny(fn: Any) -> bool:
    """Calling it reaches the compiled code, which names itself when it refuses a CPU tensor."""
    with pytest.raises(Exception, match="launch_tiny"):
        fn(torch.zeros(32))
    return True


# Importing


def test_import_is_light() -> None:
    code = "import sys, torch, lldecode.jit; print('cutlass' in sys.modules, 'tvm_ffi' in sys.modules, torch.cuda.is_initialized())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False"] * 3


# Keys


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int = 64
    dtype: torch.dtype = torch.bfloat16
    align: int = 16
    pdl: bool = False
    scale: float = 1.0
    out: str | None = None
    shape: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class Renamed(Config):
    pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.py"
    path.write_bytes(b"x = 1\n")
    return path


def key(source: Path, cfg: Any = Config(), arch: str = "sm_90a", name: str = "k") -> str:
    return jit.Kernel(name, lambda cfg: None, [source])._key(cfg, arch)


@pytest.mark.parametrize(
    "cfg",
    [
        Config(tile=65),
        Config(dtype=torch.float16),
        Config(align=8),
        Config(pdl=True),
        Config(scale=1.5),
        Config(out="fp8"),
        Config(out="None"),
        Config(shape=(1, 3)),
        Config(shape=(1, 2, 3)),
        Renamed(),
        Config(tile=True),
    ],
    ids=repr,
)
def test_key_changes_with_cfg(source: Path, cfg: Config) -> None:
    assert key(source, cfg) != key(source, Config())


def test_key_holds_every_field_of_cfg(source: Path) -> None:
    changed = {"tile": 1, "dtype": torch.int8, "align": 1, "pdl": True, "scale": 2.0, "out": "x", "shape": ()}
    assert changed.keys() == {f.name for f in dataclasses.fields(Config)}
    keys = {key(source, dataclasses.replace(Config(), **{name: value})) for name, value in changed.items()}
    assert len(keys | {key(source)}) == len(changed) + 1


def test_key_changes_with_arch_name_and_source_byte(source: Path) -> None:
    before = key(source)
    assert key(source) == before
    assert key(source, arch="sm_100a") != before
    assert key(source, name="l") != before
    source.write_bytes(b"x = 2\n")
    assert key(source) != before


@pytest.mark.parametrize("distribution", ["nvidia-cutlass-dsl", "apache-tvm-ffi", "nvidia-cutlass-dsl-libs-cu13"])
def test_key_changes_with_version(source: Path, monkeypatch: pytest.MonkeyPatch, distribution: str) -> None:
    before, version = key(source), jit._version
    monkeypatch.setattr(jit, "_version", lambda d: "0.0" if d == distribution else version(d))
    assert key(source) != before


def test_key_changes_with_format(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(source)
    monkeypatch.setattr(jit, "_FORMAT", jit._FORMAT + 1)
    assert key(source) != before


@pytest.mark.parametrize("variable", ["CUTE_DSL_COMPILER_OPT", "CUTE_DSL_DEBUG", "CUTE_DSL_ENABLE_ASSERTIONS", "CUTE_DSL_LINEINFO"])
def test_key_changes_with_code_generation_variables(source: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv(variable, raising=False)
    before = key(source)
    monkeypatch.setenv(variable, "1")
    assert key(source) != before


@dataclasses.dataclass
class Thawed:
    tile: int = 1


@dataclasses.dataclass(frozen=True)
class LeftOut:
    tile: int = dataclasses.field(default=1, compare=False)


@pytest.mark.parametrize(
    ("cfg", "reason"),
    [
        (Thawed(), "cfg: expected a frozen dataclass"),
        (LeftOut(), "cfg: expected every field to be compared"),
        (Config(tile=[1]), "cfg.tile: expected"),
        (Config(shape=(torch.zeros(1),)), "cfg.shape: expected"),
        ({"tile": 1}, "cfg: expected a frozen dataclass"),
    ],
    ids=["thawed", "left out", "list", "tensor", "dict"],
)
def test_refuses_cfg_that_cannot_be_a_key(source: Path, cfg: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        key(source, cfg)


@pytest.mark.parametrize("name", ["", "Tiny", "a_b", "../a", "a/b"])
def test_refuses_name(name: str) -> None:
    with pytest.raises(ValueError, match="name: expected kebab-case"):
        jit.Kernel(name, lambda cfg: None, [])


# Memory and disk


def test_compiles_once_then_memory_then_disk(tiny: Any, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lldecode.jit")
    first = tiny.kernel()
    assert not first.is_warm(tiny.Cfg(), CPU)
    fn = first.get(tiny.Cfg(), CPU)
    assert first.is_warm(tiny.Cfg(), CPU) and not first.is_warm(tiny.Cfg(add=2), CPU)
    assert first.get(tiny.Cfg(), CPU) is fn and is_tiny(fn)
    assert jit.stats() == {"compiled": 1, "loaded": 0, "memory": 1}
    assert re.fullmatch(r"tiny: compiled Cfg\(add=1\) for sm_\w+ in \d+\.\d s", caplog.messages[0])

    assert is_tiny(tiny.kernel().get(tiny.Cfg(), CPU))
    assert jit.stats() == {"compiled": 1, "loaded": 1, "memory": 2}
    assert compiles() == 1
    assert [p.suffix for p in sorted(cache.iterdir())] == [".lock", ".o"]
    assert cache.stat().st_mode & 0o777 == 0o700

    tiny.kernel().get(tiny.Cfg(add=2), CPU)
    assert compiles() == 2


def test_object_file_is_one(tiny: Any, cache: Path) -> None:
    tiny.kernel().get(tiny.Cfg(), CPU)
    (path,) = cache.glob("tiny-*.o")
    assert path.read_bytes().startswith(b"\x7fELF")


def test_warm_get_is_one_lookup(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tiny.kernel()
    kernel._memory[tiny.Cfg(), 3] = "compiled for device 3"
    monkeypatch.setattr(jit.Kernel, "_get", lambda *_: pytest.fail("took the slow path"))
    assert kernel.get(tiny.Cfg(), torch.device("cuda", 3)) == "compiled for device 3"


def test_memory_is_per_device(tiny: Any) -> None:
    kernel = tiny.kernel()
    kernel._memory[tiny.Cfg(), 0] = "compiled for device 0"
    assert kernel.is_warm(tiny.Cfg(), torch.device("cuda", 0))
    assert not kernel.is_warm(tiny.Cfg(), torch.device("cuda", 1))
    assert not kernel.is_warm(tiny.Cfg(), CPU)


def test_threads_compile_once(tiny: Any) -> None:
    kernel, barrier, got = tiny.kernel(), threading.Barrier(8), []

    def cold() -> None:
        barrier.wait()
        got.append(kernel.get(tiny.Cfg(), CPU))

    threads = [threading.Thread(target=cold) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 8 and len({id(fn) for fn in got}) == 1
    assert compiles() == 1


@pytest.fixture(scope="module")
def processes(tiny_dir: Path, arch: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What real processes did, on an empty cache and around a writer that was killed half-way; and their cache."""
    path = tmp_path_factory.mktemp("processes")
    env = os.environ | {"CUTE_DSL_ARCH": arch, "LLDECODE_CACHE_DIR": str(path / "cache"), "TINY_COMPILES": str(path / "compiles")}
    env["PYTHONPATH"] = os.pathsep.join([str(tiny_dir), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run([sys.executable, "-c", PROCESSES], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]), path / "cache"


def test_eight_cold_processes_compile_once(processes: tuple[dict[str, Any], Path]) -> None:
    stats = processes[0]["eight"]
    assert len(stats) == 8
    assert sum(s["compiled"] for s in stats) == 1
    assert sum(s["loaded"] for s in stats) == 7
    assert processes[0]["ninth"] == [{"compiled": 0, "loaded": 1, "memory": 1}]


def test_key_is_the_same_in_another_interpreter(processes: tuple[dict[str, Any], Path], tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLDECODE_CACHE_DIR", str(processes[1]))
    tiny.kernel().get(tiny.Cfg(), CPU)
    assert jit.stats() == {"compiled": 0, "loaded": 1, "memory": 1}


def test_killed_writer_leaves_nothing_to_load(processes: tuple[dict[str, Any], Path]) -> None:
    result = processes[0]
    assert result["killed"] == -9
    assert result["left"] == [".lock", ".tmp"]
    assert result["next"] == [{"compiled": 1, "loaded": 0, "memory": 1}]
    assert result["after"] == [{"compiled": 0, "loaded": 1, "memory": 1}]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_digest(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swap_in_another_key(path: Path) -> None:
    """A whole, undamaged file under the wrong name."""
    data = path.read_bytes()
    path.write_bytes(data[:-32] + jit._digest("another key", data[:-32]))


def link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere.o"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        flip,
        flip_digest,
        swap_in_another_key,
        link,
    ],
    ids=["last byte cut", "half cut", "empty", "byte added", "byte flipped", "digest flipped", "another key's", "symbolic link"],
)
def test_damaged_file_is_noticed_and_compiled_again(tiny: Any, cache: Path, caplog: pytest.LogCaptureFixture, damage: Any) -> None:
    tiny.kernel().get(tiny.Cfg(), CPU)
    (path,) = cache.glob("*.o")
    good = path.read_bytes()
    damage(path)
    caplog.clear()
    assert is_tiny(tiny.kernel().get(tiny.Cfg(), CPU))
    assert compiles() == 2
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith(f"tiny: compiling again: {path}: ")
    assert not path.is_symlink() and len(path.read_bytes()) == len(good)
    tiny.kernel().get(tiny.Cfg(), CPU)
    assert compiles() == 2


def test_another_users_file_is_not_loaded(
    tiny: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.kernel().get(tiny.Cfg(), CPU)
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((*real(fd)[:4], os.geteuid() + 1, *real(fd)[5:])))
    tiny.kernel().get(tiny.Cfg(), CPU)
    assert compiles() == 2
    assert f"expected owner {os.geteuid()}, got {os.geteuid() + 1}" in caplog.text


def test_file_that_does_not_load_is_compiled_again(
    tiny: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its digest is right, but it lacks the symbol."""
    with monkeypatch.context() as m:
        m.setattr(jit, "_SYMBOL", "other")
        tiny.kernel().get(tiny.Cfg(), CPU)
    assert is_tiny(tiny.kernel().get(tiny.Cfg(), CPU))
    assert compiles() == 2
    assert "compiling again" in caplog.text


# The directory


def test_directory_is_the_first_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLDECODE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert jit.disk_cache() == (tmp_path / "home/.cache/lldecode", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert jit.disk_cache() == (tmp_path / "home/.cache/lldecode", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.disk_cache() == (tmp_path / "xdg/lldecode", None)
    monkeypatch.setenv("LLDECODE_CACHE_DIR", str(tmp_path / "a/b/own"))
    assert jit.disk_cache() == (tmp_path / "a/b/own", None)
    assert (tmp_path / "a/b/own").stat().st_mode & 0o777 == 0o700


def readable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    cache.mkdir(mode=0o755)
    cache.chmod(0o755)
    return "expected mode 0700, got 0755"


def group_writable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    cache.mkdir()
    cache.chmod(0o720)
    return "expected mode 0700, got 0720"


def owned_by_another(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    cache.mkdir(mode=0o700)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    return f"expected owner {uid + 1}, got {uid}"


def linked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    cache.with_name("real").mkdir(mode=0o700)
    cache.symlink_to("real")
    return "got a symbolic link"


def dangling(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    cache.symlink_to("nowhere")
    return "File exists"


def plain_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    cache.write_text("")
    return "File exists"


def below_a_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    cache.write_text("")
    monkeypatch.setenv("LLDECODE_CACHE_DIR", str(cache / "below"))
    return "Not a directory"


def relative(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(cache.parent)
    monkeypatch.setenv("LLDECODE_CACHE_DIR", "cache")
    return "expected an absolute path, got 'cache'"


@pytest.mark.parametrize("make", [readable, group_writable, owned_by_another, linked, dangling, plain_file, below_a_file, relative])
def test_untrusted_directory_is_not_used(
    tiny: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    reason = make(cache, monkeypatch)
    directory, why = jit.disk_cache()
    assert directory is None and why is not None and reason in why
    for _ in range(2):
        assert is_tiny(tiny.kernel().get(tiny.Cfg(), CPU))
    assert jit.stats() == {"compiled": 2, "loaded": 0, "memory": 2}
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [f"kernels are kept in memory only: {why}"]
    assert not list(cache.parent.rglob("tiny-*"))


def no_lock(cache: Path, stem: str) -> None:
    (cache / f"{stem}.lock").mkdir(exist_ok=True)


def disk_full(cache: Path, stem: str) -> None:
    (cache / f"{stem}.tmp").symlink_to("/dev/full")


def read_only(cache: Path, stem: str) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    cache.chmod(0o500)


@pytest.mark.parametrize("make", [no_lock, disk_full, read_only])
def test_unwritable_directory_means_memory_only(tiny: Any, cache: Path, arch: str, caplog: pytest.LogCaptureFixture, make: Any) -> None:
    cache.mkdir(mode=0o700)
    for _ in range(2):
        make(cache, f"tiny-{tiny.kernel()._key(tiny.Cfg(), arch)}")
        assert is_tiny(tiny.kernel().get(tiny.Cfg(), CPU))
        assert not list(cache.glob("*.o"))
    assert jit.stats() == {"compiled": 2, "loaded": 0, "memory": 2}
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith(f"kernels are kept in memory only: {cache}: ")


def test_warm_start_writes_nothing(tiny: Any, cache: Path, arch: str) -> None:
    """So a directory that became read-only still serves what it holds."""
    tiny.kernel().get(tiny.Cfg(), CPU)
    (lock,) = cache.glob("*.lock")
    lock.unlink()
    lock.mkdir()
    tiny.kernel().get(tiny.Cfg(), CPU)
    assert jit.stats() == {"compiled": 1, "loaded": 1, "memory": 2}


# Captures


def start_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_cold_kernel_in_a_capture_is_not_warm(tiny: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_capture(monkeypatch)
    with pytest.raises(jit.NotWarm, match=r"^tiny: .*Cfg\(add=1\).*warm up"):
        tiny.kernel().get(tiny.Cfg(), CPU)
    assert compiles() == 0 and not cache.exists()


def test_disk_is_not_memory_in_a_capture(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.kernel().get(tiny.Cfg(), CPU)
    start_capture(monkeypatch)
    with pytest.raises(jit.NotWarm):
        tiny.kernel().get(tiny.Cfg(), CPU)


def test_warm_kernel_in_a_capture(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tiny.kernel()
    fn = kernel.get(tiny.Cfg(), CPU)
    start_capture(monkeypatch)
    assert kernel.get(tiny.Cfg(), CPU) is fn


def test_capture_does_not_wait_for_a_compile(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that captures is refused at once, also while another one compiles."""
    start_capture(monkeypatch)
    refused = threading.Event()

    def capture() -> None:
        with pytest.raises(jit.NotWarm):
            tiny.kernel().get(tiny.Cfg(), CPU)
        refused.set()

    with jit._lock:
        threading.Thread(target=capture, daemon=True).start()
        assert refused.wait(timeout=10)


# Architectures and availability


def test_refuses_another_arch_than_the_dsl_compiles_for(tiny: Any, cache: Path, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "sm_100a" if arch != "sm_100a" else "sm_90a"
    monkeypatch.setenv("CUTE_DSL_ARCH", other)
    with pytest.raises(RuntimeError, match=f"expected {arch}, .*got {other}"):
        tiny.kernel().get(tiny.Cfg(), CPU)
    assert not list(cache.glob("*.o"))


def test_cpu_needs_an_arch(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_DSL_ARCH")
    with pytest.raises(ValueError, match="device: expected a CUDA device, or CUTE_DSL_ARCH"):
        tiny.kernel().get(tiny.Cfg(), CPU)


def test_refuses_other_devices(tiny: Any) -> None:
    with pytest.raises(ValueError, match="device: expected a CUDA device, got meta"):
        tiny.kernel().get(tiny.Cfg(), torch.device("meta"))


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")])
def test_arch_is_the_exact_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert jit._arch(torch.device("cuda", 0)) == expected


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 1), (11, 0), (12, 0)])
def test_refuses_an_unproven_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    got = f"{capability[0]}.{capability[1]}"
    with pytest.raises(ValueError, match=rf"expected compute capability 9.0 or 10.0 or 10.3, got {got}"):
        jit._arch(torch.device("cuda", 0))


@pytest.fixture
def gpu_of_arch(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPU is the one that the DSL compiles for."""
    capability = {a: c for c, a in jit._ARCHS.items()}[arch]
    monkeypatch.setattr(jit, "_unavailable", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_available_where_a_kernel_compiles(cache: Path, gpu_of_arch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    compile_trivial = jit._compile_trivial
    monkeypatch.setattr(jit, "_compile_trivial", lambda cfg: (asked.append(cfg), compile_trivial(cfg))[1])
    assert jit.unavailable() is None
    assert jit.unavailable() is None
    assert len(asked) == 1
    assert jit.stats()["compiled"] == 0


def test_unavailable_without_the_packages(gpu_of_arch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    version = jit._version
    for distribution in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        monkeypatch.setattr(jit, "_unavailable", [])
        monkeypatch.setattr(jit, "_version", lambda d, missing=distribution: None if d == missing else version(d))
        assert jit.unavailable() == f"{distribution} is not installed"


def test_unavailable_where_the_import_fails(gpu_of_arch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass.cutlass_dsl", None)
    reason = jit.unavailable()
    assert reason is not None and reason.startswith("ModuleNotFoundError: ") and "cutlass.cutlass_dsl" in reason


def test_unavailable_where_the_compiler_fails(gpu_of_arch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("\n\x1b[91m\x1b[1mno\x1b[0m\nptxas\n")

    monkeypatch.setattr(jit, "_compile_trivial", broken)
    assert jit.unavailable() == "RuntimeError: no ptxas"


def test_unavailable_without_a_gpu(gpu_of_arch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert jit.unavailable() == "no CUDA device"


def test_unavailable_on_an_unproven_gpu(gpu_of_arch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    reason = jit.unavailable()
    assert reason is not None and "got 8.6" in reason


# On a GPU


@pytest.mark.gpu
def test_gpu_compiled_and_loaded_kernels_run(tiny: Any) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert jit.unavailable() is None
    for _ in range(2):
        fn = tiny.kernel().get(tiny.Cfg(add=3), device)
        x = torch.arange(32, dtype=torch.float32, device=device)
        fn(x)
        assert torch.equal(x.cpu(), torch.arange(32) + 3.0)
    assert jit.stats() == {"compiled": 1, "loaded": 1, "memory": 2}
    assert tiny.kernel().get(tiny.Cfg(add=3), torch.device("cuda")) is not None


@pytest.mark.gpu
def test_gpu_stream_is_read_at_each_launch(tiny: Any) -> None:
    kernel = tiny.kernel()
    x = torch.zeros(32, device="cuda")

    def run(x: torch.Tensor) -> None:
        kernel.get(tiny.Cfg(), x.device)(x)

    testing.graph_replay(run, [x], [torch.ones(32, device="cuda")])


@pytest.mark.gpu
def test_gpu_cold_kernel_in_a_capture(tiny: Any) -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(32, device="cuda")
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(jit.NotWarm):
            tiny.kernel().get(tiny.Cfg(), x.device)
    graph.replay()
    assert x.cpu().eq(1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_gpu_first_launch_in_a_capture(tiny: Any, mode: str) -> None:
    """Compiled or loaded before the capture is enough: nothing has to have been launched."""
    for _ in range(2):
        x = torch.zeros(32, device="cuda")
        fn = tiny.kernel().get(tiny.Cfg(), x.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            fn(x)
        assert x.cpu().eq(0).all()
        graph.replay()
        assert x.cpu().eq(1).all()
    assert jit.stats() == {"compiled": 1, "loaded": 1, "memory": 2}
