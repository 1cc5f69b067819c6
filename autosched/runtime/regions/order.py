"""Which regions are compiled first: where there is no time for all, those that have been compiled should be the ones that gain most.

Nothing has been timed by then. What a region saves is estimated by the memory that its calls would move between them, and by the calls that
are no longer made; a compiler takes about as long for one region as for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autosched.core.graph import OpGraph
from autosched.runtime.regions.pieces import Piece
from autosched.runtime.regions.row_products import is_row_product

# What calling a kernel takes, in bytes that a core moves meanwhile: some microseconds at ten gigabytes a second.
_CALL_BYTES = 1 << 16
# A schedule that is worth having with few regions compiled is mostly the sequential one, in which operators have all threads.
_NARROW = 0.5


@dataclass(frozen=True, slots=True)
class Wanted:
    """A piece of an operator that is to be compiled for ``width`` threads in a variant.

    Args:
        key: the same for all pieces that one compiled region serves.
        gain_bytes: as :func:`gain_bytes` estimates it.
    """

    key: str
    operator: int
    place: int
    width: int
    variant: int
    gain_bytes: int


def gain_bytes(piece: Piece, graph: OpGraph) -> int:
    """How many bytes fewer a run moves if ``piece`` is compiled, what its calls cost besides included."""

    def moved(values: Sequence[int]) -> int:
        return sum(graph.values[value].spec.bytes for value in dict.fromkeys(values) if value >= 0)

    apart = sum(moved(call.reads()) + moved(call.outputs) + _CALL_BYTES for call in piece.calls)
    together = moved(piece.reads) + moved(piece.writes) + _CALL_BYTES
    # Compiled, it reads a matrix as it is kept, and at the pace of memory.
    rows = sum(moved(call.reads()) for call in piece.calls if is_row_product(call, graph))
    return max(apart - together, 0) + rows


def most_gain_first(wanted: Sequence[Wanted]) -> list[Wanted]:
    """One of each key, ordered by what all with that key gain together; variants one after another, as they first come."""
    turns = {variant: turn for turn, variant in enumerate(dict.fromkeys(item.variant for item in wanted))}
    widest = max((item.width for item in wanted), default=1)
    gains: dict[str, float] = {}
    for item in wanted:
        gains[item.key] = gains.get(item.key, 0.0) + item.gain_bytes * (1.0 if item.width == widest else _NARROW)
    first = {item.key: item for item in reversed(wanted)}
    return sorted(reversed(first.values()), key=lambda item: (turns[item.variant], -gains[item.key]))
