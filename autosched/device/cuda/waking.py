"""An idle device lowers its clock, to less than a fifth on an H100, and takes a while to raise it again: work before what is timed."""

from __future__ import annotations

import time
from collections.abc import Callable

from autosched.runtime.cuda.streams import Stream, StreamBackend

_WAKE_US = 200_000.0


class Waker:
    """Raises the clock of a device that one process times things on.

    Args:
        stream: where work goes.
        idle_s: seconds without anything timed after which the device counts as idle.
    """

    def __init__(self, backend: StreamBackend, stream: Callable[[], Stream], idle_s: float) -> None:
        self._backend = backend
        self._stream = stream
        self._idle_s = idle_s
        self._busy_s = -idle_s

    def wake(self) -> None:
        """Keep the device busy until its clock is where steady work finds it, if nothing was timed for a while."""
        if time.monotonic() - self._busy_s >= self._idle_s:
            with self._backend.on(self._stream()):
                self._backend.sleep(_WAKE_US)
            self._backend.synchronize()
            self.busy()

    def busy(self) -> None:
        """Something was timed until now."""
        self._busy_s = time.monotonic()
