"""Two operators at the same time on two lanes, one started first: how much each slows the other down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autosched.core.records import Failure, PairRecord
from autosched.core.variants import variant_signature
from autosched.device.base import Pair
from autosched.device.cpu_loops import Loop, alone_and_together, loop_of, on_one_engine, one_by_one, run_in_turn
from autosched.device.cpu_measure import CpuMeasurer
from autosched.device.pair_labels import Overlap, directional_slowdowns
from autosched.device.requests import pair_refusal
from autosched.runtime.calls import Slots


def measure_pairs(
    measurer: CpuMeasurer, pairs: Sequence[Pair], repeats: int, seed: int
) -> Iterator[tuple[int, PairRecord | None, Failure | None]]:
    """Time each pair ``repeats`` times, each time beside both loops alone, in random order, so that a drifting machine cancels.

    Operators read the values that the program really gives them. Yields the pair's place and a record or a failure.
    """
    rng = np.random.default_rng(seed)
    return one_by_one(
        measurer,
        pairs,
        {operator for pair in pairs for operator in (pair.first, pair.last)},
        lambda pair: pair_refusal(measurer.graph, pair, wide=True),
        lambda pair, values, index: _measure(measurer, pair, values, repeats, rng, index),
    )


def _measure(measurer: CpuMeasurer, pair: Pair, values: Slots, repeats: int, rng: np.random.Generator, index: int) -> PairRecord:
    graph = measurer.graph
    first = loop_of(measurer, pair.first, pair.first_width, values, pair.first_variant)
    last = loop_of(measurer, pair.last, pair.last_width, values, pair.last_variant)
    engine = on_one_engine(measurer, (first, last))
    alone_us, together, contamination = alone_and_together(
        measurer, (first, last), lambda: _together(measurer, first, last), repeats, rng, index
    )
    slowdowns = [directional_slowdowns(run, *alone) for run, alone in zip(together, alone_us, strict=True)]
    solo_first_us, solo_last_us = np.median(np.array(alone_us), axis=0).tolist()
    together_us = float(np.median([max(run.first_end_us, run.last_end_us) - run.first_start_us for run in together]))
    slowdown_first, slowdown_last = np.median(np.array(slowdowns), axis=0).tolist()
    return PairRecord(
        first=variant_signature(graph.operators[pair.first].signature, pair.first_variant),
        first_width=pair.first_width,
        last=variant_signature(graph.operators[pair.last].signature, pair.last_variant),
        last_width=pair.last_width,
        solo_first_us=solo_first_us / first.repeats,
        solo_last_us=solo_last_us / last.repeats,
        together_us=together_us,
        slowdown_first=slowdown_first,
        slowdown_last=slowdown_last,
        makespan_ratio=together_us / (solo_first_us + solo_last_us),
        repeats_first=first.repeats,
        repeats_last=last.repeats,
        count=len(slowdowns),
        contamination=contamination,
        engine=engine,
    )


def _together(measurer: CpuMeasurer, first: Loop, last: Loop) -> Overlap:
    run_in_turn(measurer, (first, last))
    return Overlap(first.start_us, first.end_us, last.start_us, last.end_us)
