"""Pack every package and the locked third-party wheels for a GPU host that reaches no index.

    python tools/gpu_bundle.py OUT [--python 3.12] [--platform manylinux_2_28_x86_64 ...] [--only NAME,...] [--vllm] [--part-mb N]

OUT/wheels holds the wheels, OUT/wheels.txt their names and sha256; with --part-mb also OUT/bundle.tar.00, .01, ...: the same as a
tar archive in pieces. On the host:

    cat bundle.tar.* | tar xf - && pip install --no-index --find-links wheels 'lldecode[all]'
"""

import argparse
import hashlib
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64")


def select(exported: str, python: str, only: Iterable[str] = ()) -> list[str]:
    """The pinned requirements of a `uv export` that hold for Linux, x86-64 and this Python, without their markers.

    Raises:
        ValueError: a name in `only` that is not locked.
    """
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
    }
    lines = [line for line in exported.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = {
        canonicalize_name(r.name): f"{r.name}{r.specifier}"
        for r in map(Requirement, lines)
        if r.marker is None or r.marker.evaluate(environment)
    }
    wanted = {canonicalize_name(n) for n in only} or set(found)
    if unknown := sorted(wanted - set(found)):
        raise ValueError(f"--only: expected names of the lock, got {', '.join(unknown)}")
    return [found[name] for name in sorted(wanted)]


def split(archive: Path, size: int) -> list[Path]:
    """Replace `archive` by pieces of at most `size` bytes."""
    out: list[Path] = []
    with archive.open("rb") as data:
        while piece := data.read(size):
            out.append(archive.with_name(f"{archive.name}.{len(out):02d}"))
            out[-1].write_bytes(piece)
    archive.unlink()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--platform", nargs="+", default=PLATFORMS)
    parser.add_argument("--only", default="", help="third-party packages to take, comma-separated (default: all that `all` needs)")
    parser.add_argument("--vllm", action="store_true", help="vLLM and its dependencies too")
    parser.add_argument("--part-mb", type=int, help="also write a tar archive in pieces of this many MB")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"OUT: expected an empty folder, got {args.out}")
    wheels = args.out.resolve() / "wheels"
    extras = ["--extra", "all", *(["--extra", "vllm"] if args.vllm else [])]
    export = ("uv", "export", "--quiet", "--frozen", "--package", "lldecode", *extras, "--no-hashes", "--no-emit-workspace")
    exported = subprocess.run(export, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    try:
        wanted = select(exported, args.python, filter(None, args.only.split(",")))
    except ValueError as e:
        parser.error(str(e))
    _run("uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", wheels)
    (wheels / ".gitignore").unlink(missing_ok=True)
    target = ["--python-version", args.python, *(x for p in args.platform for x in ("--platform", p))]
    _run("uvx", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *target, "--dest", wheels, *wanted)
    listing = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(wheels.iterdir()))
    (args.out / "wheels.txt").write_text(listing)
    if args.part_mb:
        archive = args.out / "bundle.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(wheels, "wheels")
        split(archive, args.part_mb * 1_000_000)
    print(listing, end="")


def _run(*command: str | Path) -> None:
    if code := subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
