"""For how many queries and keys attention on a CPU is computed by a kernel of our own."""

from __future__ import annotations

# With fewer queries copying keys takes longer than it saves: they are read as they lie. Of more keys the copies would leave the caches.
# ``kFewQueries`` of ``few_queries.h`` is the same.
_FEW_QUERIES, _MOST_KEYS = 8, 4096
# The scores of few queries are all kept until their results are there.
_MOST_KEYS_OF_FEW = 32768


def fit_own_kernel(queries: int, keys: int) -> bool:
    """Whether the kernel is for so many."""
    return keys <= (_MOST_KEYS_OF_FEW if queries < _FEW_QUERIES else _MOST_KEYS)
