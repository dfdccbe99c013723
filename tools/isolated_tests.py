"""Run a package's tests in a fresh environment that holds only what the package declares, and the workspace's test tools.

    uv run python tools/isolated_tests.py [NAME ...]      NAME is lldecode or a feature; all of them without one

Its wheel and lldecode's are built and installed with their own dependencies, and what the group `test` of its pyproject.toml
adds for its tests, at the locked versions; so an import that is not declared, and a file that the wheel lacks, fail here. vLLM is
not installed: tests marked ``vllm``, ``gpu`` or ``e2e`` do not run.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from affected import ROOT, packages
from layout import Member, members

MARKERS = "not gpu and not e2e and not vllm"


def run(member: Member, root: Path = ROOT) -> int:
    """Exit status of pytest."""
    tools = _groups(root)["dev"] + _groups(member.dir).get("test", [])
    with tempfile.TemporaryDirectory(prefix="lldecode-isolated-") as made:
        tmp = Path(made)
        for dist in {"lldecode", member.dist}:
            _uv(root, "build", "--quiet", "--package", dist, "--wheel", "--out-dir", tmp / "wheels")
        locked = tmp / "locked.txt"
        export = ("export", "--quiet", "--frozen", "--all-packages", "--all-groups", "--all-extras", "--no-hashes", "--no-emit-workspace")
        _uv(root, *export, "--output-file", locked)
        python = tmp / "venv/bin/python"
        _uv(root, "venv", "--quiet", "--python", sys.executable, tmp / "venv")
        wheels = sorted((tmp / "wheels").glob("*.whl"))
        _uv(root, "pip", "install", "--quiet", "--python", python, "--constraint", locked, *wheels, *tools)
        command: list[str | Path] = [
            python,
            "-m",
            "pytest",
            "-c",
            root / "pyproject.toml",
            "--rootdir",
            member.dir,
            "-p",
            "no:cacheprovider",
            "-n",
            "auto",
            "--dist",
            "loadfile",
        ]
        # Neither the caller's modules nor its flags.
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("LLDECODE_")}
        return subprocess.run([*command, "-m", MARKERS, member.dir / "tests"], cwd=tmp, env=env).returncode


def _groups(folder: Path) -> dict[str, list[str]]:
    return tomllib.loads((folder / "pyproject.toml").read_text()).get("dependency-groups", {})


def _uv(root: Path, *args: str | Path) -> None:
    subprocess.run(["uv", *args], cwd=root, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names or packages()
    if unknown := sorted(set(names) - set(packages())):
        parser.error(f"NAME: expected one of {', '.join(packages())}, got {', '.join(unknown)}")
    found = members(ROOT)
    failed = []
    for name in names:
        print(f"::: {name}, alone", flush=True)
        if run(found["integration" if name == "lldecode" else name]):
            failed.append(name)
    if failed:
        print(f"failed alone: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
