"""A scheduling problem as a small file: a real model's graph with the costs recorded for it, to search it again without the model.

One compressed NumPy archive of plain arrays (read with ``allow_pickle`` off): the graph's edges, the cost table with its kernel
matrices shared by equal operators and held in single precision, and what ``opara`` reads. Nothing of the model's weights or names is in
it. A problem read back has the same edges and costs; its operators are nameless.
"""

from __future__ import annotations

import dataclasses
import itertools
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosched.core.costs import CostTable
from autosched.core.errors import AutoschedError, UsageError
from autosched.search.problem import Floats, Problem

SCHEMA = 1
_ARRAYS = (
    "schema", "provenance", "pred_ptr", "pred_idx", "widths", "kernel", "solo_us", "slowdown_first", "slowdown_last", "constants", "demand",
    "memory_bound",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SavedProblem:
    """A problem, and where its costs come from, in words (``measured on ...``, ``roofline, not measured``)."""

    problem: Problem
    provenance: str


def save_problem(problem: Problem, path: Path, *, provenance: str) -> None:
    """Write a problem to ``path`` (``.npz``). Kernels that the graph does not use are left out.

    Raises:
        OSError: if the file cannot be written.
    """
    costs = problem.costs
    used, choices = np.unique(problem.kernel, return_inverse=True)
    choices = choices.reshape(problem.kernel.shape).astype(np.int32)
    slowdown_first, slowdown_last = costs.slowdowns(used)
    constants = [
        costs.launch_gap_us, costs.cross_lane_us, costs.fixed_us, costs.max_lanes, costs.measured_pairs, costs.concurrent_gap_us,
        costs.polling_us, costs.team_spin_us, costs.one_team,
    ]  # fmt: skip
    arrays: dict[str, Any] = {
        "schema": np.array(SCHEMA),
        "provenance": np.frombuffer(provenance.encode(), dtype=np.uint8),
        "pred_ptr": problem.pred_ptr,
        "pred_idx": problem.pred_idx,
        "widths": np.array(costs.widths),
        "kernel": choices[:, : len(costs.widths)],
        "other_kernel": choices[:, len(costs.widths) :].ravel(),
        "solo_us": costs.solo_us[used],
        "slowdown_first": _short(slowdown_first),
        "slowdown_last": _short(slowdown_last),
        "constants": np.array(constants, dtype=np.float64),
        "room": np.zeros(0) if costs.room is None else costs.room[used],
        "demand": problem.demand.astype(np.float32),
        "memory_bound": problem.memory_bound,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load_problem(path: Path) -> SavedProblem:
    """The inverse of :func:`save_problem`, to the precision it keeps (slowdowns to three digits after the point).

    Raises:
        UsageError: if the file is not there, is no such archive, or describes no legal problem.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            found = {name: data[name] for name in _ARRAYS}
            schema = int(found["schema"])
            # Files from before there was room in cost tables do not say: nothing is concluded then.
            room = data["room"] if "room" in data and len(data["room"]) else None
            other = data["other_kernel"].astype(np.int32) if "other_kernel" in data and len(data["other_kernel"]) else None
    except (OSError, ValueError, TypeError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{path} holds no problem: {error}; expected a file that save_problem wrote") from error
    if schema > SCHEMA:
        raise UsageError(f"{path} has schema {schema}; expected at most {SCHEMA}: install a newer autosched")
    try:
        # Older files end with the put-off (nothing was known of what polls and spins), or with the spinning (lanes were threads of their
        # own).
        gap, cross, fixed, lanes, measured, concurrent, polling, spin, one_team = (*found["constants"].tolist(), 0.0, 0.0, 0.0)[:9]
        costs = CostTable(
            tuple(int(width) for width in found["widths"]), np.ascontiguousarray(found["kernel"], dtype=np.int32),
            found["solo_us"].astype(np.float64), found["slowdown_first"].astype(np.float64), found["slowdown_last"].astype(np.float64),
            gap, cross, fixed, int(lanes), measured, concurrent, room=room, polling_us=polling, team_spin_us=spin,
            one_team=bool(one_team),
        )  # fmt: skip
        if other is not None:
            # Operators are nameless, and so are their variants: 0 is the usual one, 1 the other.
            usual, number = np.zeros_like(costs.kernel), (other != costs.kernel[:, 0]).astype(np.int32)
            costs = dataclasses.replace(costs, variant=usual, other_kernel=other, other_variant=number)
        ends = found["pred_ptr"].tolist()
        indices = found["pred_idx"].tolist()
        for rows in (costs.kernel, other):
            if rows is not None and rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < len(costs.solo_us):
                raise UsageError(f"kernel holds rows outside 0 to {len(costs.solo_us) - 1}")
        problem = Problem.from_arrays([indices[a:b] for a, b in itertools.pairwise(ends)], costs)
        demand, memory_bound = found["demand"].astype(np.float64), found["memory_bound"].astype(np.bool_)
        for name, array in (("demand", demand), ("memory_bound", memory_bound)):
            if array.shape != (problem.count,):
                raise UsageError(f"{name} has shape {array.shape}; expected [{problem.count}], a value for each operator")
        problem = dataclasses.replace(problem, demand=demand, memory_bound=memory_bound)
        return SavedProblem(problem, found["provenance"].tobytes().decode())
    except (AutoschedError, ValueError, TypeError, IndexError) as error:
        raise UsageError(f"{path} describes no legal problem: {error}") from error


def _short(slowdowns: Floats) -> NDArray[np.float32]:
    # Three digits are far below what a pair's measurement repeats to, and compress to a third.
    return np.maximum(np.round(slowdowns, 3), 1e-3).astype(np.float32)
