"""Three and more operators at the same time: fork{A x k | B x m | C x n ...}join in one graph, launched in the order given."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from autosched.core.records import Failure, GroupRecord
from autosched.device.base import Group
from autosched.device.cuda.measure import Chain, CudaMeasurer
from autosched.device.cuda.pairs import alone_and_together
from autosched.device.requests import group_refusal


def measure_group(measurer: CudaMeasurer, group: Group, repeats: int, place: int = -1) -> GroupRecord | Failure:
    """Time all members together, and each alone in the same number of copies; the graphs take turns in each round.

    ``place`` is the group's number, for the board.
    """
    if (refusal := group_refusal(measurer.graph, group, wide=False)) is not None:
        return refusal
    return alone_and_together(measurer, group.operators, lambda copies, chains: _time(measurer, group, copies, chains, repeats, place))


def _time(measurer: CudaMeasurer, group: Group, copies: Sequence[int], chains: Sequence[Chain], repeats: int, place: int) -> GroupRecord:
    *alone, together = chains
    elapsed = measurer.backend.elapsed_us
    first_start = together.stamps[0][0]
    alone_us: list[list[float]] = []
    done_us: list[list[float]] = []
    begun_us: list[float] = []
    for _ in range(repeats):
        measurer.beat(place)
        for chain in chains:
            measurer.replay(chain.graph)
        alone_us.append([max(1e-3, measurer.lane_us(chain, 0)) for chain in alone])
        done_us.append([max(1e-3, elapsed(first_start, end)) for _, end in together.stamps])
        # A later branch may begin before the first: the device orders them, not the host.
        begun_us.append(min(0.0, *(elapsed(first_start, start) for start, _ in together.stamps)))
    operators = measurer.graph.operators
    return GroupRecord(
        signatures=tuple(operators[operator].signature for operator in group.operators),
        widths=(1,) * len(group.operators),
        solo_us=tuple(median(column) / count for column, count in zip(zip(*alone_us, strict=True), copies, strict=True)),
        repeats=tuple(copies),
        finish_us=tuple(median(column) for column in zip(*done_us, strict=True)),
        together_us=median(max(row) - begun for row, begun in zip(done_us, begun_us, strict=True)),
        count=repeats,
        contamination=measurer.contamination(),
    )
