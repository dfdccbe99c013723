import importlib
import importlib.metadata
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lldecode import registry, source
from lldecode.feature import ENTRY_POINT_GROUP, Feature, Patch, set_pdl

_serial = itertools.count()


class Host:
    """A throw-away package that stands in for vLLM."""

    def __init__(self, root: Path) -> None:
        self.name = f"fakehost{next(_serial)}"
        self.dir = root / self.name
        self.dir.mkdir()
        self.write("__init__", "")

    def write(self, module: str, text: str) -> None:
        (self.dir / f"{module}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    def load(self, module: str):
        return importlib.import_module(f"{self.name}.{module}")

    def target(self, rest: str) -> str:
        return f"{self.name}.{rest}"

    def patch(self, rest: str, wrap: Callable, *, order: int = 0, expects: frozenset[str] | None = None) -> Patch:
        target = self.target(rest)
        expects = frozenset({source.definition(target).hash}) if expects is None else expects
        return Patch(target, wrap, why="test", remove_when="never", expects=expects, order=order)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Host(tmp_path)
    yield made
    for name in [m for m in sys.modules if m.split(".")[0] == made.name]:
        del sys.modules[name]
    set_pdl(None)


@pytest.fixture
def feature() -> Callable[..., Feature]:
    return lambda name, *patches, **kw: Feature(name, "test", tuple(patches), **kw)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a feature package: a module and the dist-info with its entry point, on sys.path."""
    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    modules: list[str] = []

    def install(name: str, body: str, version: str = "0.1.0", module: str = "") -> None:
        module = module or "fake_" + name.replace("-", "_")
        modules.append(module)
        (root / f"{module}.py").write_text(textwrap.dedent(body))
        info = root / f"lldecode_{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lldecode-{module}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[lldecode.features]\n{name} = {module}:FEATURE\n")
        importlib.invalidate_caches()

    yield install
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def only_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the really installed features and every LLDECODE_ variable of the caller's environment."""

    real = importlib.metadata.entry_points

    def fakes(**select):
        return [e for e in real(**select) if select.get("group") != ENTRY_POINT_GROUP or e.module.startswith("fake_")]

    monkeypatch.setattr(importlib.metadata, "entry_points", fakes)
    monkeypatch.setattr(registry, "catalog", lambda: ["not-there"])
    for name in [k for k in os.environ if k.startswith("LLDECODE_")]:
        monkeypatch.delenv(name)
