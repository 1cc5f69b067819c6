"""How much of the processor a container may use: its control group's quota, in version 2 and in version 1, its parents' included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def quota_cores(groups: Path = GROUPS, own: Path = OWN) -> float | None:
    """Cores' worth of time that the strictest quota leaves this process; ``None`` without one, and where there are no control groups.

    Args:
        groups: where control groups are mounted.
        own: which ones this process is in, a line for each hierarchy: ``number:controllers:path``.
    """
    found = quota_group(groups, own)
    return None if found is None else found[0]


def quota_group(groups: Path = GROUPS, own: Path = OWN) -> tuple[float, Path] | None:
    """The same, and the folder of the group whose processes share that quota."""
    quotas = [(quota, folder) for folder in group_folders("cpu", groups, own) if (quota := _quota(folder)) is not None]
    return min(quotas, key=lambda item: item[0], default=None)


def used_seconds(group: Path) -> float:
    """Processor time of all processes that are, or were, in a group and those below it; -1 where nobody tells, as in version 1."""
    try:
        lines = (group / "cpu.stat").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) / 1e6 for line in lines if line.startswith("usage_usec "))
    except (OSError, ValueError, IndexError, StopIteration):
        return -1.0


def group_folders(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """The process's group and all above it. In a container the path may be the host's, and the container's group the root of the mount.

    Args:
        controller: what is limited there, as version 1 names it: a hierarchy has some of them, version 2 has all in one.
        groups, own: as for :func:`quota_cores`.
    """
    yield groups
    yield groups / controller
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controller if controllers else groups
        parts = Path(path.strip("/")).parts
        for depth in range(1, len(parts) + 1):
            yield root.joinpath(*parts[:depth])


def _quota(folder: Path) -> float | None:
    try:
        if (modern := folder / "cpu.max").is_file():
            quota, period = modern.read_text(encoding="ascii").split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii").strip() for name in ("quota", "period"))
        # "max", and -1 in version 1, stand for no quota.
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
