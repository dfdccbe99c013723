"""Reconcile what is published with what the workspace declares: a version that is not published yet is due.

    python tools/release.py --published DIR_OR_URL              print what is due
    python tools/release.py --published DIR_OR_URL --build OUT  build it and tag it NAME-vX.Y.Z

DIR_OR_URL is a folder of wheels, or an index that serves the JSON simple API. Nothing is built or tagged while a due package has
changelog fragments, lacks its changelog entry, or the tree is dirty. Running it again is safe: what is published is not due.
"""

import argparse
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from layout import Member, members

ROOT = Path(__file__).resolve().parents[1]


def published(where: str, dist: str) -> set[Version]:
    """Versions of `dist` in a folder or an index."""
    if "://" not in where:
        return {_version(p.name) for p in Path(where).glob(f"{dist.replace('-', '_')}-*") if p.name.endswith((".whl", ".tar.gz"))}
    request = urllib.request.Request(f"{where.rstrip('/')}/{dist}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return {_version(f["filename"]) for f in json.load(answer)["files"]}
    except urllib.error.HTTPError as e:
        if e.code == 404:
            return set()
        raise


def _version(filename: str) -> Version:
    return parse_wheel_filename(filename)[1] if filename.endswith(".whl") else parse_sdist_filename(filename)[1]


def tag(member: Member) -> str:
    name = "lldecode" if member.name == "integration" else member.name
    return f"{name}-v{member.project['version']}"


def due(root: Path, where: str) -> list[Member]:
    """Packages whose declared version is not published, lldecode first."""
    return [m for m in members(root).values() if Version(m.project["version"]) not in published(where, m.dist)]


def refusals(root: Path, wanted: list[Member]) -> list[str]:
    """Why the due packages cannot be released from this tree."""
    out = []
    for m in wanted:
        version = m.project["version"]
        if fragments := sorted(p.name for p in (m.dir / "changelog.d").glob("*.md")):
            out.append(f"{m.dist}: changelog fragments are pending: {', '.join(fragments)}")
        if not re.search(rf"^## {re.escape(version)} ", (m.dir / "CHANGELOG.md").read_text(), re.MULTILINE):
            out.append(f"{m.dist}: CHANGELOG.md has no entry for {version}")
        if _git(root, "tag", "--list", tag(m)) and _git(root, "rev-parse", f"{tag(m)}^{{commit}}") != _git(root, "rev-parse", "HEAD"):
            out.append(f"{m.dist}: the tag {tag(m)} is on another commit")
    if dirty := _git(root, "status", "--porcelain"):
        out.append(f"the tree is dirty:\n{dirty}")
    return out


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", required=True, metavar="DIR_OR_URL")
    parser.add_argument("--build", type=Path, metavar="OUT", help="build the due packages into this folder and tag them")
    parser.add_argument("--root", type=Path, default=ROOT, help="the workspace (default: this one)")
    args = parser.parse_args()
    root = args.root.resolve()
    wanted = due(root, args.published)
    for m in wanted:
        print(f"due: {m.dist} {m.project['version']}")
    if not wanted:
        print("nothing is due")
        return 0
    if refused := refusals(root, wanted):
        print("\n".join(f"refused: {r}" for r in refused), file=sys.stderr)
        return 1
    if args.build:
        for m in wanted:
            subprocess.run(["uv", "build", "--package", m.dist, "--out-dir", args.build.resolve()], cwd=root, check=True)
        for m in wanted:
            _git(root, "tag", "--force", tag(m))
            print(f"tagged: {tag(m)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
