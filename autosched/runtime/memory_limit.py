"""How much memory a container may still take: its control group's limit, in version 2 and in version 1, its parents' included."""

from __future__ import annotations

from pathlib import Path

from autosched.runtime.cpu_quota import GROUPS, OWN, group_folders


def free_in_groups(groups: Path = GROUPS, own: Path = OWN) -> int | None:
    """Bytes that the strictest limit leaves this process; ``None`` without one, and where there are no control groups.

    Args:
        groups, own: as for ``cpu_quota.quota_cores``.
    """
    free = [left for folder in group_folders("memory", groups, own) if (left := _free(folder)) is not None]
    return min(free, default=None)


def _free(folder: Path) -> int | None:
    modern = (folder / "memory.max").is_file()
    names = ("memory.max", "memory.current", "inactive_file")
    limit_name, used_name, cached = names if modern else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        limit, used = ((folder / name).read_text(encoding="ascii").strip() for name in (limit_name, used_name))
        # "max" stands for no limit; in version 1 it is a number larger than any memory.
        return None if limit == "max" else max(0, int(limit) - int(used) + _given_back(folder, cached))
    except (OSError, ValueError):
        return None


def _given_back(folder: Path, cached: str) -> int:
    """Bytes of files that count as used, and are dropped when somebody wants memory."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(f"{cached} "))
    except (OSError, ValueError, IndexError):
        return 0
