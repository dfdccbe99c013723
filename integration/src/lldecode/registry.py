"""Installed features, their flags, and what becomes of each here: shared by the plugin, the CLI and ablate."""

import dataclasses
import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

from lldecode import cache_key, flags, source
from lldecode.engine import drift, failure, refusal
from lldecode.feature import ENTRY_POINT_GROUP, Context, Feature, Patch

_PROBED_DISTRIBUTIONS = ("apache-tvm-ffi", "nvidia-cutlass-dsl", "torch", "triton", "vllm")


def catalog() -> list[str]:
    """Names of the features that this release of lldecode has an extra for, installed or not."""
    extras = importlib.metadata.metadata("lldecode").get_all("Provides-Extra") or []
    return sorted(set(extras) - {"all", "vllm"})


class _Clash(importlib.metadata.EntryPoint):
    """A name that several distributions offer; its value is these."""

    def load(self) -> Any:
        raise ImportError(f"{self.name}: expected one distribution that offers it, got {self.value}")


def entry_points(group: str = ENTRY_POINT_GROUP) -> dict[str, importlib.metadata.EntryPoint]:
    """What is installed in a group (the features), not loaded: a feature that the user set off is never imported.

    A name that several distributions offer is there once, and fails to load with their names.
    """
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=group):
        found.setdefault(point.name, []).append(point)
    return {name: points[0] if len(points) == 1 else _Clash(name, _distributions(points), group) for name, points in found.items()}


def _distributions(points: list[importlib.metadata.EntryPoint]) -> str:
    return ", ".join(sorted(f"{p.dist.name} {p.dist.version}" if p.dist else p.value for p in points))


def versions() -> dict[str, str]:
    """Installed versions of the distributions that probes and ranges look at."""
    out = {}
    for name in _PROBED_DISTRIBUTIONS:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def load(entry_point: importlib.metadata.EntryPoint) -> Feature | str:
    """The feature, or why its package cannot be loaded."""
    try:
        feature = entry_point.load()
    except BaseException as e:  # whatever a broken package raises at import must not take the host down
        return f"failed to import: {failure(e)}"
    if not isinstance(feature, Feature) or feature.name != entry_point.name:
        return f"{entry_point.value}: expected a Feature named {entry_point.name!r}, got {feature!r}"
    if other := sorted({p.host for p in feature.patches} - {"vllm", "lldecode"}):
        return f"{entry_point.value}: expected patches that apply in vllm or lldecode (Patch.host), got {other[0]}"
    return feature


@dataclasses.dataclass(frozen=True)
class Status:
    """What becomes of one feature in this process.

    Attributes:
        state: ``on``, ``off``, ``refused`` (asked for and cannot be applied) or ``not installed``.
        reason: why not, where it is refused; what decided, where it is off.
        required: a refusal fails the start.
        feature: None where the user set it off, or its package cannot be loaded.
    """

    name: str
    setting: flags.Setting
    state: str
    reason: str = ""
    required: bool = False
    version: str = ""
    package: str = ""
    feature: Feature | None = None


def survey(ctx: Context, environ: Mapping[str, str], host: str = "vllm") -> list[Status]:
    """Resolve every flag, load what is not off, and say what becomes of each feature. Changes nothing.

    Raises:
        flags.FlagError: see :func:`lldecode.flags.read`.
    """
    points = entry_points()
    settings = flags.read(environ, points, catalog())
    return [_status(p, settings.get(name), ctx, environ, host) for name, p in sorted(points.items())] + [
        Status(name, flags.Setting("off", ""), "not installed") for name in catalog() if name not in points
    ]


def _status(
    point: importlib.metadata.EntryPoint, setting: flags.Setting | None, ctx: Context, environ: Mapping[str, str], host: str
) -> Status:
    base = Status(point.name, setting or flags.Setting("auto", "default"), "off", "", False, point.dist.version if point.dist else "")
    if base.setting.value == "off":
        return dataclasses.replace(base, reason=f"set by {base.setting.source}")
    loaded = load(point)
    if isinstance(loaded, Feature):
        default = setting or flags.Setting(loaded.default, "default")
        base = dataclasses.replace(base, setting=default, package=point.module.split(".")[0], feature=loaded)
    wanted, required = flags.selected(base.name, base.setting, environ)
    if not wanted:
        why = "off by default" if base.setting.value == "off" else f"{base.setting.value} does not select this replica"
        return dataclasses.replace(base, reason=why)
    reason = loaded if isinstance(loaded, str) else refusal(loaded, dataclasses.replace(ctx, required=required), host)
    if host == "vllm" and not reason:
        reason = next((r for p in cache_key.feature(str).patches if (r := drift(p))), None)
    allowed = environ.get("VLLM_PLUGINS")
    if host == "vllm" and not reason and allowed is not None and "lldecode" not in allowed.split(","):
        reason = f"VLLM_PLUGINS: expected lldecode among the plugins that vLLM loads, got {allowed!r}"
    return dataclasses.replace(base, state="refused" if reason else "on", reason=reason or "", required=required)


def fingerprint(statuses: list[Status]) -> str:
    """12 hex digits over every feature that is on, with its version and source, and the options of features; ``none`` where none is on."""
    on = sorted(f"{s.name}={s.version}:{source.package_sha(s.package)}" for s in statuses if s.state == "on")
    options = [f"{name}={os.environ.get(name, '').strip()}" for name in sorted(flags.OPTIONS)] + [f"pdl off: {says_no_pdl(statuses)}"]
    return hashlib.sha256("\n".join(on + options).encode()).hexdigest()[:12] if on else "none"


def says_no_pdl(statuses: list[Status]) -> bool:
    """A user's "off" is for every kernel; a kill switch, or a share that leaves this replica out, is as if pdl were not installed."""
    stock = ("default", "LLDECODE_OFF")
    return any((s.name, s.state, s.setting.value) == ("pdl", "off", "off") and s.setting.source not in stock for s in statuses)


def cuda_context() -> Context:
    """Context of this process through torch.cuda, which it initialises: for the CLI, never for the plugin."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Context(tuple(torch.cuda.get_device_capability(i) for i in range(count)), versions())


def describe(statuses: list[Status], ctx: Context, host: str = "vllm") -> dict[str, Any]:
    """The JSON of ``lldecode doctor``."""
    return {
        "lldecode": importlib.metadata.version("lldecode"),
        "versions": dict(ctx.versions),
        "capabilities": [list(c) for c in ctx.capabilities],
        "replica": os.environ.get("LLDECODE_REPLICA") or None,
        "fingerprint": fingerprint(statuses),
        "features": [
            {
                "name": s.name,
                "version": s.version,
                "summary": s.feature.summary if s.feature else "",
                "flag": s.setting.value,
                "source": s.setting.source,
                "state": s.state,
                "reason": s.reason,
                "required": s.required,
                "superseded_by": s.feature.superseded_by if s.feature else "",
                "patches": [_describe_patch(p) for p in (s.feature.patches if s.feature else ()) if p.host == host],
            }
            for s in statuses
        ],
    }


def _describe_patch(patch: Patch) -> dict[str, Any]:
    try:
        found = source.definition(patch.target).hash
    except source.NotFoundError as e:
        found = str(e)
    return {
        "target": patch.target,
        "why": patch.why,
        "remove_when": patch.remove_when,
        "expects": sorted(patch.expects),
        "found": found,
        "drift": drift(patch),
    }
