"""What is written down of an object that was taken apart (``core.containers``): its class by name, its attributes, and which it was."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

OPENED = "autosched.opened"
DICTIONARY = "dict"
PLAIN = frozenset((bool, int, float, str, type(None)))

Mark = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """An object without what it holds.

    Args:
        kind: ``module.qualified name`` of its class, or ``dict``.
        names: of its attributes, one for each child; of a dictionary the keys, as JSON.
        notes: ``(attribute, what, of what)``: a dtype or device that is that of the tensor attribute named last, or a class.
    """

    kind: str
    names: tuple[str, ...]
    notes: tuple[tuple[str, str, str], ...] = ()


@lru_cache(maxsize=4096)
def read_context(context: object) -> tuple[Form, Mark]:
    """What a node of the kind ``OPENED`` says of an object.

    Raises:
        ValueError: if it says nothing that can be read.
    """
    parsed = json.loads(context) if isinstance(context, str) else None
    if not (isinstance(parsed, list) and len(parsed) == 4 and isinstance(parsed[0], str)):
        raise ValueError("an object is not described by its class, names, notes and mark")
    kind, names, notes, mark = parsed
    texts = [names, *notes] if isinstance(notes, list) else [None]
    if not all(isinstance(item, list) and all(isinstance(text, str) for text in item) for item in texts):
        raise ValueError(f"the names within a {kind[:80]} are not text")
    if any(len(note) != 3 for note in notes) or len(set(names)) < len(names):
        raise ValueError(f"the notes on a {kind[:80]} are incomplete, or it has two things of one name")
    if not (isinstance(mark, list) and len(mark) <= 2 and all(type(number) is int and number >= 0 for number in mark)):
        raise ValueError(f"a {kind[:80]} has the mark {str(mark)[:80]}")
    if kind == DICTIONARY:
        for name in names:
            read_key(name)
    return Form(kind, tuple(names), tuple((note[0], note[1], note[2]) for note in notes)), tuple(mark)


def read_key(name: str) -> Any:
    """The key of a dictionary that stands as JSON in ``Form.names``.

    Raises:
        ValueError: if it is none.
    """
    try:
        return _key_of(json.loads(name))
    except RecursionError as error:
        raise ValueError("a key is nested too deeply") from error


def _key_of(read: object) -> Any:
    if isinstance(read, list):
        return tuple([_key_of(part) for part in read])
    if type(read) not in PLAIN:
        raise ValueError(f"a {type(read).__name__} as a key")
    return read
