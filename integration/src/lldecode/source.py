"""Source of a patch target, found without importing it: hashes, locations, and the hash of an installed package."""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import pathlib
import sys
import textwrap

from lldecode.feature import ABSENT


class NotFoundError(LookupError):
    """The module or class of a target does not exist."""


@dataclasses.dataclass(frozen=True)
class Definition:
    """Where a target is defined.

    Attributes:
        hash: first 16 hex digits of the SHA-256 of its dedented source lines, decorators included; :data:`ABSENT` where
            the module or class exists and does not define the attribute.
        module: the defining module, which differs from the target's where the target is a ``from ... import`` copy.
        file: its source file.
        function: whether it is a ``def``.
        decorated: whether it has decorators.
    """

    hash: str
    module: str
    file: str
    function: bool
    decorated: bool


def source_file(module: str) -> pathlib.Path:
    """The ``.py`` file of a module, located from its top-level package alone, so that no parent package is imported.

    Raises:
        NotFoundError: there is no such module, or it has no Python source.
    """
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a stand-in put into sys.modules by hand has no spec
        spec = None
    if spec is None:
        raise NotFoundError(f"{top} is not installed")
    if not rest:
        if spec.origin is None or not spec.origin.endswith(".py"):
            raise NotFoundError(f"{module} has no Python source")
        return pathlib.Path(spec.origin)
    for root in spec.submodule_search_locations or ():
        base = pathlib.Path(root, *rest)
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                return file
    raise NotFoundError(f"{module} does not exist in the installed {top}")


@functools.cache
def _parse(file: pathlib.Path, _mtime_ns: int) -> tuple[ast.Module, list[str]]:
    try:
        text = file.read_text(encoding="utf-8")
        return ast.parse(text), text.split("\n")  # the line breaks that ast counts
    except (OSError, SyntaxError, ValueError) as e:
        raise NotFoundError(f"{file} cannot be read: {e}") from e


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a module or class body, those inside if/try/with blocks included."""
    out = []
    for node in body:
        out.append(node)
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                out += _statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            out += _statements(handler.body)
    return out


def _binds(node: ast.stmt, name: str) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name == name
        case ast.Assign():
            return any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
        case ast.AnnAssign() | ast.AugAssign():
            return isinstance(node.target, ast.Name) and node.target.id == name
        case ast.ImportFrom() | ast.Import():
            return any((a.asname or a.name) == name for a in node.names)
    return False


def definition(target: str) -> Definition:
    """Locate and hash what ``"module:name"`` or ``"module:Class.attr"`` names, following ``from ... import``.

    Raises:
        NotFoundError: the module, or a class on the way to the attribute, does not exist.
    """
    module, _, attr = target.partition(":")
    file = source_file(module)
    tree, lines = _parse(file, file.stat().st_mtime_ns)
    *classes, name = attr.split(".")
    body = tree.body
    for i, cls in enumerate(classes):
        found = [n for n in _statements(body) if _binds(n, cls)]
        if found and isinstance(found[-1], ast.ImportFrom):
            return definition(f"{_imported(found[-1], cls, module, file)}.{'.'.join([*classes[i + 1 :], name])}")
        if not found or not isinstance(found[-1], ast.ClassDef):
            raise NotFoundError(f"{module} defines no class {cls}")
        body = found[-1].body
    nodes = [n for n in _statements(body) if _binds(n, name)]
    if not nodes:
        return Definition(ABSENT, module, str(file), False, False)
    last = nodes[-1]
    if isinstance(last, ast.ImportFrom):
        return definition(_imported(last, name, module, file))
    text = "\n".join(_segment(n, lines) for n in nodes)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    function = isinstance(last, ast.FunctionDef | ast.AsyncFunctionDef)
    return Definition(digest, module, str(file), function, bool(getattr(last, "decorator_list", ())))


def _segment(node: ast.stmt, lines: list[str]) -> str:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    return textwrap.dedent("\n".join(line.rstrip() for line in lines[first - 1 : node.end_lineno]))


def _imported(node: ast.ImportFrom, name: str, module: str, file: pathlib.Path) -> str:
    original = next(a.name for a in node.names if (a.asname or a.name) == name)
    origin = node.module or ""
    if node.level:
        package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
        origin = ".".join([*package[: len(package) - node.level + 1], *([origin] if origin else [])])
    return f"{origin}:{original}"


def package_sha(package: str) -> str:
    """First 12 hex digits of the SHA-256 over the ``.py`` files of an installed package, names included."""
    root = source_file(package).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def is_loaded(module: str) -> bool:
    """Whether the module is imported and has finished executing."""
    found = sys.modules.get(module)
    return found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False)
