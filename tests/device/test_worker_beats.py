"""While a worker does one long thing, another thread of it shows that it is alive, though not for ever."""

from __future__ import annotations

import time
from typing import cast

import pytest

from autosched.device import worker_child
from autosched.device.worker_child import Channel
from tests.conformance.waiting import wait_until


class _Board:
    def __init__(self) -> None:
        self.items: list[int] = []

    def beat(self, item: int) -> None:
        self.items.append(item)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_child, "_BEAT_S", 0.02)


def test_beats_while_the_block_runs_and_not_after() -> None:
    board = _Board()
    with Channel.working(cast(Channel, board), 1000.0):
        assert wait_until(lambda: len(board.items) >= 2)
    found = len(board.items)
    assert set(board.items) == {-1}
    time.sleep(0.2)
    assert len(board.items) == found


def test_no_beats_beyond_the_limit() -> None:
    board = _Board()
    with Channel.working(cast(Channel, board), 0.0):
        time.sleep(0.2)
    assert board.items == []


def test_beats_end_when_the_block_fails() -> None:
    board = _Board()

    def fails() -> None:
        assert wait_until(lambda: bool(board.items))
        raise KeyError

    with pytest.raises(KeyError), Channel.working(cast(Channel, board), 1000.0):
        fails()
    found = len(board.items)
    time.sleep(0.2)
    assert len(board.items) == found
