"""Where a job's time goes: a clock that stops at every stage the progress line shows."""

from __future__ import annotations

import time

from autosched.core.progress import OUTSIDE, Progress
from autosched.core.report import StageTime


class StageClock:
    """A ``Progress`` that passes everything on and adds up the seconds of each stage.

    The budget counts from the first stage that says how much of it is left; what came before (capture, the first process's start) does not,
    nor does what comes after a stage that is ``OUTSIDE``, up to the next one that says how much is left.
    """

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        self._seconds: dict[tuple[str, bool], float] = {}
        self._name = ""
        self._counts = False
        self._since_s = time.monotonic()

    def stage(self, name: str, left_s: float | None = None) -> None:
        """As ``Progress.stage``; the stage before is over."""
        self._stop()
        self._name = name
        if left_s is not None:
            self._counts = left_s != OUTSIDE
        self._inner.stage(name, left_s)

    def update(
        self, *, done: int, total: int, incumbent: str = "", measured: int = 0, failed: int = 0, left_s: float | None = None
    ) -> None:
        """As ``Progress.update``."""
        self._inner.update(done=done, total=total, incumbent=incumbent, measured=measured, failed=failed, left_s=left_s)

    def times(self) -> tuple[StageTime, ...]:
        """Every stage up to now, in the order they first came; a stage that came again has the seconds of all its turns."""
        self._stop()
        return tuple(StageTime(name, seconds, counts) for (name, counts), seconds in self._seconds.items())

    def _stop(self) -> None:
        now_s = time.monotonic()
        if self._name:
            key = self._name, self._counts
            self._seconds[key] = self._seconds.get(key, 0.0) + now_s - self._since_s
        self._since_s = now_s
