"""Write the measured figures of README.md and packages/*/README.md from the results CSVs, or check that they are current.

    uv run python tools/figures.py [--check]

A block between `<!-- figures: NAME -->` and `<!-- end figures -->` is replaced whole, so no figure is typed by hand. NAME is a feature,
for what its kernels are compared with, or a file in integration/bench/results, for what `lldecode ablate` measured.
"""

import argparse
import csv
import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from lldecode.bench import Row, natural, read_csv
from lldecode.plan import SITUATIONS, situation

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(<!-- end figures -->)", re.DOTALL)
ENGINE = Path("integration/bench/results")


def results(feature: str, root: Path = ROOT) -> list[Row]:
    """Every measured row of a feature, all GPUs."""
    files = sorted((root / "packages" / feature / "bench" / "results").glob("*.csv"))
    return [row for file in files for row in read_csv(file)]


def summary(rows: Iterable[Row]) -> str:
    """Markdown: for each GPU and peer, how many times faster lldecode is than it over the cases that both ran.

    Cases that end in another situation than the chain (``lldecode.plan.SITUATIONS``) are summarized apart.
    """
    by: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by.setdefault((row.gpu, row.provider), {})[row.case] = row
    lines = ["| GPU | peer | cases | geometric mean | least | most |", "|---|---|---|---|---|---|"]
    for (gpu, provider), theirs in sorted(by.items()):
        ours = by.get((gpu, "lldecode"), {})
        for name in SITUATIONS:
            cases = [case for case in theirs.keys() & ours.keys() if situation(case) == name]
            if provider == "lldecode" or not cases:
                continue
            ratios = {case: theirs[case].us_p50 / ours[case].us_p50 for case in cases}
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            (low, low_case), (high, high_case) = (f((v, k) for k, v in ratios.items()) for f in (min, max))
            peer = provider if name == "chain" else f"{provider}, {name}"
            lines.append(f"| {gpu} | {peer} | {len(ratios)} | {mean:.2f}x | {low:.2f}x ({low_case}) | {high:.2f}x ({high_case}) |")
    if len(lines) == 2:
        return "Not measured yet.\n"
    for gpu in sorted({gpu for gpu, _ in by}):
        compared = {case for (g, provider), rows in by.items() if g == gpu and provider != "lldecode" for case in rows}
        single = [row.us_p50 for case, row in by.get((gpu, "lldecode"), {}).items() if case not in compared]
        if single:
            lines += ["", f"{gpu}: {len(single)} more cases without a peer, {min(single):.2f} to {max(single):.2f} us."]
    any_row = max((r for rows in by.values() for r in rows.values()), key=lambda r: natural(r.utc))
    lines.append("")
    lines.append(f"Speedup at p50; source {any_row.src_sha}, torch {any_row.torch}, measured {any_row.utc[:10]}.")
    return "\n".join(lines) + "\n"


def ablation(rows: Iterable[Mapping[str, str]]) -> str:
    """Markdown: by combination and batch size the p50 of an ablation, and by how much it differs from no feature's."""
    by: dict[str, dict[str, Mapping[str, str]]] = {}
    for row in rows:
        by.setdefault(row["combo"], {})[row["batch"]] = row
    sizes = sorted(by["none"], key=int)

    def cell(row: Mapping[str, str]) -> str:
        if not row["us_p50"]:
            return "not timed"
        us, stock = float(row["us_p50"]), float(by["none"][row["batch"]]["us_p50"])
        change = "" if row["combo"] == "none" else f" ({(us / stock - 1) * 100:+.1f} %)"
        return f"{us:,.0f}{change}{'' if row['ok'] == 'True' else ', tokens differ'}"

    (unit,) = {row["unit"] for sized in by.values() for row in sized.values()}
    lines = [f"| features | {' | '.join(f'batch {n}' for n in sizes)} |", "|---" * (1 + len(sizes)) + "|"]
    for combo, sized in by.items():
        if any(row["us_p50"] for row in sized.values()):
            label = next(iter(sized.values()))["features"].replace(",", " + ") or combo
            lines.append(f"| {label} | {' | '.join(cell(sized[n]) for n in sizes)} |")
    last = by["none"][sizes[0]]
    return "\n".join([*lines, "", f"P50 in {unit}; {last['gpu']}, vLLM {last['vllm']}, measured {last['utc'][:10]}."]) + "\n"


def figures(name: str, root: Path = ROOT) -> str:
    if not name.endswith(".csv"):
        return summary(results(name, root))
    with (root / ENGINE / name).open(newline="") as f:
        return ablation(csv.DictReader(f))


def render(text: str, root: Path = ROOT) -> str:
    """`text` with every block rewritten from the CSVs."""
    return BLOCK.sub(lambda m: m[1] + figures(m[2], root) + m[3], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a file is out of date")
    args = parser.parse_args()
    stale = []
    for file in [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]:
        text = file.read_text()
        if (made := render(text)) != text:
            stale.append(str(file.relative_to(ROOT)))
            if not args.check:
                file.write_text(made)
    print(f"out of date: {', '.join(stale)}" if stale and args.check else f"rewritten: {', '.join(stale) or 'nothing'}")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
