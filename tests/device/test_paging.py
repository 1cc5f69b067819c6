"""What the operating system gives a run anew is counted."""

from __future__ import annotations

import mmap
import sys

import pytest

from autosched.core.records import Paging
from autosched.device import paging
from autosched.device.paging import PagingMeter

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no getrusage")


def test_pages_that_are_touched_for_the_first_time_are_counted_and_the_others_not() -> None:
    size = 64 << 20
    fresh, kept = PagingMeter(), PagingMeter()
    for _ in range(3):
        with fresh, mmap.mmap(-1, size) as memory:
            for place in range(0, size, mmap.PAGESIZE):
                memory[place] = 1
    with mmap.mmap(-1, size) as memory:
        memory[:] = bytes(size)
        with kept:
            for place in range(0, size, mmap.PAGESIZE):
                memory[place] = 1
    read = fresh.read()
    # Whole tables of pages may come at once.
    assert read.anew_bytes > 0
    assert read.anew_bytes > 4 * kept.read().anew_bytes
    assert 0.0 <= read.system_share <= 1.0


def test_nothing_is_known_of_no_run_nor_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PagingMeter().read() == Paging()
    monkeypatch.setattr(paging, "resource", None)
    meter = PagingMeter()
    with meter:
        pass
    assert meter.read() == Paging()
