"""Whether a pair or a group may be asked for at all: the same answer on every device, and on a replay of one."""

from __future__ import annotations

from autosched.core.graph import OpGraph
from autosched.core.records import Failure, FailureKind
from autosched.device.base import Group, Pair


def pair_refusal(graph: OpGraph, pair: Pair, *, wide: bool) -> Failure | None:
    """Why ``pair`` means nothing in ``graph``, or ``None``. ``wide``: whether the device has widths above 1."""
    members, widths = (pair.first, pair.last), (pair.first_width, pair.last_width)
    if (refusal := _misfit(graph, members, widths, wide=wide)) is not None:
        return refusal
    if pair.first == pair.last:
        # A kernel beside itself, as two equal operators of a graph would be.
        return illegal(f"operator {pair.first} changes its input in place") if graph.operators[pair.first].mutates else None
    return _dependence(graph, members)


def group_refusal(graph: OpGraph, group: Group, *, wide: bool) -> Failure | None:
    """Why ``group`` means nothing in ``graph``, or ``None``. ``wide``: as above."""
    members = group.operators
    if len(members) < 3:
        return illegal(f"a group of {len(members)}; expected three operators or more: two are a pair")
    if group.widths and len(group.widths) != len(members):
        return illegal(f"{len(group.widths)} widths for {len(members)} operators; expected one each")
    return _misfit(graph, members, group.widths, wide=wide) or _dependence(graph, members)


def illegal(detail: str) -> Failure:
    """A request that no schedule could mean."""
    return Failure(FailureKind.ILLEGAL, detail)


def _misfit(graph: OpGraph, members: tuple[int, ...], widths: tuple[int, ...], *, wide: bool) -> Failure | None:
    for operator in members:
        if not 0 <= operator < len(graph):
            return illegal(f"operator {operator} does not exist; the graph has {len(graph)}")
    if not wide and any(width != 1 for width in widths):
        return illegal(f"width {max(widths)} means nothing on this device; expected 1")
    if sum(width > 1 for width in widths) > 1:
        return illegal("two wide operators never run at the same time: schedules keep them on one lane")
    return None


def _dependence(graph: OpGraph, members: tuple[int, ...]) -> Failure | None:
    for place, a in enumerate(members):
        for b in members[place + 1 :]:
            if not graph.independent(a, b):
                return illegal(f"operators {a} and {b} are the same or depend on each other and can never run at the same time")
    return None
