"""Start a feature: copy tools/template to packages/NAME under that name, and say what comes next.

    python tools/new_feature.py NAME [--root ROOT]

NAME is kebab-case and one noun: folder, module, operator, flag and tag all carry it.
"""

import argparse
import re
from pathlib import Path

TEMPLATE = Path(__file__).parent / "template"

NEXT = """\
packages/{name} is a feature that patches nothing yet. Next:
 1. integration/pyproject.toml: the extra {name} = ["lldecode-{name}>=0.1,<0.2"], its name in the extra `all`,
    and lldecode-{name} = {{ workspace = true }} under [tool.uv.sources]; then `uv lock`.
 2. README.md: a row of the feature table that links packages/{name}/README.md.
 3. reference.py, then op.py and its tests; then kernel.py and bench/bench.py; then the patches in vllm.py.
 4. `uv run python tools/layout.py` says what is missing; `uv run python tools/isolated_tests.py {name}` runs its tests alone."""


def scaffold(name: str, root: Path) -> Path:
    """Copy the template to ``packages/<name>`` of the workspace at `root`.

    Raises:
        ValueError: `name` is not kebab-case, or taken.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(f"name: expected kebab-case, got {name!r}")
    out = root / "packages" / name
    if out.exists() or name in ("all", "vllm"):
        raise ValueError(f"name: {name} is taken")
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_dir() or "__pycache__" in source.parts:
            continue
        target = out / _renamed(str(source.relative_to(TEMPLATE)), name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_renamed(source.read_text(), name))
    return out


def _renamed(text: str, name: str) -> str:
    snake = name.replace("-", "_")
    return text.replace("example-noun", name).replace("example_noun", snake).replace("EXAMPLE_NOUN", snake.upper())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the workspace (default: this one)")
    args = parser.parse_args()
    try:
        scaffold(args.name, args.root)
    except ValueError as e:
        parser.error(str(e))
    print(NEXT.format(name=args.name))


if __name__ == "__main__":
    main()
