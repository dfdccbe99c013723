"""``lldecode doctor | flags | ablate | tune``."""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lldecode import ablate, flags, registry, tune

_COLOUR = {"on": "green", "refused": "red", "off": "yellow", "not installed": "dim"}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status: 0; 1 where a feature that is ``on`` cannot run or a check failed; 2 on bad input."""
    parser = argparse.ArgumentParser(prog="lldecode", description="Low-latency decode for DeepSeek-Sparse-Attention models in vLLM.")
    parser.add_argument("--version", action="version", version=f"lldecode {importlib.metadata.version('lldecode')}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what each feature would do in vLLM on this machine, and why")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    doctor.set_defaults(run=_doctor)
    check = commands.add_parser("flags", help="validate the flags and show where each value comes from")
    check.add_argument("--json", action="store_true", help="machine-readable")
    check.set_defaults(run=_flags)
    measure = commands.add_parser("ablate", help="time the same decode with none, each alone, each left out and all features")
    ablate.add_arguments(measure)
    measure.set_defaults(run=ablate.run)
    plans = commands.add_parser("tune", help="measure a model's small GEMMs on this GPU, and write the plans that the features use")
    tune.add_arguments(plans)
    plans.set_defaults(run=tune.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except flags.FlagError as e:
        print(f"lldecode: {e}", file=sys.stderr)
        return 2


def _flags(args: argparse.Namespace) -> int:
    points = registry.entry_points()
    settings = flags.read(os.environ, points, registry.catalog())
    rows = []
    for name in sorted({*points, *registry.catalog()}):
        if name not in points:
            rows.append({"feature": name, "variable": flags.env_name(name), "value": "off", "source": "not installed", "here": "off"})
            continue
        setting = settings.get(name)
        if setting is None:
            loaded = registry.load(points[name])
            setting = flags.Setting("auto" if isinstance(loaded, str) else loaded.default, "default")
        wanted, required = flags.selected(name, setting, os.environ)
        here = ("on" if required else "auto") if wanted else "off"
        rows.append({"feature": name, "variable": flags.env_name(name), "value": setting.value, "source": setting.source, "here": here})
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table("feature", "variable", "value", "set by", "this replica")
    for row in rows:
        table.add_row(*row.values())
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    ctx = registry.cuda_context()
    report = registry.describe(registry.survey(ctx, os.environ), ctx)
    fails = any(f["state"] == "refused" and f["required"] for f in report["features"])
    if args.json:
        print(json.dumps(report, indent=2))
        return int(fails)
    console = Console(highlight=False, soft_wrap=True)
    gpus = ", ".join(f"{major}.{minor}" for major, minor in report["capabilities"]) or "none"
    found = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    console.print(f"lldecode {report['lldecode']} with {found}\nGPU capability: {gpus}\nfingerprint: {report['fingerprint']}")
    for f in report["features"]:
        console.print(
            f"\n[bold]{f['name']}[/] {f['version']}: [{_COLOUR[f['state']]}]{f['state']}[/]"
            + (f": {escape(f['reason'])}" if f["reason"] else "")
        )
        if f["summary"]:
            console.print(f"  {escape(f['summary'])}")
        if f["state"] != "not installed":
            console.print(f"  {flags.env_name(f['name'])}: {f['flag']} ({f['source']})")
        for p in f["patches"]:
            console.print(escape(f"  {p['drift'] or p['target'] + ': as expected'}; {p['why']}"))
    if fails:
        console.print("\nvLLM would fail to start: a feature that is on is refused.", style="red")
    return int(fails)
