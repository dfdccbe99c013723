"""Feature flags: where a value comes from, and what it means for this replica.

First hit wins: ``LLDECODE_OFF`` > ``LLDECODE_<FEATURE>`` > ``LLDECODE_FEATURES`` > the TOML file named by ``LLDECODE_CONFIG`` >
the feature's default.
"""

import dataclasses
import hashlib
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STATES = "off, auto, on, or a share like 25%"
OPTIONS = frozenset({"LLDECODE_SKINNY_GEMM_LAYERS", "LLDECODE_MTP_SPEC_SHARE", "LLDECODE_MTP_SPEC_LOCAL_ARGMAX"})
"""Variables that a feature reads by itself; they may change what a model compiles to."""
RESERVED = frozenset({"LLDECODE_OFF", "LLDECODE_FEATURES", "LLDECODE_CONFIG", "LLDECODE_REPLICA", "LLDECODE_CACHE_DIR"}) | OPTIONS
"""Variables that are no feature's flag."""

_SHARE = re.compile(r"(\d{1,2}|100)%")


class FlagError(ValueError):
    """An unknown name or value, or a file that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A flag's value (``off``, ``auto``, ``on`` or ``NN%``) and where it was set."""

    value: str
    source: str


def env_name(feature: str) -> str:
    """``ll-bf16-router`` -> ``LLDECODE_LL_BF16_ROUTER``."""
    return "LLDECODE_" + feature.replace("-", "_").upper()


def read(environ: Mapping[str, str], installed: Iterable[str], catalog: Iterable[str]) -> dict[str, Setting]:
    """What the user set, for each installed feature that has a setting; the others take their default.

    Args:
        environ: the process environment.
        installed: names of the installed features.
        catalog: names that exist and may not be installed: for these any value but ``off`` is an error that says how to install.

    Raises:
        FlagError: an unknown variable, name or value, listing the known ones, or an unreadable or malformed file.
    """
    known = sorted(set(installed))
    off = [n.strip().lower() for n in environ.get("LLDECODE_OFF", "").split(",")]
    if "all" in off:  # whatever else is wrong: this must always start stock
        return {name: Setting("off", "LLDECODE_OFF") for name in known}
    parser = _Parser(known, sorted(set(catalog) | set(known)))
    names = {env_name(f): f for f in parser.catalog}
    ours = {k: v.strip() for k, v in environ.items() if k.startswith("LLDECODE_") and v.strip()}
    if unknown := sorted(ours.keys() - RESERVED - names.keys()):
        raise FlagError(f"{unknown[0]}: unknown variable; known: {', '.join(sorted(RESERVED | names.keys()))}")

    found: dict[str, Setting] = {}
    layers = [
        parser.off(ours.get("LLDECODE_OFF", "")),
        {names[k]: parser.setting(names[k], v, k) for k, v in sorted(ours.items()) if k in names},
        parser.listed(ours.get("LLDECODE_FEATURES", "")),
        parser.file(ours.get("LLDECODE_CONFIG", "")),
    ]
    for layer in layers:
        for feature, setting in layer.items():
            found.setdefault(feature, setting)
    for feature, setting in found.items():
        if feature not in known and setting.value != "off":
            raise FlagError(f"{setting.source}: {feature} is not installed (package lldecode-{feature})")
    return {f: s for f, s in found.items() if f in known}


def selected(feature: str, setting: Setting, environ: Mapping[str, str]) -> tuple[bool, bool]:
    """(apply it, fail at start where it cannot be applied) for this replica.

    ``NN%`` selects a replica by a hash of the feature's name and ``LLDECODE_REPLICA``, else the host name: stable over
    restarts, and raising the share keeps the replicas already selected. A selected replica is ``on``, the others ``off``.
    """
    if share := _SHARE.fullmatch(setting.value):
        replica = environ.get("LLDECODE_REPLICA", "").strip() or socket.gethostname()
        bucket = int.from_bytes(hashlib.sha256(f"{feature}\0{replica}".encode()).digest()[:8], "big") % 100
        on = bucket < int(share[1])
        return on, on
    return setting.value != "off", setting.value == "on"


@dataclasses.dataclass(frozen=True)
class _Parser:
    known: list[str]
    catalog: list[str]

    def setting(self, feature: str, value: Any, where: str) -> Setting:
        if feature not in self.catalog:
            raise FlagError(f"{where}: unknown feature {feature!r}; known: {', '.join(self.catalog) or 'none installed'}")
        text = str(value).strip().lower()
        if text == "shadow":
            raise FlagError(f"{where}: shadow is not available yet for {feature}; expected {STATES}")
        if not isinstance(value, str) or (text not in ("off", "auto", "on") and not _SHARE.fullmatch(text)):
            raise FlagError(f"{where}: expected {STATES} for {feature}, got {value!r}")
        return Setting(text, where)

    def off(self, text: str) -> dict[str, Setting]:
        return {n: self.setting(n, "off", "LLDECODE_OFF") for n in filter(None, (n.strip() for n in text.split(",")))}

    def listed(self, text: str) -> dict[str, Setting]:
        out: dict[str, Setting] = {}
        for item in filter(None, (i.strip() for i in text.split(","))):
            name, _, value = item.partition("=")
            if name.strip() in out:
                raise FlagError(f"LLDECODE_FEATURES: {name.strip()} is set twice")
            out[name.strip()] = self.setting(name.strip(), value if "=" in item else "on", "LLDECODE_FEATURES")
        return out

    def file(self, path: str) -> dict[str, Setting]:
        if not path:
            return {}
        where = f"LLDECODE_CONFIG={path}"
        try:
            data = tomllib.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise FlagError(f"{where}: {e}") from e
        table = data.pop("features", {})
        if data or not isinstance(table, dict):
            raise FlagError(f"{where}: expected one table [features] of name = value, got {sorted(data) or type(table).__name__}")
        return {name: self.setting(name, value, where) for name, value in table.items()}
