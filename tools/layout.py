"""Check the layout of every package: files, names, size, imports and dependencies.

    python tools/layout.py [ROOT]

Prints one line a violation; exit status 1 where there is any.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MAX_CODE_LINES = 500

# What a module of each role may import: of other packages, then of its own package; "later" means inside functions only.
LAW: dict[str, dict[str, set[str]]] = {
    "reference": {"packages": {"torch"}, "own": {"other"}, "later": set()},
    "kernel": {"packages": {"torch", "cutlass", "cuda", "triton", "tvm_ffi", "lldecode.jit"}, "own": {"kernel", "other"}, "later": set()},
    "op": {"packages": {"torch", "lldecode.plan"}, "own": {"reference", "other"}, "later": {"kernel", "lldecode.jit"}},
    "vllm": {"packages": {"torch", "lldecode.feature", "lldecode.warmup"}, "own": {"op", "vllm", "other"}, "later": {"vllm"}},
    "tune": {"packages": {"torch", "lldecode.plan", "lldecode.tune"}, "own": {"op", "other"}, "later": {"kernel", "vllm"}},
    "__init__": {"packages": set(), "own": {"reference", "op", "other"}, "later": set()},
    "other": {"packages": {"torch", "lldecode.plan"}, "own": {"other"}, "later": set()},
}
# What lldecode imports inside functions only: vLLM hosts it, a feature that compiles kernels brings its DSL.
BROUGHT = {"cutlass", "triton", "tvm_ffi", "vllm"}
DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi", "pynvml": "nvidia-ml-py"}
# Needed without an import: CuTe DSL compiles through TVM FFI.
IMPLIED = {"nvidia-cutlass-dsl": "apache-tvm-ffi"}


@dataclass(frozen=True)
class Import:
    """One imported module; `when` is "import", "call" (inside a function) or "typing" (under ``if TYPE_CHECKING``)."""

    module: str
    line: int
    when: str


def imports(path: Path, package: str) -> Iterator[Import]:
    """Every import statement of the file, which belongs to the top-level `package`; ``from . import x`` is made absolute."""
    submodules = {p.stem for p in path.parent.glob("*.py")}

    def visit(node: ast.AST, when: str) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                yield from (Import(a.name, node.lineno, when) for a in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = ".".join(filter(None, [package if level else "", module]))
                for a in names:
                    deeper = (base == package and a.name in submodules) or base == "lldecode"
                    yield Import(f"{base}.{a.name}" if deeper else base, node.lineno, when)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), body=body, orelse=orelse):
                for statement in body:
                    yield from visit(statement, "typing")
                for statement in orelse:
                    yield from visit(statement, when)
            case _:
                inside = "call" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else when
                for child in ast.iter_child_nodes(node):
                    yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text()), "import")


def code_lines(source: str) -> int:
    """Lines of `source` that hold code: not blank, not only a comment, not part of a docstring."""
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                lines.difference_update(range(first, last + 1))
    return len(lines)


def role(stem: str) -> str:
    """Of a module in a feature: its file's name, with ``kernel*`` one role, ``vllm*`` one role, every name without a law "other"."""
    for several in ("kernel", "vllm"):
        if stem.startswith(several):
            return several
    return stem if stem in LAW else "other"


@dataclass(frozen=True)
class Member:
    """A package of the workspace: `name` is its folder's name, ``integration`` for lldecode itself."""

    dir: Path
    project: dict[str, Any]

    @property
    def name(self) -> str:
        return self.dir.name

    @property
    def dist(self) -> str:
        return "lldecode" if self.name == "integration" else f"lldecode-{self.name}"

    @property
    def package(self) -> str:
        return self.dist.replace("-", "_")

    @property
    def sources(self) -> list[Path]:
        return sorted((self.dir / "src" / self.package).rglob("*.py"))

    @property
    def requirements(self) -> dict[str, Requirement]:
        return {canonicalize_name(r.name): r for r in map(Requirement, self.project.get("dependencies", []))}


