"""Python code in a process of its own, without importing PyTorch and pytest each time: one process has, and forks for every call.

For tests that need a process whose settings, threads or end are its own. Where it matters what a fresh interpreter imports, or in which
order, a test starts one.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
# The code runs as the main module of the process that is forked, which then ends as one does that the interpreter was started for.
_BEGIN = (
    "import sys; sys.path.append({root!r}); from tests.conformance.forked import serve; exec(compile(serve({number}), '<string>', 'exec'))"
)
_servers: list[_Server] = []


class _Server:
    """The process that forks; it ends where this one has closed its end of the socket, or has ended."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._ours, theirs = socket.socketpair()
        begin = _BEGIN.format(root=str(_ROOT), number=theirs.fileno())
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-P", "-c", begin], pass_fds=(theirs.fileno(),))
        self._answers = self._ours.makefile("r")

    def ask(self, request: Mapping[str, object], files: list[int]) -> int:
        """The exit code of a process that was forked for ``request``."""
        socket.send_fds(self._ours, [json.dumps(request).encode() + b"\n"], files)
        return int(self._answers.readline())

    def close(self) -> None:
        if self.owner == os.getpid():
            self._answers.close()
            self._ours.close()
            self._process.wait()


def run_forked(
    code: str, *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None, timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run([sys.executable, "-P", "-c", code, *arguments])`` says it, with what it wrote; the checkout can be imported.

    What PyTorch reads of the environment when it is imported is this process's. What takes longer than ``timeout_s`` is killed.
    """
    if not _servers or _servers[0].owner != os.getpid():
        _servers[:] = [_Server()]
        atexit.register(_servers[0].close)
    request = {
        "code": code,
        "arguments": arguments,
        "environment": dict(os.environ if environment is None else environment),
        "folder": str(folder or Path.cwd()),
        "timeout_s": timeout_s,
    }
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        ended = _servers[0].ask(request, [out.fileno(), errors.fileno()])
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([code, *arguments], ended, out.read(), errors.read())


def serve(number: int) -> str:
    """Fork for each request on the socket ``number``; returns in each forked process, with the code that it is to run."""
    import pytest  # noqa: F401
    import torch  # noqa: F401

    requests = socket.socket(fileno=number)
    while True:
        line, files, _, _ = socket.recv_fds(requests, 65536, 2)
        while not line.endswith(b"\n"):
            line += (more := requests.recv(65536))
            if not more:
                sys.exit()
        request = json.loads(line)
        with warnings.catch_warnings():
            # Python 3.12's, of forks beside threads: those of NumPy's linear algebra are prepared for it.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            requests.close()
            return _become(request, files)
        for file in files:
            os.close(file)
        requests.sendall(b"%d\n" % _ended(child, request["timeout_s"]))


def _become(request: dict[str, Any], files: list[int]) -> str:
    """Make this process look like one that was started for ``request``, and return its code."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for place, file in enumerate(files, 1):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["-c", *request["arguments"]]
    return str(request["code"])


def _ended(child: int, timeout_s: float) -> int:
    """The exit code of ``child``; negative for a signal."""
    deadline = time.monotonic() + timeout_s
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(found[1])
