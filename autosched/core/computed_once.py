"""A property that is computed when it is first asked for, and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

_T = TypeVar("_T")


class computed_once(Generic[_T]):
    """``functools.cached_property`` as it is from Python 3.12 on.

    In 3.11 it holds a lock while it computes, one for all instances. A process that is forked while another thread of its parent does so
    waits for that lock for ever. Here two threads may compute at the same time, and the value of the first to end stays.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...

    def __get__(self, instance: object | None, owner: type) -> Self | _T:
        # Asked only until the value is in the instance's dictionary, which comes before this.
        if instance is None:
            return self
        value: _T = vars(instance).setdefault(self._name, self._compute(instance))
        return value