def members(root: Path) -> dict[str, Member]:
    """The workspace's packages by folder name, ``integration`` first."""
    folders = [root / "integration", *sorted(p.parent for p in root.glob("packages/*/pyproject.toml"))]
    return {d.name: Member(d, tomllib.loads((d / "pyproject.toml").read_text())["project"]) for d in folders}


def check(root: Path) -> list[str]:
    """Every violation in the workspace at `root`, as ``path[:line]: what``."""
    found = members(root)
    out = [f"{d}/pyproject.toml: expected the file" for d in sorted(root.glob("packages/*/")) if d.name not in found]
    for member in found.values():
        out += _files(root, member) + _names(member) + _dependencies(member, found)
        out += _integration_imports(member, found) if member.name == "integration" else _feature_imports(member) + _size(member)
    return [line.removeprefix(f"{root}/") for line in out + _extras(found)]


def _files(root: Path, member: Member) -> list[str]:
    src = Path("src") / member.package
    wanted = [Path(p) for p in ("pyproject.toml", "README.md", "CHANGELOG.md", "changelog.d/.gitignore", "tests")] + [src / "__init__.py"]
    if member.name != "integration":
        wanted.append(src / "vllm.py")
        stems = {p.stem for p in member.sources}
        if kernels := {s for s in stems if role(s) == "kernel"}:
            wanted.append(Path("bench/bench.py"))
        # A feature that only chooses among vLLM's own paths has no operator.
        if kernels or stems & {"op", "reference"} or any("torch.library" in p.read_text() for p in member.sources):
            wanted += [src / "reference.py", src / "op.py"]
    out = [f"{member.dir / p}: expected the file" for p in wanted if not (member.dir / p).exists()]
    if not list((member.dir / "tests").glob("test_*.py")):
        out.append(f"{member.dir}/tests: expected test_*.py")
    readme = root / "README.md"
    if member.name != "integration" and f"(packages/{member.name}/README.md)" not in readme.read_text():
        out.append(f"{readme}: expected a link to packages/{member.name}/README.md")
    return out


def _names(member: Member) -> list[str]:
    """Folder, distribution, module, entry point, operator and flag carry one noun."""
    project = member.dir / "pyproject.toml"
    out = []
    if member.project["name"] != member.dist:
        out.append(f"{project}: name: expected {member.dist!r}, got {member.project['name']!r}")
    folders = sorted(p.name for p in (member.dir / "src").iterdir() if p.is_dir()) if (member.dir / "src").is_dir() else []
    if folders != [member.package]:
        out.append(f"{member.dir}/src: expected [{member.package!r}], got {folders}")
    if member.name == "integration":
        return out
    points = member.project.get("entry-points", {}).get("lldecode.features", {})
    expected = {member.name: f"{member.package}.vllm:FEATURE"}
    if points != expected:
        out.append(f"{project}: lldecode.features: expected {expected}, got {points}")
    noun = member.name.replace("-", "_")
    for path in member.sources:
        for op in re.findall(r'"lldecode::(\w+)"', path.read_text()):
            if op != noun and not op.startswith(f"{noun}_"):
                out.append(f"{path}: operator: expected lldecode::{noun}[_...], got lldecode::{op}")
    readme = member.dir / "README.md"
    flag = f"LLDECODE_{noun.upper()}"
    if readme.exists() and not re.search(rf"\b{flag}\b", readme.read_text()):
        out.append(f"{readme}: expected the flag {flag}")
    return out


def _size(member: Member) -> list[str]:
    total = sum(code_lines(p.read_text()) for p in member.sources)
    return [f"{member.dir}/src: expected at most {MAX_CODE_LINES} code lines, got {total}"] if total > MAX_CODE_LINES else []


