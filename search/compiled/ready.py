"""Having the compiled code of the searches there before a job's time counts."""

from __future__ import annotations

import importlib
import sys

# Not ``leftover``: no job simulates thread blocks. ``anneal`` takes longest, and whoever does not compile it does the others meanwhile.
_SEARCHES = ("fluid", "policies", "beam", "beam_level", "random_search", "exact", "anneal")
_FIRST = (("fluid", "anneal"), ("policies",), ("shared", "moves"))
"""What each of several processes begins with: of what one of these lists needs, the others need little before it is there."""
PROCESSES = len(_FIRST)
"""How many processes have something to compile at once; with more of them nothing would be there earlier."""


def searches_loaded() -> bool:
    """Whether this process has them already."""
    return all(f"{__package__}.{name}" in sys.modules for name in _SEARCHES)


def load_searches(process: int = 0) -> None:
    """Import what the searches of a job call: under a second, but half a minute the first time on a machine, when numba compiles it.

    Processes that are given different numbers, from 0 on, and do so at once share the work.
    """
    for name in (*_FIRST[process], *_SEARCHES):
        importlib.import_module(f"{__package__}.{name}")


def load_kept() -> bool:
    """``load_searches`` as far as nothing has to be compiled that other processes could compile; whether that was all."""
    from autosched.search.compiled.cache import NotKept, only_what_is_kept

    with only_what_is_kept():
        try:
            load_searches()
        except NotKept:
            return False
    return True
