"""Processes that measure: workers that start together and measure one by one, and ranks that run together.

A worker's last argument is a directory. The file ``ready`` in it says that the worker has started, it measures when it reads a line from
stdin, and ``result`` receives what it reports, as JSON. So workers can start together, and each still measures alone.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

LOG_TAIL = 15
"""Lines of a failed worker's log that are reported."""

_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a worker: its last report, if any, and why it did not end as it should, with the end of its log, or None."""

    report: Any
    failure: str | None


def run(
    commands: Mapping[str, tuple[Sequence[str], Mapping[str, str]]],
    step: Callable[[str], object],
    outcomes: dict[str, Outcome],
    timeout: float,
) -> None:
    """Start the workers, and when all have started let one after the other measure. None outlives the call.

    Args:
        commands: by name, a command, to which the directory is added, and its environment.
        step: told what begins.
        outcomes: receives each as it is done.
        timeout: seconds for all of them to start, and for each to measure; what has not by then is stopped.
    """
    with tempfile.TemporaryDirectory(prefix="lldecode-workers-") as tmp, contextlib.ExitStack() as ending:
        workers: dict[str, subprocess.Popen[bytes]] = {}
        directories = {name: pathlib.Path(tmp, str(i)) for i, name in enumerate(commands)}
        for name, (command, environ) in commands.items():
            step(f"starting {name}")
            directories[name].mkdir()
            with (directories[name] / "log").open("wb") as log:
                workers[name] = subprocess.Popen(
                    [*command, str(directories[name])],
                    env=dict(environ),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            ending.callback(_end, workers[name])
        deadline = time.monotonic() + timeout
        while any(w.poll() is None and not (directories[name] / "ready").exists() for name, w in workers.items()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        for name, worker in workers.items():
            step(f"measuring {name}")
            started = (directories[name] / "ready").exists()
            try:
                worker.communicate(b"\n", timeout=timeout if started or worker.poll() is not None else 0)
                code = worker.returncode
                why = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
            except subprocess.TimeoutExpired:
                why = f"not {'done' if started else 'started'} in {timeout:g} s"
            _end(worker)  # what it leaves behind would hold the GPU's memory
            outcomes[name] = _outcome(why, directories[name])


def _outcome(why: str, directory: pathlib.Path) -> Outcome:
    out = directory / "result"
    report = json.loads(out.read_text()) if out.is_file() else None
    if why == "exit status 0" and report is not None:
        return Outcome(report, None)
    lines = (directory / "log").read_text(errors="replace").splitlines()
    cause = next((line for line in lines[:-LOG_TAIL] if _ERROR.search(line)), None)  # the end is often just who noticed
    return Outcome(report, "\n".join([f"worker failed: {why}", *([cause, "..."] if cause else []), *lines[-LOG_TAIL:]]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the worker and whatever it started: it leads its own process group."""
    try:
        os.killpg(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def worker(directory: str) -> tuple[Callable[[], None], Callable[[Any], None]]:
    """In the worker: what it calls once it has started, which returns when it may measure, and what writes a report over the one before."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # a parent that is killed must not leave the GPU occupied
    folder = pathlib.Path(directory)

    def started() -> None:
        (folder / "ready").touch()
        sys.stdin.readline()

    def report(value: Any) -> None:
        (folder / "part").write_text(json.dumps(value))
        os.replace(folder / "part", folder / "result")

    return started, report


@contextlib.contextmanager
def killed_at_end() -> Iterator[list[subprocess.Popen[Any]]]:
    """A list for processes that lead sessions of their own; when the block ends they are killed, and what they started with them."""
    processes: list[subprocess.Popen[Any]] = []
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait(processes: Sequence[subprocess.Popen[Any]], timeout: float) -> list[int | None]:
    """Exit status of each (None: it runs still) when all have ended, one has failed, or `timeout` seconds are over."""
    end = time.monotonic() + timeout
    while None in (codes := [p.poll() for p in processes]) and not any(codes) and time.monotonic() < end:
        time.sleep(0.1)
    return codes
