"""The contract between a feature package and lldecode: plain data, plus the two things an adapter may ask at run time.

A feature package exposes one :class:`Feature` through the entry-point group ``lldecode.features``. The engine owns when
its patches are applied; the package owns what they do.
"""

import collections
import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

logger = logging.getLogger("lldecode")

ENTRY_POINT_GROUP = "lldecode.features"
ABSENT = "absent"
"""In :attr:`Patch.expects`: the target class or module does not define the attribute; the patch adds it."""

RUN = ((9, 0),)
"""Compute capabilities of the GPUs that the features have run on; for others they are just compiled."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SHA = re.compile(r"[0-9a-f]{16}")


def _versions(capabilities: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in capabilities)


@dataclasses.dataclass(frozen=True)
class Context:
    """What a probe may look at. Built without touching CUDA.

    Attributes:
        capabilities: compute capability (major, minor) of each visible GPU; empty where there is none.
        versions: installed version of each distribution a probe may ask for; a missing key is a missing distribution.
        required: the user set the flag to ``on`` (or a share that selects this replica), for features that run in places
            where they are not worth having unasked.
    """

    capabilities: tuple[tuple[int, int], ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    required: bool = False

    def missing(self, *distributions: str) -> str | None:
        """Why what these distributions hold cannot be used, or None."""
        missing = sorted(set(distributions) - set(self.versions))
        return f"{missing[0]} is not installed" if missing else None

    def unproven(self, proven: Collection[tuple[int, int]], run: Collection[tuple[int, int]] = RUN) -> str | None:
        """Why these GPUs are not all of a capability in `proven`, or, unless the user asked for it, of one in `run`; or None."""
        if not self.capabilities:
            return "no CUDA device"
        if other := sorted(set(self.capabilities) - set(proven)):
            return f"capability: expected one of {_versions(proven)}, got {_versions(other)}"
        if not self.required and (new := sorted(set(self.capabilities) - set(run))):
            return f"capability {_versions(new)}: compiled for it, but not run on it yet; only the flag's value on has it"
        return None


@dataclasses.dataclass(frozen=True)
class Patch:
    """One replaced attribute of the host.

    Attributes:
        target: ``"module:name"`` or ``"module:Class.attr"``.
        wrap: takes what the target holds and returns its replacement. Called once per reconcile that enables the feature;
            a target that is :data:`ABSENT` is passed as ``None``.
        why: one line, shown by ``lldecode doctor``.
        remove_when: the upstream change that makes this patch unnecessary.
        expects: accepted source hashes of the original (``lldecode doctor --json`` has them), or :data:`ABSENT`.
            May be empty only for targets inside lldecode itself.
        order: wrappers that share a target are folded by ascending (order, feature name).
        host: where it applies, ``vllm``, or ``lldecode`` for the embedded layer; by default the target's top-level package.
    """

    target: str
    wrap: Callable[[Any], Any]
    why: str
    remove_when: str
    expects: frozenset[str] = frozenset()
    order: int = 0
    host: str = ""

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f'target: expected "module:name" or "module:Class.attr", got {self.target!r}')
        object.__setattr__(self, "host", self.host or self.module.split(".")[0])
        if not self.expects and self.host != "lldecode":
            raise ValueError(f"expects: expected at least one source hash of {self.target}, got none")
        if bad := [h for h in self.expects if h != ABSENT and not _SHA.fullmatch(h)]:
            raise ValueError(f"expects: expected 16 hex digits or {ABSENT!r}, got {bad}")

    @property
    def module(self) -> str:
        return self.target.split(":")[0]

    @property
    def attr(self) -> str:
        return self.target.split(":")[1]


def _runs_everywhere(_: Context) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Feature:
    """One independently installed, enabled and reverted optimization.

    Attributes:
        name: kebab-case; also the entry point's name and, upper-cased, the flag ``LLDECODE_<NAME>``.
        summary: one line.
        patches: see :class:`Patch`. Patches on ``vllm...`` apply in vLLM; those on ``lldecode.layer`` in ``lldecode ablate``.
        probe: given a :class:`Context`, why this feature cannot run here, or None.
        vllm: the vLLM versions that the ``vllm...`` patches were written against, a PEP 440 specifier set.
        default: flag value where the user sets none.
        superseded_by: the upstream version and change that replaces this feature, for the feature table.
    """

    name: str
    summary: str
    patches: tuple[Patch, ...]
    probe: Callable[[Context], str | None] = _runs_everywhere
    vllm: str = ">=0.26,<0.27"
    default: str = "auto"
    superseded_by: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name: expected kebab-case, got {self.name!r}")
        targets = [p.target for p in self.patches]
        if twice := {t for t in targets if targets.count(t) > 1}:
            raise ValueError(f"patches: expected one patch a target, got several for {sorted(twice)}")


MAX_REASONS = 32
"""A reason may quote a shape: neither memory nor the log may grow with the traffic."""

_declined: collections.Counter[tuple[str, str]] = collections.Counter()


def decline(feature: str, reason: str) -> None:
    """Record that `feature` handed a call to the original; the first time for each reason it is logged at INFO.

    Adapters call this, then the original: there is no other fallback. Beyond :data:`MAX_REASONS` reasons of a feature the rest
    are counted as one.
    """
    if (feature, reason) not in _declined and sum(f == feature for f, _ in _declined) >= MAX_REASONS:
        reason = "other reasons"
    key = (feature, reason)
    _declined[key] += 1
    if _declined[key] == 1:
        logger.info("%s: stock path: %s", feature, reason)


def declined() -> dict[str, dict[str, int]]:
    """Calls handed to the original in this process, per feature and reason."""
    out: dict[str, dict[str, int]] = {}
    for (feature, reason), n in sorted(_declined.items()):
        out.setdefault(feature, {})[reason] = n
    return out


_pdl: bool | None = None


def pdl() -> bool | None:
    """Whether kernels launch with programmatic dependent launch: True where the ``pdl`` feature is applied, False where its flag says off.

    Else None (not installed, refused, off by default or by ``LLDECODE_OFF``): then an adapter does what stock vLLM does at its seam.
    """
    return _pdl


def set_pdl(value: bool | None) -> None:
    """Called where the ``pdl`` feature is applied, reverted or set off."""
    global _pdl
    _pdl = value
