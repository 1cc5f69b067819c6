"""Two operators at the same time: fork{A x k | B x m}join in one graph, with each one's start and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

from autosched.core.records import Failure, PairRecord
from autosched.core.variants import variant_signature
from autosched.device.base import Pair
from autosched.device.cuda.measure import Chain, CudaMeasurer
from autosched.device.pair_labels import Overlap, directional_slowdowns
from autosched.device.requests import pair_refusal

# A chain this long hides the skew between the two branches' starts (a few microseconds).
_TARGET_US = 60.0
_MOST_COPIES = 64

Record = TypeVar("Record")


def measure_pair(measurer: CudaMeasurer, pair: Pair, repeats: int, place: int = -1) -> PairRecord | Failure:
    """Time ``pair.first`` and ``pair.last`` together, ``first`` launched first, and each alone in the same number of copies.

    The three graphs take turns in each round, so a drifting clock touches all alike. ``place`` is the pair's number, for the board.
    """
    if (refusal := pair_refusal(measurer.graph, pair, wide=False)) is not None:
        return refusal
    variants = (pair.first_variant, pair.last_variant)
    return alone_and_together(
        measurer, (pair.first, pair.last), lambda copies, chains: _time(measurer, pair, copies, chains, repeats, place), variants
    )


def alone_and_together(
    measurer: CudaMeasurer,
    operators: Sequence[int],
    time: Callable[[Sequence[int], Sequence[Chain]], Record],
    variants: Sequence[int] = (),
) -> Record | Failure:
    """What ``time`` makes of how often each operator is repeated, and of a chain of each alone, in that order, and one of all together."""
    copies = _balanced_copies(measurer, operators, variants)
    if isinstance(copies, Failure):
        return copies
    chains = _ready_chains(measurer, list(zip(operators, copies, strict=True)), variants)
    if isinstance(chains, Failure):
        return chains
    record = time(copies, chains)
    for chain in chains:
        measurer.release(chain)
    return record


def _balanced_copies(measurer: CudaMeasurer, operators: Sequence[int], variants: Sequence[int]) -> tuple[int, ...] | Failure:
    """How often each is repeated so that all sides last about equally long, and long enough."""
    times_us: list[float] = []
    for place, operator in enumerate(operators):
        time_us = measurer.solo_us(operator, variants[place] if variants else 0)
        if isinstance(time_us, Failure):
            return time_us
        times_us.append(time_us)
    target_us = max(*times_us, _TARGET_US)
    return tuple(max(1, min(_MOST_COPIES, round(target_us / time_us))) for time_us in times_us)


def _ready_chains(measurer: CudaMeasurer, lanes: Sequence[tuple[int, int]], variants: Sequence[int]) -> list[Chain] | Failure:
    """A chain for each of ``lanes`` (operator, copies) alone, then one of all together, each replayed once; all or none are held."""
    wanted = [(lanes[place : place + 1], variants[place : place + 1]) for place in range(len(lanes))]
    chains: list[Chain] = []
    for members, chosen in (*wanted, (lanes, variants)):
        chain = measurer.chain(members, chosen)
        if isinstance(chain, Failure):
            for made in chains:
                measurer.release(made)
            return chain
        chains.append(chain)
        measurer.replay(chain.graph)
    return chains


def _time(measurer: CudaMeasurer, pair: Pair, copies: Sequence[int], chains: Sequence[Chain], repeats: int, place: int) -> PairRecord:
    alone_first, alone_last, both = chains
    rows: list[tuple[float, float, float, float, float]] = []
    for _ in range(repeats):
        measurer.beat(place)
        measurer.replay(alone_first.graph)
        measurer.replay(alone_last.graph)
        measurer.replay(both.graph)
        together = overlap(measurer, both)
        rows.append(
            (
                max(1e-3, measurer.lane_us(alone_first, 0)),
                max(1e-3, measurer.lane_us(alone_last, 0)),
                together.first_end_us,
                together.last_start_us,
                together.last_end_us,
            )
        )
    alone_first_us, alone_last_us, first_end_us, last_start_us, last_end_us = (median(column) for column in zip(*rows, strict=True))
    slowdowns = directional_slowdowns(Overlap(0.0, first_end_us, last_start_us, last_end_us), alone_first_us, alone_last_us)
    together_us = max(first_end_us, last_end_us) - min(0.0, last_start_us)
    operators = measurer.graph.operators
    return PairRecord(
        first=variant_signature(operators[pair.first].signature, pair.first_variant),
        first_width=1,
        last=variant_signature(operators[pair.last].signature, pair.last_variant),
        last_width=1,
        solo_first_us=alone_first_us / copies[0],
        solo_last_us=alone_last_us / copies[1],
        together_us=together_us,
        slowdown_first=slowdowns[0],
        slowdown_last=slowdowns[1],
        makespan_ratio=together_us / (alone_first_us + alone_last_us),
        repeats_first=copies[0],
        repeats_last=copies[1],
        count=repeats,
        contamination=measurer.contamination(),
    )


def overlap(measurer: CudaMeasurer, both: Chain) -> Overlap:
    """When each of two lanes started and ended in the last replay, in microseconds from the first lane's start."""
    elapsed = measurer.backend.elapsed_us
    (first_start, first_end), (last_start, last_end) = both.stamps
    return Overlap(0.0, elapsed(first_start, first_end), elapsed(first_start, last_start), elapsed(first_start, last_end))
