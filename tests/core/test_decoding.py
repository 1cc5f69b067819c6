"""Decoders are made one at a time, whoever asks: msgspec crashes where two threads look at one class for the first time."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autosched.core import decoding
from autosched.core.decoding import decode_json, decoder_of

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Inner:
    number: int


@dataclasses.dataclass(frozen=True)
class Outer:
    items: tuple[Inner, ...]


def test_values_come_back_and_what_is_no_value_is_refused() -> None:
    assert decode_json(b'{"items": [{"number": 3}]}', Outer) == Outer((Inner(3),))
    assert decode_json("[1, 2]", tuple[int, ...]) == (1, 2)
    with pytest.raises(msgspec.ValidationError):
        decode_json(b'{"items": [3]}', Outer)


def test_no_text_and_what_is_nested_too_deep_are_refused_like_everything_else() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_json(b'["\xff"]', tuple[str, ...])
    with pytest.raises(msgspec.DecodeError):
        decode_json(b'{"items": [], "note": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", Outer)


def test_threads_that_begin_at_once_make_one_decoder_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [dataclasses.make_dataclass(f"Kind{index}", [("number", int)]) for index in range(4)]
    under_way, most, made = 0, 0, []

    class Slow:
        def __init__(self, kind: Any) -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            time.sleep(0.005)
            made.append(kind)
            under_way -= 1

    monkeypatch.setattr(decoding.msgspec.json, "Decoder", Slow)
    start = threading.Barrier(8)

    def ask(index: int) -> Any:
        start.wait()
        return decoder_of(kinds[index % len(kinds)])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert most == 1
    assert sorted(made, key=kinds.index) == kinds
    assert found[:4] == found[4:]


def test_nothing_else_makes_decoders() -> None:
    own = Path(decoding.__file__)
    files = [path for folder in ("autosched", "costmodel", "datasets", "search") for path in (ROOT / folder).rglob("*.py") if path != own]
    assert len(files) > 100
    typed = re.compile(r"msgspec\.(?:json|msgpack)\.(?:decode\([^\n]*\btype=|Decoder\()|msgspec\.convert\(")
    assert [path.name for path in files if typed.search(path.read_text(encoding="utf-8"))] == []
