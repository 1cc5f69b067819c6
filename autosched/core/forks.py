"""What a forked process has to forget: threads that it does not have, and locks that nobody will give back.

Only the thread that forks lives on in the new process. A lock that another one held at that moment is held there for ever, and whoever asks
for it waits for ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from functools import lru_cache
from typing import Protocol


class OutlivesFork(Protocol):
    """Something with threads or locks."""

    def after_fork(self) -> None:
        """Forget threads that are gone, and locks that nobody will give back. Called in the new process, which has one thread."""


_alive: weakref.WeakSet[OutlivesFork] = weakref.WeakSet()


def outlive_forks(thing: OutlivesFork) -> None:
    """From now on ``thing`` is told of forks, for as long as it lives."""
    _register()
    _alive.add(thing)


class RenewedLock:
    """A lock that a forked process finds open, whoever held it: ``with renewed.lock:``.

    A new one in its place, so that a thread that forks within such a block may leave the block in both processes. Its thread may take it
    again: a signal's handler, or a finalizer that the garbage collector calls, may come to the same lines while it has it.
    """

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        outlive_forks(self)

    def after_fork(self) -> None:
        """Whoever held it is the parent's."""
        self.lock = threading.RLock()


def tell_all() -> None:
    """Tell all that outlives forks that this process was forked."""
    for thing in list(_alive):
        thing.after_fork()


@lru_cache(maxsize=1)
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=tell_all)
