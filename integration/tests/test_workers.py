"""Processes that run together; workers that measure one by one are tested through ``lldecode ablate``."""

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
    deadline = time.monotonic() + 10
    while (stat := Path(f"/proc/{pid}/stat")).exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
