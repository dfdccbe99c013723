from pathlib import Path

import pytest

from new_feature import scaffold

NAME = "sample-noun"
INTEGRATION = f"""\
[project]
name = "lldecode"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = []

[project.optional-dependencies]
{NAME} = ["lldecode-{NAME}>=0.1,<0.2"]
all = ["lldecode[{NAME}]"]
vllm = ["vllm==0.26.0"]

[build-system]
requires = ["uv_build>=0.9,<0.14"]
build-backend = "uv_build"

[tool.uv.sources]
lldecode-{NAME} = {{ workspace = true }}
"""
ROOT = """\
[project]
name = "sample-workspace"
version = "0"
requires-python = ">=3.11"

[dependency-groups]
dev = ["pytest", "pytest-xdist"]

[tool.uv.workspace]
members = ["integration", "packages/*"]
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace in the repository's layout: a hollow lldecode and one feature from the template."""
    root = tmp_path / "workspace"
    files = {
        "pyproject.toml": ROOT,
        "README.md": f"[{NAME}](packages/{NAME}/README.md)\n",
        "integration/pyproject.toml": INTEGRATION,
        "integration/README.md": "",
        "integration/CHANGELOG.md": "# Changelog\n",
        "integration/changelog.d/.gitignore": "!.gitignore\n",
        "integration/src/lldecode/__init__.py": "",
        "integration/src/lldecode/feature.py": "",
        "integration/tests/test_nothing.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    scaffold(NAME, root)
    return root
