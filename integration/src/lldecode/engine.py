"""One verb: :meth:`Engine.reconcile` makes the host's attributes what the enabled features say they are."""

import dataclasses
import inspect
import logging
import operator
import sys
import threading
from collections.abc import Iterable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import wrapt
from packaging.specifiers import SpecifierSet

from lldecode import source
from lldecode.feature import ABSENT, Context, Feature, Patch, set_pdl

logger = logging.getLogger("lldecode")

_MISSING: Any = object()


class RefusedError(RuntimeError):
    """The host is not what the patches of `features` were written against; nothing was changed."""

    def __init__(self, features: Iterable[str], reason: str) -> None:
        self.features = frozenset(features)
        self.reason = reason
        super().__init__(f"{', '.join(sorted(self.features))}: {reason}")


def failure(e: BaseException) -> str:
    """What a feature's own code raised, in words. An interrupt is the user's and goes on; all else, SystemExit too, is the feature's."""
    if isinstance(e, KeyboardInterrupt):
        raise e
    try:
        return f"{type(e).__name__}: {e}"
    except Exception:  # its __str__ may be broken as well
        return type(e).__name__


def drift(patch: Patch) -> str | None:
    """Why the source of a target is not one that its patch accepts, or None. Imports nothing of the host."""
    try:
        found = source.definition(patch.target)
    except source.NotFoundError as e:
        return f"{patch.target}: {e}"
    if not patch.expects or found.hash in patch.expects:
        return None
    if found.hash == ABSENT:
        return f"{patch.target} no longer exists"
    return f"{patch.target} changed: expected source hash {' or '.join(sorted(patch.expects))}, got {found.hash}"


def refusal(feature: Feature, ctx: Context, host: str) -> str | None:
    """Why a feature cannot be applied to a host, or None: version range, then probe, then the source of every target.

    The embedded layer without a GPU runs the ops' references, so there is nothing to probe.
    """
    try:
        if host == "vllm":
            version = ctx.versions.get("vllm")
            if version is None:
                return "vllm is not installed"
            if not SpecifierSet(feature.vllm).contains(version, prereleases=True):
                return f"vllm: expected {feature.vllm}, got {version}"
        if (host == "vllm" or ctx.capabilities) and (reason := feature.probe(ctx)):
            return reason
    except BaseException as e:  # a feature's failure must not be the host's
        return f"probe failed: {failure(e)}"
    return next((r for p in feature.patches if p.host == host and (r := drift(p))), None)


