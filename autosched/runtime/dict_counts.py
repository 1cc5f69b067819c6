"""Whether dictionaries were written to since they were looked at, without a look at what is in them.

The interpreter counts the writes to dictionaries for those who keep copies of what is in them, and PyTorch reads that count for Dynamo's
guards. The function is private there: where it is absent, or does not count what it must, nobody knows, and all has to be looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

_Table = dict[Any, Any]


class DictCounts:
    """The writes to some dictionaries, counted together; theirs alone, not those to dictionaries in them.

    Args:
        tables: the dictionaries, which are held. Python 3.12 does not count an ``update`` of an empty one.
    """

    __slots__ = ("_read", "_tables")

    def __init__(self, tables: Iterable[_Table]) -> None:
        self._tables = list({id(table): table for table in tables}.values())
        self._read = _reader()
        # From Python 3.12 on the first reading marks a dictionary as watched, which must not look like a write to whoever counts otherwise.
        self.now()

    @property
    def tables(self) -> Sequence[_Table]:
        """The dictionaries, each once."""
        return self._tables

    def now(self) -> int | None:
        """A number that is another one after each write; ``None`` if that cannot be told."""
        # Every write raises the count of one of them, and nothing lowers any: the sum stays only where all stay.
        return None if self._read is None else sum(map(self._read, self._tables))


@lru_cache(maxsize=1)
def _reader() -> Callable[[_Table], int] | None:
    """Reads the count of one dictionary, if this PyTorch can."""
    try:
        from torch._C._dynamo.guards import dict_version
    except ImportError:
        return None
    read: Callable[[_Table], int] = dict_version
    return read if counts_every_write(read) else None


def counts_every_write(read: Callable[[_Table], int]) -> bool:
    """Whether ``read`` gives a dictionary's count, as far as can be tried: every kind of write raises it, and nothing else does."""
    try:
        return all(_rises(read, table) for table in ({"a": 1}, OrderedDict(a=1), _Holder().__dict__)) and _attributes_rise(read)
    except (TypeError, RuntimeError, SystemError):
        return False


class _Holder:
    """Something with attributes, which the interpreter may keep elsewhere than in a dictionary."""

    def __init__(self) -> None:
        self.first: object = 1
        self.second: object = 2


def _rises(read: Callable[[_Table], int], table: _Table) -> bool:
    """Whether every kind of write raises the count of ``table``, which is not empty, and reading does not."""
    writes: tuple[Callable[[], object], ...] = (
        lambda: table.__setitem__("new", []),
        lambda: table.__setitem__("new", []),
        lambda: table.update(new=[], other=[]),
        lambda: table.setdefault("third", []),
        lambda: table.__ior__({"new": []}),
        lambda: table.pop("new"),
        lambda: table.__delitem__("other"),
        table.popitem,
        table.clear,
        lambda: table.__setitem__("again", []),
    )
    return all(_raised(read, table, write) for write in writes)


def _attributes_rise(read: Callable[[_Table], int]) -> bool:
    """The same of attributes, which the interpreter stores in ways of its own once it has seen a statement a few times."""
    holder = _Holder()

    def write() -> None:
        holder.first = []

    others = (lambda: delattr(holder, "second"), lambda: setattr(holder, "third", []), lambda: setattr(holder, "second", []))
    return all(_raised(read, holder.__dict__, each) for each in (*[write] * 64, *others))


def _raised(read: Callable[[_Table], int], table: _Table, write: Callable[[], object]) -> bool:
    before = read(table)
    write()
    return read(table) == read(table) > before
