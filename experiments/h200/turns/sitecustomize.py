"""Found by every Python that ``ahead.py`` starts, and by what that starts: Inductor times a kernel only in its turn, or not at all.

``AHEAD_TURNS`` is the file whose lock is the turn, or ``untimed``: each candidate then runs once, so that it is compiled, and none is
better than another.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent
_AFTER_IMPORT = _HERE.parents[2] / "tools" / "cuda_emulator" / "site" / "after_import.py"
_TIMERS = ("TritonBenchmarker", "InductorBenchmarker")
_turns = os.environ.get("AHEAD_TURNS", "")


def _once(self: object, run: Callable[[], Any], *args: Any, **kwargs: Any) -> float:
    run()
    return 0.01


def _in_turn(time_gpu: Callable[..., Any]) -> Callable[..., Any]:
    def benchmark_gpu(*args: Any, **kwargs: Any) -> Any:
        # Not before: Inductor's own compilers are found here too, and time nothing.
        from autosched.runtime.inductor.turns import turns

        with turns(os.fsencode(_turns))():
            return time_gpu(*args, **kwargs)

    return benchmark_gpu


def _install(benchmarking: ModuleType) -> None:
    for name in _TIMERS:
        timer = getattr(benchmarking, name)
        timer.benchmark_gpu = _once if _turns == "untimed" else _in_turn(timer.benchmark_gpu)


def _go_on() -> None:
    """What would have been found without this file (the emulator's, say)."""
    for folder in sys.path:
        other = Path(folder) / Path(__file__).name
        if other.is_file() and other.resolve().parent != _HERE:
            runpy.run_path(str(other))
            return


if _turns:
    runpy.run_path(str(_AFTER_IMPORT))["after_import"]("torch._inductor.runtime.benchmarking", _install)
_go_on()
