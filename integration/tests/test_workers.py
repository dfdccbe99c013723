"""Processes that run together, and how workers end; that they measure one by one is tested through ``lldecode ablate``."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lldecode import workers


def start(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)


SLEEP = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("codes", "timeout", "status"),
    [(("", ""), 30, [0, 0]), ((SLEEP, "raise SystemExit(3)"), 30, [None, 3]), ((SLEEP,), 0.5, [None])],
)
def test_what_is_waited_for(codes, timeout, status):
    with workers.killed_at_end() as processes:
        processes += map(start, codes)
        begun = time.monotonic()
        assert workers.wait(processes, timeout) == status and time.monotonic() < begun + 20


def test_nothing_outlives_the_block():
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); print(p.pid, flush=True); p.wait()"
    with pytest.raises(KeyError), workers.killed_at_end() as processes:
        processes.append(start(child))
        pid = int(processes[0].stdout.readline())
        raise KeyError
    assert processes[0].returncode < 0
    wait_until(lambda: not alive(pid))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


WORKER = """
import os, pathlib, signal, subprocess, sys, time
from lldecode import workers

name, handling, pids = sys.argv[1:4]
child = f"import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, {handling}); pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
path = f"{pids}/{name}"
pid = subprocess.Popen([sys.executable, "-c", child, path + "-up"]).pid
while not os.path.exists(path + "-up"):
    time.sleep(0.01)

def say():
    pathlib.Path(path + "-part").write_text(f"{os.getpid()} {pid}")
    os.replace(path + "-part", path)

if name == "ends":  # without its child
    say()
    os._exit(0)
if name == "late":  # as one that still imports when its parent is killed
    parent = os.getppid()
    say()
    while os.getppid() == parent:
        time.sleep(0.01)
started, report = workers.worker(sys.argv[-1])
if name == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if name != "late":
    say()
started()
time.sleep(60)
"""


def command(folder, handling, name):
    """A worker with a child that handles SIGTERM so; `folder` receives the pids of both."""
    return [sys.executable, "-c", WORKER, name, handling, str(folder)]


def pids(folder, *names):
    """Those of the workers and of their children, once all have said them."""
    wait_until(lambda: all((folder / name).exists() for name in names))
    return [int(pid) for name in names for pid in (folder / name).read_text().split()]


def interrupted(folder, handling, *names):
    """Interrupt workers once all run: the pids, and how long ending them took."""
    found = []

    def step(what):
        if what.startswith("measuring"):
            found.extend(pids(folder, *names))
            found.append(time.monotonic())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.run({name: (command(folder, handling, name), os.environ) for name in names}, step, {}, 20)
    return found[:-1], time.monotonic() - found[-1]


def test_workers_end_together_with_all_in_their_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_S", 1.5)
    found, seconds = interrupted(tmp_path, "signal.SIG_IGN", "ignores", "waits", "ends")
    assert len(found) == 6 and not any(map(alive, found))
    assert 1.5 <= seconds < 3  # one after the other is 4.5


def test_what_ends_on_a_request_is_not_waited_for(tmp_path):
    handler = f"lambda *_: (time.sleep(0.3), pathlib.Path({str(tmp_path / 'done')!r}).touch(), sys.exit())"
    found, seconds = interrupted(tmp_path, handler, "waits")
    assert not any(map(alive, found)) and seconds < workers.GRACE_S
    assert (tmp_path / "done").exists()  # though its parent was gone before


def test_second_interrupt_kills_at_once(tmp_path, monkeypatch):
    def interrupt(processes, number, seconds, before=workers._signal):
        if number == signal.SIGTERM:
            raise KeyboardInterrupt
        before(processes, number, seconds)

    monkeypatch.setattr(workers, "_signal", interrupt)
    found, _ = interrupted(tmp_path, "signal.SIG_IGN", "waits", "ends")
    assert not any(map(alive, found))


@pytest.mark.parametrize("name", ["waits", "ignores", "late"])
def test_nothing_of_a_worker_outlives_a_parent_that_is_killed(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what a killed parent leaves there
    its_command = command(tmp_path, "signal.SIG_IGN", name)
    parent = f"import os; from lldecode import workers; workers.run({{'': ({its_command!r}, os.environ)}}, print, {{}}, 60)"
    with workers.killed_at_end() as processes:
        processes.append(start(parent))
        found = pids(tmp_path, name)
        assert all(map(alive, found))
        processes[0].kill()
        wait_until(lambda: not any(map(alive, found)))


def test_a_worker_that_is_started_by_hand_runs(tmp_path):
    code = f"from lldecode import workers; started, report = workers.worker({str(tmp_path)!r}); started(); report([1])"
    subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, timeout=60, check=True)
    assert (tmp_path / "result").read_text() == "[1]"
