"""Having the compiled code of the searches there before a job's time counts."""

from __future__ import annotations

import importlib
import sys

# Not ``leftover``: no job simulates thread blocks.
_SEARCHES = ("fluid", "policies", "anneal", "random_search", "beam", "beam_level", "exact")


def searches_loaded() -> bool:
    """Whether this process has them already."""
    return all(f"{__package__}.{name}" in sys.modules for name in _SEARCHES)


def load_searches() -> None:
    """Import what the searches of a job call: under a second, but ten the first time on a machine, when numba compiles it."""
    for name in _SEARCHES:
        importlib.import_module(f"{__package__}.{name}")
