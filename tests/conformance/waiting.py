"""To wait for what happens in another thread or process: as long as it needs on a busy machine, and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(done: Callable[[], bool], within_s: float = 60.0) -> bool:
    """Whether ``done()`` became true; ``within_s`` is only there so that a test that fails ends."""
    deadline = time.monotonic() + within_s
    while not (found := done()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
