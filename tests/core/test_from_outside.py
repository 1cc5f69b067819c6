"""What a signal's handler raises is told from what the work itself raises."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autosched.core.errors import AutoschedError
from autosched.core.from_outside import let_through


class Expired(RuntimeError):
    """A request has had its time."""


def _expire(*_: object) -> None:
    raise Expired


class _Handler:
    def __call__(self, number: int, frame: object) -> None:
        _expire()

    def method(self, number: int, frame: object) -> None:
        _expire()


_HANDLERS: dict[str, Any] = {
    "function": _expire,
    "partial": functools.partial(_expire, 1),
    "method": _Handler().method,
    "object": _Handler(),
    "lambda": lambda number, frame: _expire(),
}


@pytest.fixture
def usual() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def _work() -> None:
    signal.raise_signal(signal.SIGUSR1)


def _wrapping() -> None:
    try:
        _work()
    except Exception as error:
        raise AutoschedError("this cannot run here") from error


def _handled(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:
        let_through(error)
        return error
    return None


def _hiding() -> None:
    try:
        _work()
    except Exception:
        raise AutoschedError("this cannot run here") from None


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("work", [_work, _wrapping, _hiding])
@pytest.mark.parametrize("name", _HANDLERS)
def test_what_a_handler_raises_goes_through_whatever_was_made_of_it(name: str, work: Callable[[], None]) -> None:
    signal.signal(signal.SIGUSR1, _HANDLERS[name])
    with pytest.raises(Expired):
        _handled(work)


@pytest.mark.usefixtures("usual")
def test_what_the_work_raises_stays_where_it_is_also_within_a_handler() -> None:
    caught: list[Exception | None] = []

    def reload(number: int, frame: object) -> None:
        caught.append(_handled(lambda: int("none")))

    signal.signal(signal.SIGUSR1, reload)
    _work()
    assert isinstance(caught[0], ValueError)


@pytest.mark.usefixtures("usual")
def test_another_thread_has_no_handlers() -> None:
    signal.signal(signal.SIGUSR1, _expire)
    caught: list[Exception | None] = []
    thread = threading.Thread(target=lambda: caught.append(_handled(_expire)))
    thread.start()
    thread.join()
    assert isinstance(caught[0], Expired)
