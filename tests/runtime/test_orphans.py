"""Processes that end with the one that started them, also when that is killed: all that they have started as well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autosched.runtime.orphans import start_tied
from tests.conformance.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process has to notice by itself")

ROOT = str(Path(__file__).resolve().parents[2])
STARTS = "sleep 600 & echo $$ $! > /proc/$PPID/fd/1; wait"
KILLED = f"""
import os, sys, threading, time
sys.path.append({ROOT!r})
from pathlib import Path
from autosched.runtime.native.compiler import _run
from autosched.runtime.orphans import start_tied
command = ["sh", "-c", {STARTS!r}]
{{start}}
time.sleep(600)
"""
WAYS = {
    "by the main thread": "process = start_tied(command)",
    "by another thread, which has ended": (
        "started = []\nthread = threading.Thread(target=lambda: started.append(start_tied(command)))\nthread.start()\nthread.join()"
    ),
    "before a fork that outlives it": "process = start_tied(command)\nif os.fork() == 0: os.setsid(); time.sleep(20); os._exit(0)",
    "by whoever runs a compiler": "_run([command], time.monotonic() + 600)",
}


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("way", WAYS)
def test_what_a_killed_process_has_started_ends_with_it(way: str) -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", KILLED.format(start=WAYS[way])], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        processes = [int(word) for word in parent.stdout.readline().split()]
        assert len(processes) == 2
        time.sleep(0.2)
        assert not any(map(gone, processes))
        parent.kill()
        parent.wait()
        assert wait_until(lambda: all(map(gone, processes)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_nothing_ends_it_while_its_parent_lives() -> None:
    found: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: found.append(start_tied(["sh", "-c", "sleep 0.3; exit 7"])))
    thread.start()
    thread.join()
    if (forked := os.fork()) == 0:
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0
    assert found[0].wait(60) == 7


def test_one_that_cannot_be_started_leaves_no_descriptors() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        start_tied(["/no/such/program"])
    process = start_tied(["true"])
    assert process.wait(60) == 0
    del process
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert signal.getsignal(signal.SIGIO) == signal.SIG_DFL
