"""The loop of simulated annealing (:mod:`autosched.search.anneal`)."""

from __future__ import annotations

import numpy as np

from autosched.search.compiled.cache import ARRAYS, F1, F2, I1, SPACE, compiled
from autosched.search.compiled.copy_rows import copy_rows
from autosched.search.compiled.fluid import evaluate
from autosched.search.compiled.forecast import BEGAN, ENDED, TAIL, find_tails, is_idle, passes_nobody, path_through
from autosched.search.compiled.lanes import is_wide
from autosched.search.compiled.layout import HELD_BY
from autosched.search.compiled.marks import WAS_RANK, keep, marks_of, recall
from autosched.search.compiled.moves import (
    RUN,
    draw_partner,
    draw_position,
    draw_wait,
    exchange,
    exchange_tails,
    move_operator,
    restore_run,
    widen_run,
)
from autosched.search.compiled.shared import (
    finished_before,
    gate_of,
    low_of_lanes,
    mark_for,
    shared_by_exchange,
    shared_by_move,
)
from autosched.search.compiled.splitmix import next_uniform

_DRAWS = 24
"""Most moves drawn for each simulated one. Most are ruled out by :mod:`autosched.search.compiled.forecast`, at a hundredth of the cost."""
_ALLOWANCE = 0.2
"""How far above what would be accepted the forecast of a move may be, in mean times that an operator holds its lane. Of moves to
another lane that were forecast higher 1 in 18 was taken at the hottest and 1 in 200 later; of those forecast lower, 1 in 2 and 1 in 4."""


