"""How many threads a fit may use: small fits one, because splitting them costs more than it gains and disturbs who measures beside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SMALL = 50_000
"""Rows below which one thread takes seconds; two are little faster on two free cores, and many times slower where one is taken."""


@contextmanager
def threads_for(rows: int) -> Iterator[None]:
    """Limit torch to one thread inside, for a batch of fewer than :data:`SMALL` rows; the former number afterwards."""
    import torch

    before = torch.get_num_threads()
    if rows < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
