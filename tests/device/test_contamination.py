"""Foreign load: a share, or unknown, never a guess."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autosched.device import contamination
from autosched.device.contamination import LoadMark, LoadMeter, foreign_load, mark_job, mark_load


def test_share_of_what_is_not_ours() -> None:
    before = LoadMark(wall_s=0.0, busy_s=100.0, own_s=10.0, cores=2)
    assert foreign_load(before, LoadMark(1.0, 101.5, 11.0, 2)) == pytest.approx(0.25)
    assert foreign_load(before, LoadMark(1.0, 102.0, 10.0, 2)) == pytest.approx(1.0)
    assert foreign_load(before, LoadMark(1.0, 100.5, 11.0, 2)) == 0.0  # ticks lag behind our own clock


@pytest.mark.parametrize(
    "after",
    [LoadMark(1.0, -1.0, 11.0, 2), LoadMark(1.0, 101.0, 11.0, 4), LoadMark(0.01, 100.02, 10.01, 2)],
    ids=["unread", "cores", "short"],
)
def test_unknown_is_said(after: LoadMark) -> None:
    assert foreign_load(LoadMark(0.0, 100.0, 10.0, 2), after) == -1.0


def test_under_a_quota_only_what_takes_from_it_counts() -> None:
    """On a host of 64 cores, of which the process's group may use two."""
    before = LoadMark(0.0, 100.0, 10.0, 64, 2.0, 20.0)
    # Half of the host is busy: 32 cores are free for the two.
    assert foreign_load(before, LoadMark(1.0, 132.0, 12.0, 64, 2.0, 22.0)) == 0.0
    assert foreign_load(before, LoadMark(1.0, 164.0, 11.0, 64, 2.0, 21.0)) == pytest.approx(0.5)
    # Another process of the same group takes half of the quota, and hardly any of the host.
    assert foreign_load(before, LoadMark(1.0, 102.0, 11.0, 64, 2.0, 22.0)) == pytest.approx(0.5)
    assert foreign_load(replace(before, shared_s=-1.0), LoadMark(1.0, 102.0, 11.0, 64, 2.0)) == 0.0
    # What a quota has beyond whole cores is there for others.
    assert foreign_load(before, LoadMark(1.0, 102.0, 12.0, 64, 2.5, 22.5)) == 0.0
    assert foreign_load(replace(before, cores=2), LoadMark(1.0, 101.5, 11.0, 2, 8.0, 40.0)) == pytest.approx(0.25)


@pytest.mark.parametrize("quota", [None, 2.5])
def test_a_mark_knows_of_a_quota(quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    monkeypatch.setattr(contamination, "quota_group", lambda: None if quota is None else (quota, tmp_path))
    mark = mark_load()
    assert (mark.quota, mark.shared_s) == ((math.inf, -1.0) if quota is None else (2.5, 2.5))


def test_own_work_is_not_foreign() -> None:
    start, begin_s = mark_load(), time.process_time()
    while time.process_time() - begin_s < 0.3:
        sum(range(1000))
    end = mark_load()
    own_s = end.own_s - start.own_s
    assert own_s >= 0.25
    if end.busy_s > start.busy_s:  # else nobody can read it here
        # Ticks of 10 ms, on every core.
        assert end.busy_s - start.busy_s >= own_s - 0.01 * (1 + end.cores)
        assert foreign_load(start, end) <= 1 - own_s / ((end.wall_s - start.wall_s) * end.cores) + 0.1


def test_a_short_window_is_stretched_to_an_earlier_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = iter([LoadMark(0.0, 10.0, 1.0, 2), LoadMark(0.20, 10.3, 1.0, 2), LoadMark(0.25, 10.3, 1.0, 2)])
    monkeypatch.setattr(contamination, "mark_load", lambda: next(marks))
    meter = LoadMeter()
    assert meter.read(meter.start()).foreign_load == pytest.approx(0.3 / (0.25 * 2))


def test_where_nothing_can_be_read_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(contamination, "time", SimpleNamespace(monotonic=lambda: float(next(seconds)), process_time=lambda: 0.0))
    monkeypatch.setattr(contamination, "_busy_seconds", lambda: (-1.0, 0))
    meter = LoadMeter()
    assert meter.read(meter.start()).foreign_load == -1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells")
def test_what_a_job_has_started_is_its_own_while_it_runs_and_afterwards() -> None:
    working = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    # The shell's child is the job's grandchild.
    command = ["/bin/sh", "-c", f'{sys.executable} -S -c "$0"; true', working]
    start, start_alone = mark_job(), mark_load()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        alive = mark_job()
        process.communicate("\n")
    ended = mark_job()
    assert alive.own_s - start.own_s >= 0.28  # ticks of 10 ms
    assert ended.own_s - start.own_s >= 0.28
    # What has ended is known without a look at the others.
    assert mark_load().own_s - start_alone.own_s >= 0.28
