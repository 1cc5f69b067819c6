"""A measuring process that imports what it needs while the model is still being captured."""

from __future__ import annotations

from collections.abc import Callable

from autosched.device.worker import Worker


class EarlyWorker:
    """What makes a device ``base.StartsEarly``: at most one process, waiting for the session that takes it.

    Args:
        make: a worker that has not started, with the given patience in seconds.
        compiling_for: the kind of device, where nothing that is measured at first is disturbed by compilers beside it.
    """

    def __init__(self, make: Callable[[float], Worker], compiling_for: str = "") -> None:
        self._make = make
        self._compiling_for = compiling_for
        self._early: Worker | None = None

    def start_early(self, *, timeout_s: float, compiling: bool = False) -> None:
        """As ``base.StartsEarly.start_early``."""
        if self._early is None:
            self._early = self._make(timeout_s)
            self._early.start(compiling_for=self._compiling_for if compiling else "")

    def drop_early(self) -> None:
        """As ``base.StartsEarly.drop_early``."""
        early, self._early = self._early, None
        if early is not None:
            early.close()

    def take_early(self, timeout_s: float) -> Worker | None:
        """The process that waits, if it has this patience; it is then the caller's."""
        if self._early is None or self._early.timeout_s != timeout_s:
            return None
        early, self._early = self._early, None
        return early
