"""Processes that measure: workers that start together and measure one by one, and ranks that run together.

A worker's last argument is a directory. The file ``ready`` in it says that the worker has started, it measures when it reads a line from
stdin, and ``result`` receives what it reports, as JSON. So workers can start together, and each still measures alone. ``parent`` is a FIFO
that only the parent has open for writing: at its end the worker's process group is killed.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

LOG_TAIL = 15
"""Lines of a failed worker's log that are reported."""

GRACE_S = 4.0
"""Seconds between SIGTERM and SIGKILL, for all workers together: a supervisor of the parent may itself wait no longer than 10."""

KILL_S = 10.0
"""Seconds that killed processes are waited for, since a GPU's memory is free only when they are gone."""

_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): ")


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
    """Start the workers, and when all have started let one after the other measure. No process of their groups outlives the call.

    Args:
        commands: by name, a command, to which the directory is added, and its environment.
        step: told what begins.
        outcomes: receives each as it is done.
        timeout: seconds for all of them to start, and for each to measure; what has not by then is stopped.
    """
    with tempfile.TemporaryDirectory(prefix="lldecode-workers-") as tmp, contextlib.ExitStack() as held:
        running: dict[str, subprocess.Popen[bytes]] = {}
        directories = {name: pathlib.Path(tmp, str(i)) for i, name in enumerate(commands)}
        try:
            for name, (command, environ) in commands.items():
                step(f"starting {name}")
                directories[name].mkdir()
                os.mkfifo(directories[name] / "parent")
                held.callback(os.close, os.open(directories[name] / "parent", os.O_RDWR))  # to read, too: else this waits for a reader
                with (directories[name] / "log").open("wb") as log:
                    running[name] = subprocess.Popen(
                        [*command, str(directories[name])],
                        env=dict(environ),
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            deadline = time.monotonic() + timeout
            while any(w.poll() is None and not (directories[name] / "ready").exists() for name, w in running.items()):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.2)
            for name in commands:
                worker = running[name]
                step(f"measuring {name}")
                started = (directories[name] / "ready").exists()
                try:
                    worker.communicate(b"\n", timeout=timeout if started or worker.poll() is not None else 0)
                    code = worker.returncode
                    why = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
                except subprocess.TimeoutExpired:
                    why = f"not {'done' if started else 'started'} in {timeout:g} s"
                _end([worker])  # what it leaves behind would hold the GPU's memory
                del running[name]
                outcomes[name] = _outcome(why, directories[name])
        finally:
            _end(running.values())


def _outcome(why: str, directory: pathlib.Path) -> Outcome:
    out = directory / "result"
    report = json.loads(out.read_text()) if out.is_file() else None
    if why == "exit status 0" and report is not None:
        return Outcome(report, None)
    lines = (directory / "log").read_text(errors="replace").splitlines()
    cause = next((line for line in lines[:-LOG_TAIL] if _ERROR.search(line)), None)  # the end is often just who noticed
    return Outcome(report, "\n".join([f"worker failed: {why}", *([cause, "..."] if cause else []), *lines[-LOG_TAIL:]]))


def _end(processes: Collection[subprocess.Popen[Any]]) -> None:
    """Stop the processes, each the leader of a group, and all that is in their groups."""
    try:
        _signal(processes, signal.SIGTERM, GRACE_S)
    finally:
        _signal(processes, signal.SIGKILL, KILL_S)


def _signal(processes: Collection[subprocess.Popen[Any]], number: signal.Signals, seconds: float) -> None:
    """Send their groups a signal, then wait until nothing is left of them, or so many seconds."""
    groups = {process.pid for process in processes} & _groups()  # one that is gone may by now be another's
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
    end = time.monotonic() + seconds
    while (any(process.poll() is None for process in processes) or groups & _groups()) and time.monotonic() < end:
        time.sleep(0.05)


def _groups() -> set[int]:
    """The process groups in which something runs; what has ended may keep its group until someone waits for it."""
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended just now
            state, _, group = path.read_bytes().rpartition(b")")[2].split()[:3]
            if state != b"Z":
                found.add(int(group))
    return found


def worker(directory: str) -> tuple[Callable[[], None], Callable[[Any], None]]:
    """In the worker: what it calls once it has started, which returns when it may measure, and what writes a report over the one before."""
    folder = pathlib.Path(directory)
    if (fifo := folder / "parent").exists():  # not where it was started by hand
        end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a parent that is gone
        threading.Thread(target=_follow, args=(end,), daemon=True).start()

    def started() -> None:
        (folder / "ready").touch()
        sys.stdin.readline()

    def report(value: Any) -> None:
        (folder / "part").write_text(json.dumps(value))
        os.replace(folder / "part", folder / "result")

    return started, report


def _follow(end: int) -> None:
    """Kill the own process group when no one has the other end of the FIFO open any more: nothing may hold a GPU after the parent."""
    os.set_blocking(end, True)
    os.read(end, 1)
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def killed_at_end() -> Iterator[list[subprocess.Popen[Any]]]:
    """A list for processes that lead sessions of their own; when the block ends they are killed, and what they started with them."""
    processes: list[subprocess.Popen[Any]] = []
    try:
        yield processes
    finally:
        _signal(processes, signal.SIGKILL, KILL_S)


def wait(processes: Sequence[subprocess.Popen[Any]], timeout: float) -> list[int | None]:
    """Exit status of each (None: it runs still) when all have ended, one has failed, or `timeout` seconds are over."""
    end = time.monotonic() + timeout
    while None in (codes := [p.poll() for p in processes]) and not any(codes) and time.monotonic() < end:
        time.sleep(0.1)
    return codes
