"""Regions that other processes compile while this one does something else: on a busy machine their start alone takes many seconds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from autosched.runtime.regions.pool import Made
from autosched.runtime.regions.store import RegionStore

_log = logging.getLogger(__name__)
_POLL_S = 0.25


class Beside:
    """Begins when it is made.

    Args:
        made: what ``pool.compile_apart`` makes, by key; taken in a thread of its own, which ends with it.
        store: where regions are kept at once: this process may be lost to what it does meanwhile.
    """

    def __init__(self, made: Iterable[tuple[str, Made]], store: RegionStore | None) -> None:
        self._store = store
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
            for key, item in made:
                if item.source and self._store is not None:
                    self._store.put(key, item.source)
                self._found.append((key, item))
        except Exception as error:
            # Whoever needs a region compiles it.
            _log.info("regions that were compiled beside other work are lost: %s", error)