def _third_party(found: Import, package: str) -> str | None:
    """Top-level name of a module that is neither Python's nor this package's."""
    top = found.module.split(".")[0]
    return None if top in sys.stdlib_module_names or top == package else top


def _feature_imports(member: Member) -> list[str]:
    out = []
    for path in member.sources:
        me = role(path.stem)
        law = LAW[me]
        for found in imports(path, member.package):
            if found.when == "typing":
                continue
            top = _third_party(found, member.package)
            if top is not None:
                key = found.module if top == "lldecode" else top
                now = any(key == p or key.startswith(f"{p}.") for p in law["packages"])
            elif found.module.split(".")[0] == member.package:
                key = role(found.module.split(".")[1]) if "." in found.module else "op"
                now = key in law["own"]
            else:
                continue
            if now or (found.when == "call" and key in law["later"]):
                continue
            where = "inside functions only" if key in law["later"] else "not at all"
            out.append(f"{path}:{found.line}: {me} imports {found.module}: expected {where}")
    return out


def _integration_imports(member: Member, found: dict[str, Member]) -> list[str]:
    features = {m.package for m in found.values() if m is not member}
    out = []
    for path in member.sources:
        for i in imports(path, member.package):
            top = i.module.split(".")[0]
            if top in features:
                out.append(f"{path}:{i.line}: imports the feature {i.module}: expected not at all")
            elif top in BROUGHT and i.when == "import":
                out.append(f"{path}:{i.line}: imports {i.module}: expected inside functions only")
    return out


def _dependencies(member: Member, found: dict[str, Member]) -> list[str]:
    """The declared dependencies are the imported ones, and ranges between members are ranges."""
    project = member.dir / "pyproject.toml"
    brought = BROUGHT if member.name == "integration" else {"vllm"}
    used = {
        DISTRIBUTIONS.get(top, canonicalize_name(top))
        for path in member.sources
        for i in imports(path, member.package)
        if i.when != "typing" and (top := _third_party(i, member.package)) is not None and not (i.when == "call" and top in brought)
    }
    declared = set(member.requirements)
    allowed = used | {IMPLIED[d] for d in used & set(IMPLIED)}
    out = [f"{project}: dependencies: expected {d}, which is imported" for d in sorted(used - declared)]
    out += [f"{project}: dependencies: {d} is declared and not imported" for d in sorted(declared - allowed)]

    versions = {m.dist: m.project["version"] for m in found.values()}
    optional = member.project.get("optional-dependencies", {})
    for r in [*member.requirements.values(), *(Requirement(x) for extra in optional.values() for x in extra)]:
        if r.name in versions and r.name != member.dist:
            operators = sorted(s.operator for s in r.specifier)
            if operators != ["<", ">="] or versions[r.name] not in r.specifier:
                out.append(f"{project}: {r}: expected a range >=A,<B that holds {versions[r.name]}")
    return out


def _extras(found: dict[str, Member]) -> list[str]:
    """lldecode has one extra per feature, ``all`` of them, and ``vllm``."""
    integration = found["integration"]
    project = integration.dir / "pyproject.toml"
    extras = integration.project.get("optional-dependencies", {})
    features = sorted(m.name for m in found.values() if m is not integration)
    out = []
    if sorted(extras) != sorted([*features, "all", "vllm"]):
        out.append(f"{project}: extras: expected {[*features, 'all', 'vllm']}, got {list(extras)}")
    for name in features:
        if [Requirement(x).name for x in extras.get(name, [])] != [found[name].dist]:
            out.append(f"{project}: extra {name}: expected {found[name].dist} alone, got {extras.get(name)}")
    if sorted({e for x in extras.get("all", []) for e in Requirement(x).extras}) != features:
        out.append(f"{project}: extra all: expected lldecode[{','.join(features)}], got {extras.get('all')}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    violations = check(parser.parse_args().root.resolve())
    print("\n".join(violations), end="\n" if violations else "")
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
