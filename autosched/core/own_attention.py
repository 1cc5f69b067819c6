"""For how many queries and keys attention on a CPU is computed by a kernel of our own."""

from __future__ import annotations

# With fewer queries copying keys takes longer than it saves; more keys would have their copies leave the caches.
_LEAST_QUERIES, _MOST_KEYS = 8, 4096


def fit_own_kernel(queries: int, keys: int) -> bool:
    """Whether the kernel is for so many."""
    return queries >= _LEAST_QUERIES and keys <= _MOST_KEYS
