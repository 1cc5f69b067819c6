"""Quotas of control groups, in both versions, as files lay them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosched.runtime import cores as cores_module
from autosched.runtime.cpu_quota import quota_cores, used_seconds
from tests.conformance.control_groups import written_groups


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"cpu.max": "200000 100000\n"}, "0::/\n", 2.0),  # in a container
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b\n", 4.0),  # a service's slice
        ({"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "300000 100000\n"}, "0::/a/b\n", 0.5),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:memory:/x\n3:cpu,cpuacct:/docker/1\n", 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3:cpu:/\n", None),
        ({"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, "3:cpu,cpuacct:/a\n2:memory:/b\n", 3.0),
        ({"cpu.max": "what is this\n"}, "no lines of ours\n", None),
        ({"cpu.max": "100000 0\n"}, "", None),
        ({}, None, None),
    ],
)
def test_the_strictest_quota_counts(tmp_path: Path, files: dict[str, str], own: str | None, cores: float | None) -> None:
    assert quota_cores(*written_groups(tmp_path, files, own)) == cores


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.5, 2), (0.5, 1), (64.0, 8)])
def test_usable_cores_are_what_quota_and_affinity_leave(quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "quota_cores", lambda: quota)
    monkeypatch.setattr(cores_module.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert cores_module.usable_cores() == cores


def test_the_time_of_a_group_is_known_where_the_system_tells(tmp_path: Path) -> None:
    assert used_seconds(tmp_path) == -1.0
    (tmp_path / "cpu.stat").write_text("nr_periods 3\nthrottled_time 5\n")  # version 1
    assert used_seconds(tmp_path) == -1.0
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1400000\n")
    assert used_seconds(tmp_path) == 1.5
