"""What runs pay for memory that the C library gives back to the operating system after each, and takes again for the next.

glibc maps every tensor beyond a size of at most 32 MiB by itself, and unmaps it when it is freed: the system then clears its pages anew
in each run. Of a SwinUNETR on 64 x 64 x 64 voxels, that was half of the time.
"""

from __future__ import annotations

import importlib.util
import statistics
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from autosched.core.records import Paging

# Not on Windows.
resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None


@dataclass(slots=True)
class PagingMeter:
    """Counts over several runs of one schedule: enter it for each of them."""

    _began: tuple[int, float, float] = (0, 0.0, 0.0)
    _pages: list[int] = field(default_factory=list)
    _user_s: float = 0.0
    _system_s: float = 0.0

    def __enter__(self) -> None:
        self._began = _counters()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pages, user_s, system_s = (now - before for now, before in zip(_counters(), self._began, strict=True))
        self._pages.append(int(pages))
        self._user_s += user_s
        self._system_s += system_s

    def read(self) -> Paging:
        """One run's memory, the median, and the share of all of them."""
        if resource is None or not self._pages:
            return Paging()
        taken_s = self._user_s + self._system_s
        anew = int(statistics.median(self._pages)) * resource.getpagesize()
        return Paging(anew, self._system_s / taken_s if taken_s else 0.0)


def _counters() -> tuple[int, float, float]:
    """Pages that this process was given so far, and its processor time in seconds: its own, and the system's for it."""
    if resource is None:
        return 0, 0.0, 0.0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_utime, usage.ru_stime
