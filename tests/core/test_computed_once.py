"""A property that is computed once, and keeps nobody waiting."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from autosched.core.computed_once import computed_once


@dataclass(frozen=True)
class Slow:
    """Waits until it may compute."""

    may: threading.Event
    begun: threading.Event

    @computed_once
    def value(self) -> list[int]:
        """What it computes."""
        self.begun.set()
        assert self.may.wait(60.0)
        return [1]


def test_it_is_computed_once_and_documented() -> None:
    free = threading.Event()
    free.set()
    slow = Slow(free, threading.Event())
    assert slow.value is slow.value == [1]
    assert Slow.value.__doc__ == "What it computes."


def test_nobody_waits_for_a_thread_that_computes_it() -> None:
    # A process forked here has no such thread: it would wait for ever, as with functools.cached_property of Python 3.11.
    held, free = threading.Event(), threading.Event()
    free.set()
    first, second = Slow(held, threading.Event()), Slow(free, threading.Event())
    thread = threading.Thread(target=lambda: first.value)
    thread.start()
    assert first.begun.wait(60.0)
    other = threading.Thread(target=lambda: second.value, daemon=True)
    other.start()
    other.join(30.0)
    stuck = other.is_alive()
    held.set()
    thread.join()
    assert not stuck
    assert "value" in vars(second)


def test_the_value_of_the_first_thread_to_end_stays() -> None:
    held = threading.Event()
    slow = Slow(held, threading.Event())
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(slow.value)) for _ in range(2)]
    for thread in threads:
        thread.start()
    held.set()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is slow.value
