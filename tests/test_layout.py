import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import layout
from lldecode import registry
from lldecode.feature import Feature

ROOT = Path(__file__).parents[1]
FEATURES = [name for name in layout.members(ROOT) if name != "integration"]
SAMPLE = "packages/sample-noun"
SRC = f"{SAMPLE}/src/lldecode_sample_noun"


def test_this_workspace_obeys():
    assert layout.check(ROOT) == []


@pytest.mark.parametrize("name", FEATURES)
def test_the_installed_feature_carries_its_folders_name(name):
    feature = registry.load(importlib.metadata.entry_points(group="lldecode.features")[name])
    assert isinstance(feature, Feature), feature
    assert feature.name == name


def test_the_template_obeys(workspace):
    assert layout.check(workspace) == []


def replace(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new))

    return change


def append(path: str, text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with (root / path).open("a") as f:
            f.write(text)

    return change


def with_kernel(path: str, text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        write(f"{SRC}/kernel.py")(root)
        append(path, text)(root)

    return change


def remove(path: str) -> Callable[[Path], None]:
    return lambda root: (root / path).unlink()


def write(path: str, text: str = "") -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    return change


PYPROJECT, INTEGRATION = f"{SAMPLE}/pyproject.toml", "integration/pyproject.toml"
LLDECODE = "integration/src/lldecode/feature.py"
VIOLATIONS = {
    "no README": (remove(f"{SAMPLE}/README.md"), r"sample-noun/README\.md: expected the file"),
    "no CHANGELOG": (remove(f"{SAMPLE}/CHANGELOG.md"), r"sample-noun/CHANGELOG\.md: expected the file"),
    "no changelog.d": (remove(f"{SAMPLE}/changelog.d/.gitignore"), r"sample-noun/changelog\.d/\.gitignore: expected the file"),
    "no reference": (remove(f"{SRC}/reference.py"), r"reference\.py: expected the file"),
    "an operator without op.py": (
        lambda root: (root / SRC / "op.py").rename(root / SRC / "operator_.py"),
        r"op\.py: expected the file",
    ),
    "a kernel without a bench": (write(f"{SRC}/kernel_fast.py"), r"bench/bench\.py: expected the file"),
    "no pyproject": (write("packages/empty/README.md"), r"packages/empty/pyproject\.toml: expected the file"),
    "not in the README": (write("README.md"), r"README\.md: expected a link to packages/sample-noun/README\.md"),
    "no tests": (
        lambda root: [p.unlink() for p in (root / SAMPLE / "tests").glob("*.py")],
        r"sample-noun/tests: expected test_\*\.py",
    ),
    "another dist": (
        replace(PYPROJECT, 'name = "lldecode-sample-noun"', 'name = "lldecode-other"'),
        r"name: expected 'lldecode-sample-noun'",
    ),
    "another module": (write(f"{SAMPLE}/src/other/__init__.py"), r"src: expected \['lldecode_sample_noun'\], got"),
    "another entry point": (replace(PYPROJECT, "sample-noun = ", "other = "), r"lldecode\.features: expected"),
    "another operator": (
        replace(f"{SRC}/op.py", "lldecode::sample_noun", "lldecode::other"),
        r"expected lldecode::sample_noun\[_\.\.\.\], got",
    ),
    "another flag": (replace(f"{SAMPLE}/README.md", "LLDECODE_SAMPLE_NOUN", "LLDECODE_SAMPLE"), r"expected the flag LLDECODE_SAMPLE_NOUN"),
    "501 lines": (append(f"{SRC}/reference.py", "x = 1\n" * 500), r"expected at most 500 code lines, got 5\d\d"),
    "reference imports lldecode": (append(f"{SRC}/reference.py", "import lldecode.feature\n"), "reference imports lldecode.feature"),
    "reference imports op": (
        append(f"{SRC}/reference.py", "from lldecode_sample_noun import op\n"),
        "reference imports lldecode_sample_noun.op",
    ),
    "reference imports op relatively": (append(f"{SRC}/reference.py", "from . import op\n"), "reference imports lldecode_sample_noun.op"),
    "op imports a kernel": (with_kernel(f"{SRC}/op.py", "from lldecode_sample_noun import kernel\n"), "expected inside functions only"),
    "op imports a kernel under if": (
        with_kernel(f"{SRC}/op.py", "if torch:\n    from lldecode_sample_noun.kernel import x\n"),
        "expected inside functions only",
    ),
    "op imports the kernel cache": (
        append(f"{SRC}/op.py", "from lldecode import jit\n"),
        "op imports lldecode.jit: expected inside functions only",
    ),
    "op imports the tuner": (append(f"{SRC}/op.py", "import lldecode.tune\n"), "op imports lldecode.tune: expected not at all"),
    "a kernel imports a plan": (
        write(f"{SRC}/kernel.py", "from lldecode.plan import Plans\n"),
        "kernel imports lldecode.plan: expected not at all",
    ),
    "a tuner imports a kernel": (
        with_kernel(f"{SRC}/tune.py", "from lldecode_sample_noun import kernel\n"),
        "tune imports lldecode_sample_noun.kernel: expected inside functions only",
    ),
    "a tuner imports the harness": (write(f"{SRC}/tune.py", "from lldecode import bench\n"), r"tune imports lldecode\.bench"),
    "op imports a tuner": (
        lambda root: [write(f"{SRC}/tune.py")(root), append(f"{SRC}/op.py", "from lldecode_sample_noun import tune\n")(root)],
        "op imports lldecode_sample_noun.tune",
    ),
    "op imports vllm": (append(f"{SRC}/op.py", "def f():\n    import vllm\n"), "op imports vllm: expected not at all"),
    "kernel imports a flag": (
        write(f"{SRC}/kernel.py", "from lldecode import flags\n"),
        "kernel imports lldecode.flags: expected not at all",
    ),
    "kernel imports op": (write(f"{SRC}/kernel.py", "from lldecode_sample_noun.op import x\n"), "kernel imports lldecode_sample_noun.op"),
    "vllm at import": (append(f"{SRC}/vllm.py", "from vllm import envs\n"), "vllm imports vllm: expected inside functions only"),
    "vllm in a class body": (append(f"{SRC}/vllm.py", "class A:\n    import vllm.envs\n"), r"vllm imports vllm\.envs: expected inside"),
    "vllm imports a kernel": (
        with_kernel(f"{SRC}/vllm.py", "def f():\n    from lldecode_sample_noun import kernel\n"),
        "vllm imports .*kernel",
    ),
    "vllm imports the engine": (
        append(f"{SRC}/vllm.py", "def f():\n    from lldecode.engine import Engine\n"),
        r"vllm imports lldecode\.engine",
    ),
    "another feature": (append(f"{SRC}/vllm.py", "def f():\n    import lldecode_pdl\n"), "vllm imports lldecode_pdl: expected not at all"),
    "lldecode imports a feature": (
        append(LLDECODE, "def f():\n    import lldecode_sample_noun.op\n"),
        "imports the feature lldecode_sample_noun.op",
    ),
    "lldecode imports vllm": (append(LLDECODE, "import vllm\n"), "imports vllm: expected inside functions only"),
    "an undeclared import": (append(LLDECODE, "def f():\n    import rich\n"), "dependencies: expected rich, which is imported"),
    "a dependency that is not imported": (
        replace(INTEGRATION, "dependencies = []", 'dependencies = ["rich>=1"]'),
        "rich is declared and not imported",
    ),
    "a pin between members": (replace(PYPROJECT, "lldecode>=0.1,<0.2", "lldecode==0.1.0"), r"lldecode==0\.1\.0: expected a range"),
    "an open range between members": (replace(INTEGRATION, "noun>=0.1,<0.2", "noun>=0.1"), r"noun>=0\.1: expected a range"),
    "a range without the version": (
        replace(PYPROJECT, "lldecode>=0.1,<0.2", "lldecode>=0.2,<0.3"),
        r"expected a range >=A,<B that holds 0\.1\.0",
    ),
    "an extra for nothing": (replace(INTEGRATION, "vllm = ", "gone = []\nvllm = "), "extras: expected"),
    "not in all": (replace(INTEGRATION, "lldecode[sample-noun]", "lldecode[vllm]"), r"extra all: expected lldecode\[sample-noun\]"),
    "another extra": (
        replace(INTEGRATION, "lldecode-sample-noun>=0.1,<0.2", "rich"),
        "extra sample-noun: expected lldecode-sample-noun alone",
    ),
}


@pytest.mark.parametrize(("change", "expected"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_violation_is_found(workspace, change, expected):
    change(workspace)
    found = layout.check(workspace)
    assert any(re.search(expected, line) for line in found), found


ALLOWED = {
    "the DSL and the kernel cache in a kernel": {
        "kernel.py": "import cutlass, triton.language\nfrom lldecode.jit import Kernel\nfrom lldecode_sample_noun import kernel_common\n",
        "kernel_common.py": "",
    },
    "a kernel inside the CUDA body": {
        "op.py": "def cuda():\n    from lldecode.jit import NotWarm\n    from lldecode_sample_noun import kernel\n",
        "kernel.py": "import torch\n",
    },
    "a kernel for the type checker": {"op.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .kernel import Config\n"},
    "plans and a tuner": {
        "op.py": "from lldecode.plan import Gemm\nfrom lldecode_sample_noun import plan\n",
        "plan.py": "from lldecode.plan import Plans\n",
        "kernel.py": "",
        "tune.py": "from lldecode.plan import Gemm\nfrom lldecode.tune import Tuner\nfrom lldecode_sample_noun import op, plan\n"
        "def configs():\n    from lldecode_sample_noun.kernel import Config\n",
    },
    "a seam in several modules": {"vllm.py": "from lldecode_sample_noun import vllm_head\n", "vllm_head.py": "import lldecode.feature\n"},
    "a routing feature without an operator": {
        "vllm.py": "from lldecode.feature import Feature\nfrom lldecode_sample_noun.route import decide\n"
    },
}


@pytest.mark.parametrize("files", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_the_law_allows(workspace, files):
    if "vllm.py" in files:
        for name in ("op.py", "reference.py"):
            (workspace / SRC / name).unlink()
    for name, text in files.items():
        (workspace / SRC / name).write_text(text)
    assert [line for line in layout.check(workspace) if "imports" in line or "reference.py" in line] == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ("# comment\n\nx = 1  # why\n", 1),
        ('"""Module\n\ndocstring."""\n\n\ndef f():\n    """Docstring."""\n    return 1\n', 2),
        ("x = f(\n    1,\n\n    # why\n    2,\n)\n", 4),
        ('x = """text\n\nthat counts\n"""\n', 4),
        ('x = 1\n"""What x is."""\n', 1),
        ("x = 1; y = 2\n", 1),
    ],
)
def test_code_lines(source, lines):
    assert layout.code_lines(source) == lines
