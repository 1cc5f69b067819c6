"""A dictionary's word changes with every write to it, and with nothing else."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

from autosched.runtime.native import dict_words
from autosched.runtime.native.build import Library, native_library
from autosched.runtime.native.dict_words import word_of_writes
from autosched.runtime.native.watch import Watched, native_watch

pytestmark = pytest.mark.usefixtures("native_watches")


@pytest.fixture
def library() -> Library:
    found = native_library()
    assert found is not None
    return found


def _read(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def test_each_dictionary_has_a_word_of_its_own(library: Library) -> None:
    first: dict[str, Any] = {"a": 1}
    second: dict[str, Any] = {"a": 1}
    words = [word_of_writes(library, table) for table in (first, second)]
    before = [_read(word) for word in words]
    first["a"] = 2
    after = [_read(word) for word in words]
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_asking_again_is_no_write(library: Library) -> None:
    table: dict[str, Any] = {"a": 1}
    word = word_of_writes(library, table)
    before = _read(word)
    assert word_of_writes(library, table) == word
    assert _read(word) == before


def test_a_word_stays_where_it_is_while_others_come_and_go(library: Library) -> None:
    table: dict[str, Any] = {"a": 1}
    word = word_of_writes(library, table)
    for _ in range(3):
        others = [{"a": index} for index in range(2000)]
        for other in others:
            word_of_writes(library, other)
            other["a"] = -1
        del others, other
        gc.collect()
    before = _read(word)
    table.update(a=2)
    assert word_of_writes(library, table) == word
    assert _read(word) != before


def test_where_the_interpreter_can_tell_nobody_else_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(library: Library) -> int:
        raise RuntimeError("no more dict watcher IDs available")

    monkeypatch.setattr(dict_words, "_watcher", full)
    if not dict_words._TELLS:
        monkeypatch.setattr(dict_words, "_COUNT", 1 << 20)
    assert native_watch(Watched(tables=({"a": 1},))) is None
