"""Facts about this machine's processor, as far as the system tells them."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_CPU = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a schedule's speed on a CPU depends on.

    Args:
        name: of the processor model.
        architecture: for example ``x86_64``.
        cores: physical cores this process may use, after affinity and container limits; at least 1.
        caches_bytes: sorted ``(name, bytes)`` of one core's caches, for example ``("L2", 524288)``; empty if unknown.
        memory_bytes: of the machine; 0 if unknown.
    """

    name: str
    architecture: str
    cores: int
    caches_bytes: tuple[tuple[str, int], ...]
    memory_bytes: int


def host_facts() -> HostFacts:
    """Read them now."""
    return HostFacts(_processor_name(), platform.machine(), physical_cores(), _caches(), _memory_bytes())


def physical_cores() -> int:
    """Physical cores this process may use: by affinity, two threads of one core counted once, and within a container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = affinity(0) if affinity is not None else set(range(os.cpu_count() or 1))
    cores = {_read(_CPU / f"cpu{index}" / "topology" / "thread_siblings_list") or str(index) for index in usable}
    return max(1, min(len(cores), _quota()))


def _quota() -> int:
    limit, _, period = (_read(Path("/sys/fs/cgroup/cpu.max")) or "max 1").partition(" ")
    if limit.isdigit() and period.strip().isdigit() and int(period):
        return max(1, int(limit) // int(period))
    return 1 << 20


def _processor_name() -> str:
    text = _read(Path("/proc/cpuinfo")) or ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def _caches() -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for folder in sorted((_CPU / "cpu0" / "cache").glob("index*")):
        level, kind, size = (_read(folder / name) or "" for name in ("level", "type", "size"))
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 0)
        if level and unit and size[:-1].isdigit():
            suffix = {"Data": "d", "Instruction": "i"}.get(kind, "")
            found[f"L{level}{suffix}"] = int(size[:-1]) * unit
    return tuple(sorted(found.items()))


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
