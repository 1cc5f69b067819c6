"""The moves of annealing: drawing a legal one, making it, undoing it."""

from __future__ import annotations

from autosched.search.compiled.cache import F1, I1, compiled, inlined
from autosched.search.compiled.lanes import is_wide
from autosched.search.compiled.layout import UNREACHED
from autosched.search.compiled.splitmix import next_uniform

RUN = 16
"""Most operators that :func:`widen_run` takes."""


@inlined
def draw_position(  # type: ignore[no-untyped-def]
    order, position, operator, pred_ptr, pred_idx, succ_ptr, succ_idx, wait, waits, near_share, reach, random_state
):
    """Another legal place in the launch order for ``operator``: with chance ``near_share`` at most ``reach`` from its own."""
    count = order.shape[0]
    low = -1
    high = count
    own = position[operator]
    for place in range(pred_ptr[operator], pred_ptr[operator + 1]):
        low = max(low, position[pred_idx[place]])
    for place in range(succ_ptr[operator], succ_ptr[operator + 1]):
        high = min(high, position[succ_idx[place]])
    if waits > 0:
        if wait[operator] >= 0:
            low = max(low, position[wait[operator]])
        for index in range(count):
            if wait[index] == operator:
                high = min(high, position[index])
    if high - low <= 2:
        return own
    # Far moves change what runs beside everything in between; near ones mostly refine. Both are needed.
    if next_uniform(random_state) < near_share:
        low = max(low, own - reach - 1)
        high = min(high, own + reach + 1)
    chosen = low + 1 + int(next_uniform(random_state) * (high - low - 2))
    if chosen >= own:
        chosen += 1
    return chosen


@inlined
def draw_partner(  # type: ignore[no-untyped-def]
    order, position, operator, pred_ptr, pred_idx, succ_ptr, succ_idx, wait, waits, near_share, reach, random_state
):
    """An operator that may change places with ``operator`` in the launch order, or -1: nothing in between may depend on either."""
    count = order.shape[0]
    own = position[operator]
    low = 0
    high = count
    if next_uniform(random_state) < near_share:
        low = max(low, own - reach)
        high = min(high, own + reach + 1)
    place = low + int(next_uniform(random_state) * (high - low))
    if place == own:
        return -1
    partner = order[place]
    early = operator
    late = partner
    if place < own:
        early = partner
        late = operator
    first = position[early]
    last = position[late]
    for edge in range(succ_ptr[early], succ_ptr[early + 1]):
        if position[succ_idx[edge]] <= last:
            return -1
    for edge in range(pred_ptr[late], pred_ptr[late + 1]):
        if position[pred_idx[edge]] >= first:
            return -1
    if waits > 0:
        if wait[late] >= 0 and position[wait[late]] >= first:
            return -1
        for index in range(count):
            if wait[index] == early and position[index] <= last:
                return -1
    return partner


@compiled(f"void({I1},{I1},i8,i8)")
def move_operator(order, position, source, target):  # type: ignore[no-untyped-def]
    """Move the operator at place ``source`` of the launch order to place ``target``."""
    operator = order[source]
    if source < target:
        for place in range(source, target):
            order[place] = order[place + 1]
            position[order[place]] = place
    else:
        for place in range(source, target, -1):
            order[place] = order[place - 1]
            position[order[place]] = place
    order[target] = operator
    position[operator] = target


@compiled(f"void({I1},{I1},{I1},{I1},i8,i8,{F1})")
def exchange(order, position, lane_of, width_index, first, second, latency):  # type: ignore[no-untyped-def]
    """Two operators change places and, if neither is wide (``problem.one_wide_lane``), lanes. Done twice it changes nothing."""
    place = position[first]
    position[first] = position[second]
    position[second] = place
    order[place] = second
    order[position[first]] = first
    if not is_wide(width_index[first], latency) and not is_wide(width_index[second], latency):
        lane = lane_of[first]
        lane_of[first] = lane_of[second]
        lane_of[second] = lane


@compiled(f"void({I1},{I1},{I1},i8,i8,i8,{F1})")
def exchange_tails(order, lane_of, width_index, begin, first, second, latency):  # type: ignore[no-untyped-def]
    """From place ``begin`` of the launch order on, two lanes change names. Done twice it changes nothing."""
    for place in range(begin, order.shape[0]):
        operator = order[place]
        if not is_wide(width_index[operator], latency):
            if lane_of[operator] == first:
                lane_of[operator] = second
            elif lane_of[operator] == second:
                lane_of[operator] = first


@compiled(f"i8({I1},{I1},{I1},{I1},i8,i8,i8,i8,i4[:,::1],{F1},{I1},{I1},i4[:,::1],{F1},{F1})")
def widen_run(  # type: ignore[no-untyped-def]
    order, position, lane_of, width_index, begin, end, width, lanes, kept, ready, pred_ptr, pred_idx, kernel, solo, latency
):
    """Give the operators from place ``begin`` of the launch order to ``end`` one width; how many had another.

    Those that were wide and are so no more go to the lane on which they start earliest if nothing disturbs them.

    Args:
        order, position, lane_of, width_index: of ``anneal_steps``.
        begin, end, width: the run, and its new width index.
        lanes: lane slots.
        kept: int32 ``[2, RUN]``, overwritten with the lanes and width indices of before, for :func:`restore_run`.
        ready: float64 ``[lanes + n]``, overwritten.
        pred_ptr, pred_idx, kernel, solo, latency: of ``Problem.arrays``.
    """
    changed = 0
    for lane in range(lanes):
        ready[lane] = 0.0
    for place in range(begin, end):
        operator = order[place]
        kept[0, place - begin] = lane_of[operator]
        kept[1, place - begin] = width_index[operator]
        if width_index[operator] != width:
            changed += 1
        first = 0
        last = lanes
        if width > 0:
            last = 1  # as problem.one_wide_lane
        elif not is_wide(width_index[operator], latency):
            first = lane_of[operator]
            last = first + 1
        best = UNREACHED
        for lane in range(first, last):
            start = ready[lane]
            for edge in range(pred_ptr[operator], pred_ptr[operator + 1]):
                before = pred_idx[edge]
                if position[before] >= begin:
                    start = max(start, ready[lanes + before])
            if start < best:
                best = start
                lane_of[operator] = lane
        width_index[operator] = width
        ready[lanes + operator] = best + solo[kernel[operator, width]]
        ready[lane_of[operator]] = ready[lanes + operator]
    return changed


@compiled(f"void({I1},{I1},{I1},i8,i8,i4[:,::1])")
def restore_run(order, lane_of, width_index, begin, end, kept):  # type: ignore[no-untyped-def]
    """Undo :func:`widen_run`."""
    for place in range(begin, end):
        lane_of[order[place]] = kept[0, place - begin]
        width_index[order[place]] = kept[1, place - begin]


@inlined
def draw_wait(order, position, lane_of, operator, wait, window, pred_ptr, pred_idx, random_state):  # type: ignore[no-untyped-def]
    """A new extra wait for ``operator``: -1 (more often if it has one), or a recent operator of another lane."""
    if wait[operator] >= 0 and next_uniform(random_state) < 0.7:
        return -1
    place = position[operator]
    if place == 0:
        return -1
    back = 1 + int(next_uniform(random_state) * min(place, window))
    before = order[place - back]
    if lane_of[before] == lane_of[operator]:
        return -1
    for edge in range(pred_ptr[operator], pred_ptr[operator + 1]):
        if pred_idx[edge] == before:
            return -1
    return before
