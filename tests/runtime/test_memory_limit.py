"""Memory limits of control groups, in both versions, as files lay them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosched.runtime.memory_limit import free_in_groups
from autosched.runtime.regions import pool
from tests.conformance.control_groups import written_groups

_NO_LIMIT = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("files", "own", "free"),
    [
        ({"memory.max": "1000\n", "memory.current": "700\n"}, "0::/\n", 300),  # in a container
        ({"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 500\ninactive_file 150\n"}, "0::/\n", 450),
        ({"memory.max": "1000\n", "memory.current": "1100\n"}, "0::/\n", 0),
        ({"memory.max": "max\n", "memory.current": "700\n"}, "0::/\n", None),
        (
            {"a/memory.max": "900\n", "a/memory.current": "800\n", "a/b/memory.max": "500\n", "a/b/memory.current": "300\n"},
            "0::/a/b\n",
            100,  # the slice has less left than its service
        ),
        (
            {
                "memory/a/memory.limit_in_bytes": "1000\n",
                "memory/a/memory.usage_in_bytes": "600\n",
                "memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
            },
            "3:cpu,cpuacct:/b\n2:memory:/a\n",
            450,
        ),
        ({"memory/memory.limit_in_bytes": _NO_LIMIT, "memory/memory.usage_in_bytes": "0\n"}, "2:memory:/\n", int(_NO_LIMIT)),
        ({"memory.max": "what is this\n", "memory.current": "1\n"}, "no lines of ours\n", None),
        ({"memory.max": "1000\n"}, "", None),
        ({}, None, None),
    ],
)
def test_the_strictest_limit_counts(tmp_path: Path, files: dict[str, str], own: str | None, free: int | None) -> None:
    assert free_in_groups(*written_groups(tmp_path, files, own)) == free


def test_compilers_keep_within_a_containers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of 8 GiB on a machine of 96 cores started as many compilers as there were cores."""
    monkeypatch.delenv("AUTOSCHED_COMPILE_WORKERS", raising=False)
    monkeypatch.setattr(pool, "usable_cores", lambda: 96)
    monkeypatch.setattr(pool, "_free_machine_bytes", lambda: 512 << 30)
    monkeypatch.setattr(pool, "free_in_groups", lambda: 7 << 30)
    assert pool.worker_count(1000) == 3
    monkeypatch.setattr(pool, "free_in_groups", lambda: None)
    assert pool.worker_count(1000) == 96
