"""What the experiments share that are called again until all is done: the time of one call, processes that end with it, whole files.

A call may be stopped at any moment, by ``kill -9`` as well: what is measured lies in files that are whole, and no process that it started
goes on and disturbs what the next call measures.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from autosched.core.atomic_write import write_atomically
from autosched.runtime.orphans import die_with

LEFT = 10
"""Exit status: something is left for the next call."""
LATE = -1
"""In a report, in place of an exit status: the time was over."""
# Of a comparison, besides its budget and compiling baselines: importing, capturing three lowerings, starting nine processes, the last
# rounds.
_AROUND_S = 110.0
_LEAST_COMPILE_S = 10.0
# What the compilers of a further comparison in a call must find: the default one takes half of it.
_COMPILERS_S = 60.0
# Baselines that have a time limit of their own, by the names that reports have for them.
_LIMITED = frozenset({"eager", "torch_compile", "compiled", "max_autotune", "max_autotune_combo"})
# Between two looks at what a process has done so far.
_LOOK_S = 10.0
# From killing a process to its end. One that waits in the kernel for a device that no longer answers ends when that does, if ever.
_DYING_S = 10.0


class Call:
    """The time of one call.

    Args:
        deadline_s: seconds it may take in all; infinite where nobody waits.
        spare_s: of these, for writing files and for the end of the process.
        expect_s: seconds of a run, until one has shown how long it takes.
        longest_s: seconds that no run may take longer than, however much time there is.
    """

    def __init__(self, deadline_s: float, *, spare_s: float = 8.0, expect_s: float = 0.0, longest_s: float = math.inf) -> None:
        self.window_s = deadline_s - spare_s
        self._longest_s = longest_s
        self._began = time.monotonic()
        self._expect_s = expect_s
        self._took_s: list[float] = []

    @property
    def left_s(self) -> float:
        """Seconds until the call is over."""
        return self.window_s - (time.monotonic() - self._began)

    @property
    def limit_s(self) -> float:
        """Seconds that a run which begins now may take."""
        return min(self._longest_s, self.left_s)

    def took(self, seconds: float) -> None:
        """A run took so long."""
        self._took_s.append(seconds)

    def fits(self) -> bool:
        """Whether one more run is worth beginning. A call's first has all the time there is: what does not fit into that fits nowhere."""
        return self.left_s >= min(1.1 * max(self._took_s, default=self._expect_s), 0.95 * self.window_s)

    def had_all(self, limit_s: float) -> bool:
        """Whether a run that had ``limit_s`` seconds would have no more in another call like this one."""
        return limit_s >= 0.9 * min(self._longest_s, self.window_s)

    def settled(self, report: dict[str, Any], limit_s: float) -> bool:
        """Whether a report would come out the same in a further call: it is no error, or not that of time, or there is no more time."""
        error = report.get("error")
        return error is None or error.get("exit_code") != LATE or self.had_all(limit_s)


def compile_total_s(left_s: float, budget_s: float) -> float:
    """Seconds for all compilers of whole models in one comparison, so that it ends within ``left_s``.

    A baseline that is late costs its row; a comparison that is late costs every row.
    """
    return max(_LEAST_COMPILE_S, left_s - budget_s - _AROUND_S)


def another_s(took_s: float, budget_s: float, *, compiled: bool) -> float:
    """Seconds that a comparison needs after one that took ``took_s``.

    Compilers make do with what there is, as above, so that one whose were slow says nothing of the next; but without a minute for its own
    that one would have no row of theirs.
    """
    around_s = budget_s + _AROUND_S
    return around_s + _COMPILERS_S if compiled else min(took_s, around_s)


def late_baselines(report: dict[str, Any]) -> list[str]:
    """Baselines of a comparison that have no time because theirs was over: with more of it they may have one."""
    rows = report.get("strategies", ())
    return [row["name"] for row in rows if row["name"] in _LIMITED and (row.get("failure") or {}).get("kind") == "timeout"]


def write_whole(target: Path, text: str) -> None:
    """Write ``text`` so that readers see what was there before or all of it; its folder is made if it is missing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, text.encode())


def write_json(target: Path, document: object) -> None:
    """``document`` as a whole file."""
    write_whole(target, json.dumps(document, indent=1) + "\n")


def read_json(target: Path) -> Any:
    """The document that :func:`write_json` wrote; ``None`` if there is none.

    Nor is there where the file was cut off on its way from another machine: that is said, and whoever asks writes it anew.
    """
    try:
        return json.loads(target.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        print(f"{target} cannot be read ({error}); it counts for nothing", file=sys.stderr, flush=True)
        return None


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status (``None`` if its time was over) and what it printed."""

    status: int | None
    out: str
    err: str
    took_s: float


def run_to_end(command: Sequence[str], limit_s: float, *, environment: dict[str, str] | None = None, folder: Path | None = None) -> Ended:
    """Run ``command`` for at most ``limit_s`` seconds (may be infinite). It, and what it started, ends then, or with this process.

    Args:
        environment: its variables, all of them; by default those of this process.
        folder: its working directory.
    """
    # Files and not pipes: what a compiler has started and left behind keeps a pipe open, and nobody waits for that.
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        begin = time.monotonic()
        status = _run(command, limit_s, out, err, environment, folder)
        took_s = time.monotonic() - begin
        out.seek(0)
        err.seek(0)
        return Ended(status, out.read(), err.read(), took_s)


def run_logged(
    command: Sequence[str],
    limit_s: float,
    log: Path,
    *,
    environment: dict[str, str] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> int | None:
    """As ``run_to_end``, with what it prints added to the file ``log`` while it runs; the exit status.

    Args:
        meanwhile: called every few seconds until it ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        return _run(command, limit_s, file, subprocess.STDOUT, environment, None, meanwhile)


def _run(
    command: Sequence[str],
    limit_s: float,
    out: Any,
    err: Any,
    environment: dict[str, str] | None,
    folder: Path | None,
    meanwhile: Callable[[], None] | None = None,
) -> int | None:
    until = time.monotonic() + limit_s
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=environment,
        cwd=folder,
        start_new_session=True,
        # A parent that is killed cannot end its children itself.
        preexec_fn=functools.partial(die_with, os.getpid()),  # noqa: PLW1509
    )
    try:
        while meanwhile is not None and (left_s := until - time.monotonic()) > _LOOK_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=_LOOK_S)
            meanwhile()
        left_s = until - time.monotonic()
        return process.wait(timeout=None if left_s == math.inf else left_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Its group is its own: what it left behind ends as well.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        # What comes next must have its turn, whatever becomes of this one.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_DYING_S)