@compiled(f"i8({ARRAYS},i8,i4[:,::1],i4[:,::1],{F1},{F1},{I1},{I1},{F1},{F1},i8,i8,i8,u8[::1],{F2},u4[:,::1],{SPACE})")
def anneal_steps(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
    lanes, current, best, values, bound, widths, choices, moves, temperatures, first_step, steps, total_steps, random_state,
    seen, known, lane_times, lane_numbers, times, links,
):  # fmt: skip
    """Simulated annealing on launch order, lanes, widths and extra waits; returns how many schedules were simulated (``steps``, or
    fewer where hardly any move changes anything or could be accepted).

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency: ``Problem.arrays``.
        lanes: lane slots.
        current, best: int32 ``[5, n]``: launch order, place in it, lane, width index, extra wait. Updated.
        values: float64 ``[2]``: makespan of ``current`` and of ``best``, microseconds. Updated.
        bound: as in ``evaluate``.
        widths: allowed width indices.
        choices: the same, and the column of other variants where there is one.
        moves: float64 ``[10]``, cumulative chances of: lane; order; lane and order; exchange of two operators; exchange of two lanes'
            tails; width; width of a run of operators; extra wait; then the share of near order moves, and the share of moves of operators
            on the critical chain.
        temperatures: float64 ``[2]``, first and last, microseconds; geometric between.
        first_step, steps, total_steps: which part of the whole run this call does.
        random_state: uint64 ``[1]``.
        seen: float64 ``[3, n]``, of ``current``: see :mod:`autosched.search.compiled.forecast`; zeros at first. Updated.
        known: uint32 ``[3, n + 1]``, of ``current``: see :mod:`autosched.search.compiled.marks`; its last column has to be zeros at first.
            Updated.
        lane_times, lane_numbers, times, links: as in ``evaluate``.
    """
    count = kernel.shape[0]
    order, position, lane_of, width_index, wait = current[0], current[1], current[2], current[3], current[4]
    marks = marks_of(lane_times)
    waits = 0
    for index in range(count):
        if wait[index] >= 0:
            waits += 1
    chain = np.empty(count, dtype=np.int32)  # operators that decide the makespan of the current schedule
    chain_length = 0
    kept = np.empty((2, RUN), dtype=np.int32)
    ready = np.empty(lanes + count, dtype=np.float64)
    next_tail = np.empty(lanes, dtype=np.float64)
    allowance = _ALLOWANCE * lanes * values[0] / count - latency[2]
    simulated = 0
    cooling = np.log(temperatures[1] / temperatures[0])
    for _ in range(_DRAWS * steps):
        if simulated == steps:
            break
        temperature = temperatures[0] * np.exp(cooling * (first_step + simulated) / total_steps)
        if chain_length > 0 and next_uniform(random_state) < moves[9]:
            operator = chain[int(next_uniform(random_state) * chain_length)]
        else:
            operator = int(next_uniform(random_state) * count)
        move = next_uniform(random_state)
        old_lane, old_width, old_wait, old_place = lane_of[operator], width_index[operator], wait[operator], position[operator]
        new_lane, new_width, new_wait, new_place = old_lane, old_width, old_wait, old_place
        partner = -1
        tail = -1
        begin = -1
        end = -1
        if move < moves[0] or moves[1] <= move < moves[2]:
            new_lane = int(next_uniform(random_state) * (lanes - 1))
            if new_lane >= old_lane:
                new_lane += 1
        if moves[0] <= move < moves[2]:
            new_place = draw_position(
                order, position, operator, pred_ptr, pred_idx, succ_ptr, succ_idx, wait, waits, moves[8], 3 * lanes, random_state
            )  # fmt: skip
        elif moves[2] <= move < moves[3]:
            partner = draw_partner(
                order, position, operator, pred_ptr, pred_idx, succ_ptr, succ_idx, wait, waits, moves[8], 3 * lanes, random_state
            )  # fmt: skip
        elif moves[3] <= move < moves[4]:
            tail = int(next_uniform(random_state) * (lanes - 1))
            if tail >= old_lane:
                tail += 1
        elif moves[4] <= move < moves[5]:
            new_width = choices[int(next_uniform(random_state) * choices.shape[0])]
            if kernel[operator, new_width] == kernel[operator, old_width]:
                continue
            # A better neighbour is slower alone: it shows as one only beside others.
            if max(new_width, old_width) >= latency[8] and next_uniform(random_state) < 0.5:
                new_lane = int(next_uniform(random_state) * lanes)
        elif moves[5] <= move < moves[6]:
            span = 2 << int(next_uniform(random_state) * 4)
            begin = max(0, old_place - int(next_uniform(random_state) * span))
            end = min(count, begin + span)
            run_width = widths[int(next_uniform(random_state) * widths.shape[0])]
            changed = widen_run(
                order, position, lane_of, width_index, begin, end, run_width, lanes, kept, ready, pred_ptr, pred_idx, kernel, solo, latency
            )
            if changed == 0:
                continue
        elif move >= moves[6]:
            new_wait = draw_wait(order, position, lane_of, operator, wait, 4 * lanes, pred_ptr, pred_idx, random_state)
            if old_wait < 0 <= new_wait and is_idle(operator, new_wait, latency, seen):
                continue
        if is_wide(new_width, latency):
            new_lane = 0  # as problem.one_wide_lane
        same = new_lane == old_lane and new_width == old_width and new_wait == old_wait and new_place == old_place
        if same and partner < 0 and tail < 0 and begin < 0:
            continue
        if new_place != old_place and new_lane == old_lane:  # noqa: SIM102 (what is inlined stands in a condition of its own)
            if passes_nobody(order, lane_of, width_index, old_place, new_place, latency):
                continue
        limit = values[0] - temperature * np.log(max(next_uniform(random_state), 1e-300))
        forecast = 0.0
        if partner >= 0:
            there = lane_of[partner]
            here = old_lane
            if is_wide(old_width, latency) or is_wide(width_index[partner], latency):
                there = old_lane  # as ``exchange``
                here = lane_of[partner]
            place = position[partner]
            forecast = path_through(operator, partner, there, place, order, lane_of, pred_ptr, pred_idx, succ_ptr, succ_idx, latency, seen)
            other = path_through(partner, operator, here, old_place, order, lane_of, pred_ptr, pred_idx, succ_ptr, succ_idx, latency, seen)
            forecast = max(forecast, other)
        elif new_width == old_width and (new_lane != old_lane or new_place != old_place):
            place = new_place + int(new_place > old_place)
            forecast = path_through(operator, -1, new_lane, place, order, lane_of, pred_ptr, pred_idx, succ_ptr, succ_idx, latency, seen)
        elif new_wait != old_wait and new_wait >= 0:
            forecast = seen[ENDED, new_wait] + latency[1] + seen[ENDED, operator] - seen[BEGAN, operator] + seen[TAIL, operator]
        if forecast > limit + allowance:
            continue
        from_mark = -1
        if known[WAS_RANK, count] > 0:
            gate = -1
            if begin >= 0:
                shared = low_of_lanes(lanes, begin, order, lane_of, known)
                gate = begin
            elif tail >= 0:
                shared = min(
                    finished_before(old_lane, old_place, -1, -1, order, lane_of, known),
                    finished_before(tail, old_place, -1, -1, order, lane_of, known),
                )
            elif partner >= 0:
                shared = shared_by_exchange(operator, partner, there, here, order, lane_of, position, pred_ptr, pred_idx, known)
                gate = gate_of(min(old_place, place), max(old_place, place), order, width_index, latency)
            else:
                shared = shared_by_move(operator, old_place, new_lane, new_place, order, lane_of, pred_ptr, pred_idx, known)
                if is_wide(new_width, latency) != is_wide(old_width, latency):
                    gate = old_place
                elif new_place != old_place:
                    gate = gate_of(min(old_place, new_place), max(old_place, new_place), order, width_index, latency)
            from_mark = mark_for(shared, gate if latency[7] > 0.0 else -1, marks, count, lane_numbers, links)
            if from_mark >= 0:
                recall(seen, known, times, links)
        if begin < 0:
            lane_of[operator] = new_lane
            width_index[operator] = new_width
            wait[operator] = new_wait
        if new_place != old_place:
            move_operator(order, position, old_place, new_place)
        if partner >= 0:
            exchange(order, position, lane_of, width_index, operator, partner, latency)
        if tail >= 0:
            exchange_tails(order, lane_of, width_index, old_place, old_lane, tail, latency)
        value = evaluate(
            pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
            order, lane_of, width_index, wait, bound, limit, from_mark, lane_times, lane_numbers, times, links,
        )  # fmt: skip
        simulated += 1
        if value <= limit:
            values[0] = value
            chain_length = 0
            holder = links[HELD_BY, count]
            while holder != count:
                chain[chain_length] = holder
                chain_length += 1
                holder = links[HELD_BY, holder]
            waits += int(new_wait >= 0) - int(old_wait >= 0)
            keep(from_mark, marks, times, links, seen, known)
            find_tails(order, lane_of, wait, pred_ptr, pred_idx, latency, seen, next_tail)
            if value < values[1]:
                values[1] = value
                copy_rows(best, current)
            continue
        if tail >= 0:
            exchange_tails(order, lane_of, width_index, old_place, old_lane, tail, latency)
        if partner >= 0:
            exchange(order, position, lane_of, width_index, operator, partner, latency)
        if new_place != old_place:
            move_operator(order, position, new_place, old_place)
        if begin >= 0:
            restore_run(order, lane_of, width_index, begin, end, kept)
        lane_of[operator] = old_lane
        width_index[operator] = old_width
        wait[operator] = old_wait
    return simulated
