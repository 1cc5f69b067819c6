"""Digests of plain values, by which graphs, operators and kernels are known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec


def digest_of(*parts: object) -> bytes:
    """sha256 of the parts as JSON."""
    return hashlib.sha256(msgspec.json.encode(parts)).digest()


class GrowingDigest:
    """:func:`digest_of` of parts that are added one by one: each is hashed once, however many calls a fused operator has.

    >>> growing = GrowingDigest(["a"])
    >>> growing.add(1)
    >>> growing.digest() == digest_of("a", 1)
    True
    """

    def __init__(self, parts: Iterable[object] = ()) -> None:
        self._hash = hashlib.sha256(b"[")
        self._begun = False
        for part in parts:
            self.add(part)

    def add(self, part: object) -> None:
        """One more part."""
        self._hash.update((b"," if self._begun else b"") + msgspec.json.encode(part))
        self._begun = True

    def digest(self) -> bytes:
        """Of the parts so far."""
        closed = self._hash.copy()
        closed.update(b"]")
        return closed.digest()
