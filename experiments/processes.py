"""How far apart processes are that run the same schedule: what of a difference between lowerings, or from eager mode, means nothing.

    python experiments/processes.py [MODEL...]

writes ``results/<device>/processes.json``. ``tune`` measures schedules of one lowering in one process, so that its A/A test has all that
differs between two of them. Each lowering, and each baseline that is no schedule, has a process of its own, whose memory lies elsewhere.
Here several processes run one sequential schedule in turns, in random order, each twice in a turn: that is the A/A test. ``--smoke`` takes
two processes and few turns.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.serve.common import keep, parser_of

MODELS = ("autosched:moe", "torchvision:squeezenet1_1", "torchvision:googlenet")
_PROCESSES, _TURNS, _ROUNDS = 6, 60, 2


def measure(name: str, processes: int, turns: int) -> dict[str, Any]:
    """What :func:`differences` makes of the times of ``processes`` processes in ``turns`` turns."""
    from autosched import zoo
    from autosched.capture.export import capture
    from autosched.core.records import Failure
    from autosched.core.schedule import sequential
    from autosched.device.cpu import CpuDevice

    made = zoo.load(name)
    captured, device = capture(made.model, made.args, made.kwargs), CpuDevice()
    schedule = sequential(captured.program.graph, width=max(device.widths))
    times = np.zeros((2, processes, turns * _ROUNDS))
    rng = np.random.default_rng(0)
    with ExitStack() as stack:
        sessions = [stack.enter_context(device.open(captured.program, captured.constants, timeout_s=60.0)) for _ in range(processes)]
        for turn in range(turns):
            for process in rng.permutation(processes):
                taken = sessions[process].paired([schedule, schedule], rounds=_ROUNDS)
                if isinstance(taken, Failure):
                    raise SystemExit(f"{name}: {taken.kind}: {taken.detail}")
                times[:, process, turn * _ROUNDS : (turn + 1) * _ROUNDS] = taken
    return {"model": name, "median_us": float(np.median(times)), **differences(times)}


def differences(times: np.ndarray) -> dict[str, Any]:
    """In percent, from times ``[2, processes, rounds]``: of the two runs of each process, of each two processes, and how much of the latter
    is the same in both halves of the measurement (a correlation: 1 is all)."""
    once, again = times
    same = [_apart(once[place], again[place]) for place in range(len(once))]
    two = [_apart(once[a], once[b]) for a, b in itertools.combinations(range(len(once)), 2)]
    # Of each round, the part that the whole machine did is taken off.
    own = np.log(once) - np.log(once).mean(axis=0, keepdims=True)
    half = own.shape[1] // 2
    first, second = np.median(own[:, :half], axis=1), np.median(own[:, half:], axis=1)
    lasting = float(np.corrcoef(first, second)[0, 1]) if first.std() and second.std() else None
    return {"same_pct": same, "two_pct": two, "lasting": lasting}


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    from autosched.device.timing import paired_ratio

    return 100.0 * abs(paired_ratio(one, other).ratio - 1.0)


def main() -> None:
    asked = parser_of(__doc__).parse_args()
    processes, turns = (2, 3) if asked.smoke else (_PROCESSES, _TURNS)
    rows = []
    for name in asked.models or MODELS:
        rows.append(measure(name, processes, turns))
        print(f"{name} done", flush=True)
    keep(asked, "processes.json", {"processes": processes, "rounds": turns * _ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
