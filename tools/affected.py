"""Which packages' CI jobs a change needs, as a JSON list.

    python tools/affected.py --base origin/main      what differs from the merge base with origin/main
    python tools/affected.py PATH ...                these paths, relative to the root

A path that has no rule here ends it with exit status 1, so that a new kind of file cannot slip past CI.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# lldecode's job runs the commands of the documents.
DOCUMENTS = {"README.md", "CONTRIBUTING.md", "LICENSE"}
SHARED_FILES = {"pyproject.toml", "uv.lock", ".python-version", ".gitignore", ".pre-commit-config.yaml"}
SHARED_FOLDERS = {"integration", "tests", "tools", ".ci", ".github"}


def packages(root: Path = ROOT) -> list[str]:
    """Every job's name: ``lldecode`` and the features."""
    return ["lldecode", *sorted(p.parent.name for p in root.glob("packages/*/pyproject.toml"))]


def affected(paths: Iterable[str], every: list[str]) -> list[str]:
    """The jobs among `every` that a change of `paths` needs, in the order of `every`.

    Raises:
        ValueError: a path that has no rule.
    """
    out: set[str] = set()
    for path in paths:
        top, *rest = path.split("/")
        if top == "packages" and len(rest) > 1:
            # A feature that is gone was also an extra of lldecode.
            out.update([rest[0]] if rest[0] in every else every)
        elif path in SHARED_FILES or (top in SHARED_FOLDERS and rest):
            out.update(every)
        elif path in DOCUMENTS:
            out.add("lldecode")
        else:
            raise ValueError(f"{path}: no rule says which packages it affects; add one to tools/affected.py")
    return [name for name in every if name in out]


def changed(base: str) -> list[str]:
    """Paths that differ between HEAD and its merge base with `base`, both names of a moved file."""
    command = ["git", "diff", "--name-only", "--no-renames", "-z", f"{base}...HEAD"]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [p for p in out.split("\0") if p]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--base", help="a git revision")
    what.add_argument("paths", nargs="*", default=[], metavar="PATH")
    args = parser.parse_args()
    try:
        print(json.dumps(affected(changed(args.base) if args.base else args.paths, packages())))
    except ValueError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
