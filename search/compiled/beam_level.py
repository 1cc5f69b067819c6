"""One level of the plain beam in one call; the pilot beam does without, because it scores by completing."""

from __future__ import annotations

import numpy as np

from autosched.search.compiled.beam import branches, extend
from autosched.search.compiled.cache import ARRAYS, F1, F2, I1, compiled, inlined
from autosched.search.compiled.layout import HEADER


@inlined
def prefix_bound(floats, ints, lanes, count, used, kernel, solo, bottom):  # type: ignore[no-untyped-def]
    """Guide of the plain beam: the larger of longest path and evenly shared work from here, microseconds, plus a little of the other."""
    time = floats[0]
    base = HEADER + 4 * lanes
    path = time
    work = 0.0
    for lane in range(lanes):
        operator = ints[HEADER + lane]
        if operator >= 0:
            left = floats[1 + lanes + lane] * max(1.0, floats[1 + 2 * lanes + lane])
            path = max(path, time + left + bottom[operator] - solo[kernel[operator, 0]])
            work += left
    for index in range(count):
        if ints[base + count + index] < 0:
            work += solo[kernel[index, 0]]
            if ints[base + index] == 0:
                path = max(path, time + bottom[index])
    share = time + work / used
    return max(path, share) + 0.05 * min(path, share)


@compiled(f"i8({ARRAYS},{F2},i4[:,::1],i8,i8,i8,{F1},{F1},{I1},i8,i8[::1],i8[:,::1],{F1},{F1},{I1})")
def expand_level(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
    beam_floats, beam_ints, states, lanes, used, bottom, priority, widths, most, words, children, scores, floats, ints,
):  # fmt: skip
    """List every child of every state of a beam, scored by ``prefix_bound``; returns how many there are.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency: ``Problem.arrays``.
        beam_floats, beam_ints: rows of ``states`` prefixes.
        states, lanes, used: prefixes in the beam, lane slots, lanes used.
        bottom: float64 ``[n]``, longest path to the end, microseconds.
        priority, widths, most: as in ``branches``.
        words: int64 ``[n]``, as in ``prefix_key``.
        children: int64 ``[capacity, 5]``: parent, operator, width index, hold, key. Overwritten.
        scores: float64 ``[capacity]``, microseconds. Overwritten.
        floats, ints: one state's rows, overwritten.
    """
    count = kernel.shape[0]
    found = 0
    out = np.empty(6 * most * widths.shape[0] + 6, dtype=np.int32)
    for state in range(states):
        options = branches(
            pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
            beam_floats[state], beam_ints[state], lanes, used, priority, widths, out, most,
        )  # fmt: skip
        for option in range(options):
            if found == children.shape[0]:
                return found
            for place in range(floats.shape[0]):
                floats[place] = beam_floats[state, place]
            for place in range(ints.shape[0]):
                ints[place] = beam_ints[state, place]
            key = extend(
                pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
                floats, ints, lanes, used, out[3 * option], out[3 * option + 1], out[3 * option + 2], words,
            )  # fmt: skip
            children[found, 0] = state
            children[found, 1] = out[3 * option]
            children[found, 2] = out[3 * option + 1]
            children[found, 3] = out[3 * option + 2]
            children[found, 4] = key
            scores[found] = prefix_bound(floats, ints, lanes, count, used, kernel, solo, bottom)
            found += 1
    return found
