"""To wait for what happens in other threads or processes: as long as it needs on a busy machine, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")


def wait_until(done: Callable[[], bool], within_s: float = 60.0) -> bool:
    """Whether ``done()`` became true; ``within_s`` is only there so that a test that fails ends."""
    deadline = time.monotonic() + within_s
    while not (found := done()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def at_once(work: Callable[[_Item], object], items: Iterable[_Item]) -> None:
    """Call ``work`` with each of ``items``, each in a thread of its own, and wait for all of them."""
    threads = [threading.Thread(target=work, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
