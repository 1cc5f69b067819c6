"""Regions that other processes compile while this one does something else: on a busy machine their start alone takes many seconds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from autosched.runtime.regions.pool import Made

_log = logging.getLogger(__name__)
_POLL_S = 0.25


class Beside:
    """Begins when it is made.

    Args:
        made: what other processes make, by key; taken in a thread of its own, which ends with it.
    """

    def __init__(self, made: Iterable[tuple[str, Made]]) -> None:
        self._found: list[tuple[str, Made]] = []
        self._thread = threading.Thread(target=self._collect, args=(made,), name="autosched-regions-beside", daemon=True)
        self._thread.start()

    def found(self, beat: Callable[[], None]) -> list[tuple[str, Made]]:
        """What came of each job, by key, when the last has ended; ``beat`` is called several times a second until then."""
        while self._thread.is_alive():
            beat()
            self._thread.join(_POLL_S)
        return self._found

    def _collect(self, made: Iterable[tuple[str, Made]]) -> None:
        try:
            for item in made:
                self._found.append(item)
        except Exception as error:
            # Whoever needs a region compiles it.
            _log.info("regions that were compiled beside other work are lost: %s", error)
