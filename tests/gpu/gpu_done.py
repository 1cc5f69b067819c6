"""What earlier runs of the GPU tests did, in a file: a GPU that is lent for minutes is not asked again what it has answered.

With ``--gpu-done FILE`` a test that has passed in an earlier run is left out, one that failed or never ended comes after those that
have not been tried, and a run whose time is over stops there and ends with status 10 instead of failing what it did not reach. Each line
of the file is one event of one test, with all that a failure says: a process that is ended by force has no summary.
"""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from experiments.calls import LEFT
from experiments.devices import commit

_BEGUN, _PASSED, _SKIPPED, _FAILED = "begun", "passed", "skipped", "failed"


class Done:
    """A plugin of pytest.

    Args:
        target: the file; what is there is gone on with.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._commit = commit()
        self._earlier = _last_events(target)
        self._open: list[str] = []
        self._failed: set[str] = set()
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what is done, and put what may break this process as well behind everything else."""
        known = {item: self._earlier.get(item.nodeid, "") for item in items}
        done = [item for item in items if known[item] in (_PASSED, _SKIPPED)]
        items[:] = sorted((item for item in items if item not in done), key=lambda item: known[item] != "")
        config.hook.pytest_deselected(items=done)
        self._open = [item.nodeid for item in items]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A process that dies in this test must leave its name."""
        self._reports = []
        self._write(nodeid, _BEGUN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """What came out, after the last of a test's three phases."""
        self._reports.append(report)
        if report.when != "teardown":
            return
        outcomes = {each.outcome for each in self._reports}
        outcome = next((each for each in (_FAILED, _SKIPPED) if each in outcomes), _PASSED)
        if outcome == _FAILED:
            self._failed.add(report.nodeid)
        self._open.remove(report.nodeid)
        took_s = sum(each.duration for each in self._reports)
        why = "\n".join(each.longreprtext for each in self._reports if each.outcome != _PASSED)
        self._write(report.nodeid, outcome, took_s=round(took_s, 2), **({"why": why} if why else {}))

    def cut_off(self, nodeid: str) -> None:
        """The time was over while this one ran: if it failed, that was why."""
        if nodeid in self._failed:
            self._failed.remove(nodeid)
            self._open.append(nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """10 if a further run has something to do that this one did not come to."""
        stopped = exitstatus == pytest.ExitCode.INTERRUPTED and bool(session.shouldstop)
        if stopped or exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = LEFT if self._open else int(bool(self._failed))

    def _write(self, test: str, outcome: str, **more: object) -> None:
        event = {"test": test, "outcome": outcome, "at": datetime.now(UTC).isoformat(timespec="seconds"), "commit": self._commit, **more}
        self._target.parent.mkdir(parents=True, exist_ok=True)
        with self._target.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def _last_events(target: Path) -> dict[str, str]:
    """The last outcome of each test; a line that was cut off says nothing."""
    last: dict[str, str] = {}
    for line in target.read_text(encoding="utf-8").splitlines() if target.exists() else []:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            last[event["test"]] = event["outcome"]
    return last
