"""Measured plans: what takes a shape on a GPU. ``lldecode tune`` writes them as JSON, an operator reads them."""

import functools
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lldecode import jit

logger = logging.getLogger("lldecode.plan")

MARGIN = 1.04
"""How many times faster than the baseline something must be before a plan leaves the baseline."""

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Numbers of tokens that are measured; any other takes what the next one does."""

SITUATIONS = ("chain", "behind", "alone")
"""What is around a call when it is timed, since what is fastest depends on it, and a decode step has all three.

``chain``: the same kernel, as o_proj follows the absorbed product: with programmatic dependent launch (PDL) its start hides behind the end
of the one before, and variants win that leave room for a neighbour. ``behind``: a kernel that lets it start at once and goes on for about
2 us, as a norm does with lldecode-pdl: variants win that have many weights under way. ``alone``: an ordinary kernel, as vLLM's own are;
it runs from launch to end.
"""


def situation(case: str) -> str:
    """The one of :data:`SITUATIONS` in which a case of a results CSV was timed: its last word says so, but for the chain."""
    last = case.rpartition(" ")[2]
    return last if last in SITUATIONS else "chain"


class Gemm(NamedTuple):
    """A product of x ``[batch, M, k]`` with ``[batch, k, n]``, whose n is contiguous where `n_major`; its ``str`` names it in a plan."""

    n: int
    k: int
    batch: int = 1
    n_major: bool = False

    def __str__(self) -> str:
        return f"N={self.n} K={self.k}" + (f" B={self.batch}" if self.batch > 1 else "") + (" n-major" if self.n_major else "")

    @classmethod
    def of(cls, weight: Tensor) -> tuple["Gemm", int]:
        """The product of a weight ``[batch, n, k]``, and that stride of its last two which is not dense."""
        batch, n, k = weight.shape
        n_major = weight.stride(2) != 1
        return cls(n, k, batch, n_major), weight.stride(2 if n_major else 1)


Shapes = dict[str, dict[str, dict[str, Any]]]
"""By shape and size (number of tokens): ``{"choice": [provider, variant or null], "us": {provider: us}}``."""


def decide(us: Mapping[str, float], baseline: str) -> str:
    """The fastest provider, given microseconds by provider; the baseline unless it is beaten by :data:`MARGIN`."""
    best = min(us, key=lambda provider: us[provider])
    return baseline if us[baseline] < MARGIN * us[best] else best


def gpu(index: int | None = None) -> tuple[str, int]:
    """Name and multiprocessors of a CUDA device, the current one if None."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return found.name, found.multi_processor_count


def driver() -> str:
    """Major version of the NVIDIA kernel driver, empty where there is none."""
    try:
        found = re.search(r"Kernel Module(?:.*?)\s(\d+)\.\d", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def read(path: Path, stamp: Mapping[str, str]) -> tuple[Shapes, str | None]:
    """The shapes of a plan file that carries `stamp`, and why it cannot be used, or None. A missing file is an empty plan."""
    try:
        data = json.loads(path.read_text())
        for key, value in stamp.items():
            if (found := data.get(key)) != value:
                return {}, f"{path}: stale: {key}: expected {value}, got {found}"
        shapes = data["shapes"]
        for size, entry in (item for sizes in shapes.values() for item in sizes.items()):
            provider, _ = entry["choice"]
            int(size), entry["us"][provider]  # raise where it is of another form
        return shapes, None
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return {}, f"{path}: {type(e).__name__}: {e}"


def write(path: Path, stamp: Mapping[str, str], shapes: Shapes) -> None:
    """Replace a plan file; a reader sees the old one or the new one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(shape)}: {json.dumps(sizes)}" for shape, sizes in sorted(shapes.items()))
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
        try:
            f.write(f'{json.dumps(dict(stamp))[:-1]}, "shapes": {{\n{lines}\n}}}}\n')
            f.flush()
            os.chmod(f.name, 0o644)
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


class Plans:
    """The plans of one feature: this machine's own, and those that the package ships, ``plans/<gpu>.json`` beside its kernel.

    Args:
        feature: its name, which names this machine's file.
        kernel: the source file that decides how fast the feature's own providers are; a plan of another text is stale.
    """

    def __init__(self, feature: str, kernel: str | Path) -> None:
        self.feature = feature
        self.kernel = Path(kernel)
        self._loaded: dict[str, list[Shapes]] = {}

    @functools.cached_property
    def source(self) -> str:
        """12 hex digits of the kernel's source."""
        return hashlib.sha256(self.kernel.read_bytes()).hexdigest()[:12]

    def stamp(self, gpu: str) -> dict[str, str]:
        """What a plan of this machine carries, and must agree with to be used."""
        return {"gpu": gpu, "driver": driver(), "source": self.source, "timed": " ".join(SITUATIONS)}

    def shipped(self, gpu: str) -> Path:
        """The package's plan for a GPU, by the device's name; may not exist."""
        return self.kernel.with_name("plans") / f"{_slug(gpu)}.json"

    def tuned(self, gpu: str, directory: Path | None = None) -> Path:
        """This machine's plan for a GPU, in `directory` or the one that also keeps compiled kernels (:func:`lldecode.jit.disk_cache`).

        Raises:
            OSError: there is no such directory.
        """
        if directory is None:
            directory, reason = jit.disk_cache()
            if directory is None:
                raise OSError(reason)
        return directory / f"{self.feature}-{_slug(gpu)}.json"

    def choice(self, gpu: str, shape: object, size: int, without: Collection[str] = ()) -> tuple[str, Any] | None:
        """Provider and variant that were measured best at `size` or, where it was not measured, at the next larger one; None where
        nothing was, or where that provider is one of `without`, which are not there.

        This machine's plan comes before the shipped one. A plan that cannot be used is ignored, with the reason in the log.
        """
        if gpu not in self._loaded:
            self._loaded[gpu] = self._load(gpu)
        for shapes in self._loaded[gpu]:
            sizes = shapes.get(str(shape), {})
            if larger := [measured for measured in sizes if int(measured) >= size]:
                provider, variant = sizes[min(larger, key=int)]["choice"]
                return None if provider in without else (provider, variant)
        return None

    def forget(self) -> None:
        """Read the files again at the next :meth:`choice`."""
        self._loaded.clear()

    def _load(self, gpu: str) -> list[Shapes]:
        # No driver is asked of the shipped plan: under the next one it is better than none.
        wanted = {self.shipped(gpu): {"gpu": gpu, "source": self.source}}
        try:
            wanted = {self.tuned(gpu): self.stamp(gpu)} | wanted
        except OSError as e:
            logger.warning("%s: no plan of this machine: %s", self.feature, e)
        out = []
        for path, stamp in wanted.items():
            shapes, reason = read(path, stamp)
            if reason:
                logger.warning("%s: plan ignored: %s", self.feature, reason)
            out.append(shapes)
        return out


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia "))
