"""GPU tests in several processes at once: most of their time passes while processes start and compilers run, and the device waits.

A lane is a process of pytest that runs the tests of some files, one after the other. The pytest that was started runs none of them: it
passes on what lanes report, in the order in which tests end. A lane whose process ends early, or whose device no longer answers, goes on in
another process; only the test that it was at has failed. Tests that are marked ``gpu_alone`` have a lane that the others wait for.

pytest-xdist would run them at once, too, but ends a run whose device broke in one process, and a machine with a GPU may lack it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from autosched.runtime.orphans import die_with

# By what each took on an H200; a file that is not named has a lane of its own.
_TOGETHER = (
    ("streams", "memory", "fuzz", "in_place", "state", "layout"),
    ("models",),
    ("device", "serving", "second", "low_precision"),
    ("regions",),
    ("inductor",),
)
MOST = len(_TOGETHER)
_LOOK_S = 0.05
_LAST_LINES = 40
_BEGUN, _REPORT, _ENDED = "begun", "report", "ended"
_OPEN = "open"  # a file that is there when no test needs the device for itself any more

Answer = tuple[str, list[pytest.TestReport]]


def not_run(budget_s: float) -> str:
    """Why a test did not have its turn."""
    return f"not run: the GPU budget of {budget_s:.0f} s is spent; give more with --gpu-budget, or run this file alone"


def grouped(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests of each lane."""
    groups: dict[tuple[str, ...], list[pytest.Item]] = {}
    for item in items:
        name = item.path.stem.removeprefix("test_gpu_")
        groups.setdefault(next((names for names in _TOGETHER if name in names), (name,)), []).append(item)
    return list(groups.values())