@dataclasses.dataclass
class _Site:
    """One patched attribute: what it was, and what it is now."""

    owner: Any
    name: str
    original: Any  # as in vars(owner); _MISSING where the owner does not define it
    current: Any
    chain: tuple[str, ...] = ()

    def write(self, value: Any) -> None:
        if value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Engine:
    """Holds the features of one host (``vllm``, or ``lldecode`` for the embedded layer) in this process.

    A target's value is the fold of the enabled features' wrappers over its original, so applying, reverting and toggling
    are the same code, the order of calls cannot matter, and the empty set restores the identical originals. Targets in
    modules that are not imported yet are patched right after their import.
    """

    def __init__(self, features: Sequence[Feature], host: str = "vllm") -> None:
        self._features = {f.name: f for f in features}
        if len(self._features) != len(features):
            raise ValueError(f"features: expected distinct names, got {[f.name for f in features]}")
        self.host = host
        self._enabled: frozenset[str] = frozenset()
        self._required: frozenset[str] = frozenset()
        self._sites: dict[str, _Site] = {}
        self._hooked: set[str] = set()
        self._lock = threading.RLock()
        self.dropped: dict[str, str] = {}
        """Features that were enabled and then left out because a module imported later was not as expected, with the reason."""

    @property
    def enabled(self) -> frozenset[str]:
        return self._enabled

    @property
    def pending(self) -> frozenset[str]:
        """Targets of enabled features whose modules are not imported yet."""
        return frozenset(t for t in self._targets(self._enabled) if t not in self._sites)

    def _targets(self, enabled: Iterable[str]) -> dict[str, list[tuple[str, Patch]]]:
        out: dict[str, list[tuple[str, Patch]]] = {}
        for name in sorted(enabled):
            for patch in self._features[name].patches:
                if patch.host == self.host:
                    out.setdefault(patch.target, []).append((name, patch))
        for chain in out.values():
            chain.sort(key=lambda item: (item[1].order, item[0]))
        return out

    def reconcile(self, enabled: Iterable[str], required: Iterable[str] = ()) -> None:
        """Make exactly the features named in `enabled` active.

        Everything is checked before anything is changed, and a failure on the way puts back what was changed.

        Args:
            enabled: names of features given to the constructor.
            required: those of them for which a module that turns out wrong at its later import raises there, too; each such
                feature is left out with a logged reason (:attr:`dropped`).

        Raises:
            ValueError: an unknown name.
            RefusedError: a target is missing, changed, held by a module that bound it early, or was changed by somebody else.
        """
        enabled = frozenset(enabled)
        if unknown := sorted(enabled - self._features.keys()):
            raise ValueError(f"enabled: expected names among {sorted(self._features)}, got {unknown}")
        with self._lock:
            wanted = self._targets(enabled)
            for target, chain in wanted.items():
                for name, patch in chain:
                    if reason := drift(patch):
                        raise RefusedError([name], reason)
                if patch.module in sys.modules and not source.is_loaded(patch.module):
                    raise RefusedError(_names(chain), f"{target}: its module is just being imported")
            self._commit(self._plan(wanted, {t for t in wanted if source.is_loaded(t.split(":")[0])} | self._sites.keys()))
            self._enabled, self._required = enabled, frozenset(required) & enabled
            self._tell_pdl()
            for module in {t.split(":")[0] for t in self.pending} - self._hooked:
                self._hooked.add(module)
                wrapt.register_post_import_hook(self._imported, module)

    def _imported(self, module: Any) -> None:
        """Post-import hook: patch the targets of a module that was not there at reconcile."""
        with self._lock:
            failed: dict[str, str] = {}
            while True:
                wanted = self._targets(self._enabled)
                mine = {t for t in wanted if t.split(":")[0] == module.__name__}
                try:
                    self._commit(self._plan(wanted, mine | self._revertible()))
                    break
                except RefusedError as e:
                    self._enabled -= e.features
                    for name in sorted(e.features):
                        self.dropped[name] = failed[name] = e.reason
                        logger.warning("%s: off: %s", name, e.reason)
            self._tell_pdl()
            if required := self._required & failed.keys():
                raise RefusedError(required, "; ".join(failed[name] for name in sorted(required)))

    def _revertible(self) -> set[str]:
        """Sites of features that were dropped, except where somebody else changed them since: those cannot be put back."""
        return {
            target
            for target, site in self._sites.items()
            if not self._enabled.issuperset(site.chain) and vars(site.owner).get(site.name, _MISSING) is site.current
        }

    def _tell_pdl(self) -> None:
        if "pdl" in self._features:
            set_pdl(True if "pdl" in self._enabled else None)

    def _plan(self, wanted: dict[str, list[tuple[str, Patch]]], targets: Iterable[str]) -> list[tuple[str, _Site, tuple[str, ...], Any]]:
        plan = []
        for target in sorted(targets):
            chain = wanted.get(target, [])
            site = self._sites.get(target)
            if site and site.chain == _names(chain):
                continue
            site = site or self._site(target, chain)
            now = vars(site.owner).get(site.name, _MISSING)
            if now is not site.current:
                raise RefusedError(site.chain or _names(chain), f"{target} was changed by somebody else: it is now {_describe(now)}")
            value = site.original
            for name, patch in chain:
                try:
                    value = patch.wrap(None if value is _MISSING else value)
                except BaseException as e:  # a feature's failure must not be the host's
                    raise RefusedError([name], f"{target}: wrap failed: {failure(e)}") from e
            plan.append((target, site, _names(chain), value))
        return plan

    def _commit(self, plan: list[tuple[str, _Site, tuple[str, ...], Any]]) -> None:
        done: list[_Site] = []
        try:
            for _, site, _, value in plan:
                site.write(value)
                done.append(site)
        except BaseException:
            for site in reversed(done):
                site.write(site.current)
            raise
        for target, site, names, value in plan:
            site.current, site.chain = value, names
            if names:
                self._sites[target] = site
            else:
                del self._sites[target]

    def _site(self, target: str, chain: list[tuple[str, Patch]]) -> _Site:
        module, attr = target.split(":")
        path, _, name = attr.rpartition(".")
        owner: Any = sys.modules[module]
        try:
            owner = operator.attrgetter(path)(owner) if path else owner
        except AttributeError:
            raise RefusedError(_names(chain), f"{module} has no {path}") from None
        original = current = vars(owner).get(name, _MISSING)
        found = source.definition(target)
        for other, site in self._sites.items():  # a module that bound the definition, under any name, after it was patched
            if other.startswith(f"{found.module}:") and current is site.current:
                original = site.original
        if (original is _MISSING) != (found.hash == ABSENT) or not _is_from(original, found):
            raise RefusedError(_names(chain), f"{target} was changed by somebody else: it is now {_describe(original)}")
        if not path and found.module == module:
            self._check_copies(target, original, chain)
        return _Site(owner, name, original, current)

    def _check_copies(self, target: str, original: Any, chain: list[tuple[str, Patch]]) -> None:
        """A module that did `from x import f` before the patch would go on calling the original."""
        if not isinstance(original, FunctionType | type):
            return
        ours = {p.target for name, _ in chain for p in self._features[name].patches}
        packages = self.host, target.split(":")[0].split(".")[0]
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] not in packages or not isinstance(module, ModuleType):
                continue
            for attr, value in list(vars(module).items()):
                if value is original and f"{name}:{attr}" not in ours:
                    raise RefusedError(_names(chain), f"{name} bound {target} before it was patched: patch {name}:{attr} as well")


def _names(chain: Iterable[tuple[str, Patch]]) -> tuple[str, ...]:
    return tuple(name for name, _ in chain)


def _is_from(value: Any, found: source.Definition) -> bool:
    """Whether a live function is the one its source file defines (other kinds of values cannot be told)."""
    if not found.function:
        return True
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if found.decorated:
        value = inspect.unwrap(value)
        return not isinstance(value, FunctionType) or value.__code__.co_filename == found.file
    return isinstance(value, FunctionType) and value.__code__.co_filename == found.file and not hasattr(value, "__wrapped__")


def _describe(value: Any) -> str:
    if value is _MISSING:
        return "gone"
    name = f"{getattr(value, '__module__', None) or type(value).__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    code = getattr(value, "__code__", None)  # a wrapper that copies names still has its own code
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
