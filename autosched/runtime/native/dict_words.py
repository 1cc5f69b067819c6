"""A word of memory for a dictionary that is another one after each write to it.

Up to Python 3.11 the interpreter keeps one in the dictionary itself. From 3.12 on it tells of each write whoever asks it to
(``PyDict_AddWatcher``; it has eight places for them), and the native library counts what it is told (``native/dictionaries.h``).
Python 3.13.0 tells nothing of attributes: whether all writes count is for the caller to try out (:func:`counts_every_write`).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from autosched.runtime.native.build import Library

# Where CPython up to 3.11 has the count of a dictionary's writes.
_COUNT = 24
_TELLS = hasattr(ctypes.pythonapi, "PyDict_AddWatcher")


def word_of_writes(library: Library, table: dict[Any, Any]) -> int:
    """The address of that word, which is there as long as ``table`` is.

    Raises:
        RuntimeError: if the interpreter tells as many others as it can.
    """
    if not _TELLS:
        # No read beyond an object's own memory.
        if type(table).__basicsize__ < _COUNT + 8:
            raise RuntimeError("dictionaries have no count of their writes here")
        return id(table) + _COUNT
    address = library.writes(id(table))
    ctypes.pythonapi.PyDict_Watch(_watcher(library), ctypes.py_object(table))
    return address


@lru_cache(maxsize=1)
def _watcher(library: Library) -> int:
    """Under which number this process is told; whatever it is asked to watch counts from then on."""
    return int(ctypes.pythonapi.PyDict_AddWatcher(ctypes.c_void_p(library.written)))