class Lanes:
    """A plugin of the pytest that was started.

    Args:
        count: how many processes run tests at a time.
        say: told of each report that failed.

    ``left_s`` is how long the next report may be waited for, and ``answered`` the test that the last one was of, with how long it took.
    """

    def __init__(self, config: pytest.Config, groups: Sequence[list[pytest.Item]], count: int, say: Callable[[Any], None]) -> None:
        self.left_s = 0.0
        self.answered = (groups[0][0], 0.0)
        self.count = min(count, len(groups))
        self._budget_s = config.getoption("--gpu-budget")
        self._say = say
        self._items = {item.nodeid: item for group in groups for item in group}
        self._folder = Path(tempfile.mkdtemp(prefix="autosched-gpu-lanes-"))
        alone = [item for item in self._items.values() if item.get_closest_marker("gpu_alone") is not None]
        groups = [alone, *([item for item in group if item not in alone] for group in groups)]
        lanes = [_Lane(config, group, self._folder / str(number), alone=number == 0) for number, group in enumerate(groups)]
        self._waiting = deque(lane for lane in lanes if lane.left)
        self._alone = lanes[0]
        self._running: list[_Lane] = []
        self._answers: deque[Answer] = deque()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Report one of the tests, not always ``item``: there is a turn for each."""
        if item.nodeid not in self._items:
            return None
        name, reports = self._next()
        done = self._items[name]
        self.answered = (done, sum(report.duration for report in reports))
        done.ihook.pytest_runtest_logstart(nodeid=name, location=done.location)
        for report in reports:
            done.ihook.pytest_runtest_logreport(report=report)
            if report.failed:
                self._say(report)
        done.ihook.pytest_runtest_logfinish(nodeid=name, location=done.location)
        return True

    def pytest_sessionfinish(self) -> None:
        """What a lane has not come to by now is not wanted."""
        for lane in self._running:
            lane.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _next(self) -> Answer:
        until = time.monotonic() + self.left_s
        while True:
            for lane in self._running:
                self._answers += lane.look()
            if not self._alone.left and not (opened := self._folder / _OPEN).exists():
                # What it took of the device is its own for as long as it takes to end.
                self._alone.close()
                opened.touch()
            busy = sum(bool(lane.left) for lane in self._running)
            for _ in range(min(self.count - busy, len(self._waiting))):
                self._running.append(self._waiting.popleft())
                self._running[-1].begin()
            if self._answers:
                return self._answers.popleft()
            if time.monotonic() >= until:
                for lane in (*self._running, *self._waiting):
                    self._answers += lane.give_up(self._budget_s)
                self._waiting.clear()
            time.sleep(_LOOK_S)


class _Lane:
    """Tests that run one after the other, and the process that runs them.

    ``left`` has the names of those that have not ended. Unless they run ``alone``, the first begins when those that do have ended.
    """

    def __init__(self, config: pytest.Config, items: Sequence[pytest.Item], folder: Path, *, alone: bool) -> None:
        self.left = [item.nodeid for item in items]
        self._config, self._folder, self._alone = config, folder, alone
        self._items = {item.nodeid: item for item in items}
        self._process: subprocess.Popen[bytes] | None = None
        self._read, self._rest = 0, b""
        self._begun = False
        self._at, self._since, self._reports = "", 0.0, list[pytest.TestReport]()

    def begin(self) -> None:
        """Start a process for what is left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        (self._folder / "asked").write_text(json.dumps({"tests": self.left, "alone": self._alone}), encoding="utf-8")
        (self._folder / "said").touch()
        self._read, self._rest, self._begun, self._at = 0, b"", False, ""
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self._config.invocation_params.dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # It must not go on with a GPU that whoever asked no longer waits for.
                preexec_fn=functools.partial(die_with, os.getpid()),  # noqa: PLW1509
            )

    def look(self) -> list[Answer]:
        """The tests that have ended since the last look."""
        if not self.left or self._process is None:
            return []
        # Before reading: what it has written is all there then.
        status = self._process.poll()
        answers = [answer for event in self._events() if (answer := self._heard(event)) is not None]
        if status is not None and self.left:
            answers += self._gone(status)
            if self.left:
                self.begin()
        return answers

    def give_up(self, budget_s: float) -> list[Answer]:
        """The time is over: all that is left has failed, and says so."""
        self.close()
        late = f"the GPU budget of {budget_s:.0f} s was spent while this test ran"
        return [self._failed(name, late if name == self._at else not_run(budget_s)) for name in list(self.left)]

    def close(self) -> None:
        """End the process, and what it has started in its group; the others end when they find it gone."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # One that the driver holds ends when that lets it go.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5.0)

    def _command(self) -> list[str]:
        option, folder = self._config.option, str(self._config.invocation_params.dir)
        # As ``pytest`` finds modules, or as ``python -m pytest`` does.
        command = [sys.executable, *(["-P"] if sys.path[0] != folder else []), "-m", "pytest", "-v"]
        command += ["--rootdir", str(self._config.rootpath)]
        command += ["-c", str(self._config.inipath)] if self._config.inipath is not None else []
        command += [word for name in ("no:cacheprovider", *option.plugins) for word in ("-p", name)]
        command += [word for setting in option.override_ini or () for word in ("-o", setting)]
        command += ["--log-level", option.log_level] if option.log_level else []
        # Whoever waits for this process knows when its time is over.
        command += ["--gpu-budget", "1e6", "--gpu-lanes", "1", "--gpu-lane", str(self._folder)]
        command += ["--gpu-rehearsal"] if option.gpu_rehearsal else []
        return [*command, *dict.fromkeys(str(self._items[name].path) for name in self.left)]

    def _events(self) -> list[dict[str, Any]]:
        with (self._folder / "said").open("rb") as file:
            file.seek(self._read)
            said = file.read()
        self._read += len(said)
        *lines, self._rest = (self._rest + said).split(b"\n")
        return [json.loads(line) for line in lines]

    def _heard(self, event: dict[str, Any]) -> Answer | None:
        if _BEGUN in event:
            self._begun, self._at, self._since, self._reports = True, event[_BEGUN], time.monotonic(), []
        elif _REPORT in event:
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=event[_REPORT])
            if isinstance(report.longrepr, list):  # where it was skipped, and why
                report.longrepr = tuple(report.longrepr)
            self._reports.append(report)
        else:
            self.left.remove(self._at)
            name, self._at = self._at, ""
            return name, self._reports
        return None

    def _gone(self, status: int) -> list[Answer]:
        """The process has ended before its tests had."""
        log = (self._folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        why = "\n".join([f"the process of this test ended with {how}; the last that it said:", *log[-_LAST_LINES:]])
        if self._at:
            return [self._failed(self._at, why)]
        # Another one would come no further.
        return [] if self._begun else [self._failed(name, why) for name in list(self.left)]

    def _failed(self, name: str, why: str) -> Answer:
        item = self._items[name]
        took_s, before = (time.monotonic() - self._since, self._reports) if name == self._at else (0.0, [])
        told: dict[str, Any] = {"nodeid": name, "location": item.location, "keywords": dict.fromkeys(item.keywords, 1)}
        failed = pytest.TestReport(**told, outcome="failed", longrepr=why, when="call", duration=took_s)
        self.left.remove(name)
        self._at = "" if name == self._at else self._at
        return name, [*before, failed, pytest.TestReport(**told, outcome="passed", longrepr=None, when="teardown")]


class Told:
    """A plugin of a lane's own pytest: it runs the tests whose names are in ``folder``, and writes down what comes out there."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._asked = json.loads((folder / "asked").read_text(encoding="utf-8"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Those that were asked for, in that order."""
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self._asked["tests"]]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        """All that takes nothing of the device has been done by now."""
        while not self._asked["alone"] and not (self._folder.parent / _OPEN).exists():
            time.sleep(_LOOK_S)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A process that dies in this test must leave its name."""
        self._write(_BEGUN, nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of a test's phases."""
        self._write(_REPORT, self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """All that is to be said of it has been."""
        self._write(_ENDED, nodeid)

    def _write(self, what: str, value: object) -> None:
        with (self._folder / "said").open("a", encoding="utf-8") as file:
            file.write(json.dumps({what: value}, default=str) + "\n")
