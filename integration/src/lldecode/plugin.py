"""The ``vllm.general_plugins`` entry point: applies what the flags enable, in every process of vLLM that loads plugins."""

import dataclasses
import logging
import os

from lldecode import cache_key, registry
from lldecode.engine import Engine, RefusedError
from lldecode.feature import Context, set_pdl

logger = logging.getLogger("lldecode")


class StartError(RuntimeError):
    """A feature that is ``on`` cannot be applied."""


@dataclasses.dataclass(frozen=True)
class Active:
    """What :func:`register` did in this process."""

    engine: Engine
    _statuses: tuple[registry.Status, ...]

    @property
    def statuses(self) -> list[registry.Status]:
        """One status a feature, those included that were left out at a later import."""
        dropped = self.engine.dropped
        return [dataclasses.replace(s, state="refused", reason=dropped[s.name]) if s.name in dropped else s for s in self._statuses]

    @property
    def fingerprint(self) -> str:
        return registry.fingerprint(self.statuses)


_active: Active | None = None


def active() -> Active | None:
    """What is applied in this process, or None where the plugin has not run."""
    return _active


def register() -> None:
    """Read the flags once and apply the features. Safe to call again; touches no CUDA.

    Raises:
        lldecode.flags.FlagError: an unknown flag or value.
        StartError: a feature that is ``on`` (or a share that selects this replica) cannot be applied, with the reason.
    """
    global _active
    if _active is not None:
        return
    _log_as_vllm()
    _active = _apply(registry.survey(_context(), os.environ))
    if registry.says_no_pdl(_active.statuses):
        set_pdl(False)
    for s in _active.statuses:
        if s.state != "not installed":
            where = f"{s.setting.value}, {s.setting.source}"
            logger.info("%s %s: %s (%s)%s", s.name, s.version, s.state, where, f": {s.reason}" if s.reason else "")
    logger.info("fingerprint %s", _active.fingerprint)


def _apply(statuses: list[registry.Status]) -> Active:
    _require(statuses)
    features = [s.feature for s in statuses if s.state == "on" and s.feature]
    engine = Engine([*features, cache_key.feature(lambda: registry.fingerprint(Active(engine, tuple(statuses)).statuses))])
    while True:
        enabled = [s.name for s in statuses if s.state == "on"]
        try:
            engine.reconcile([*enabled, cache_key.NAME] if enabled else [], required=[s.name for s in statuses if s.required])
            return Active(engine, tuple(statuses))
        except RefusedError as e:
            # without the cache key nothing may run, so its refusal is everybody's
            out = set(enabled) if cache_key.NAME in e.features else e.features
            statuses = [dataclasses.replace(s, state="refused", reason=e.reason) if s.name in out else s for s in statuses]
            _require(statuses)


def _require(statuses: list[registry.Status]) -> None:
    if failed := [s for s in statuses if s.state == "refused" and s.required]:
        raise StartError("; ".join(f"{s.name} is {s.setting.value} ({s.setting.source}) but: {s.reason}" for s in failed))


def _context() -> Context:
    from vllm.platforms import current_platform  # reads NVML, initialises no CUDA

    count = current_platform.device_count() if current_platform.is_cuda() else 0
    found = [current_platform.get_device_capability(i) for i in range(count)]
    return Context(tuple((c.major, c.minor) for c in found if c is not None), registry.versions())


def _log_as_vllm() -> None:
    """Give our logger vLLM's handler and level, as nothing configures the root logger in a server."""
    host = logging.getLogger("vllm")
    if not logger.hasHandlers() and host.handlers:
        logger.handlers = list(host.handlers)
        logger.setLevel(host.level)
        logger.propagate = False
