"""The progress line of the command line, with rich, on stderr; where it is too long for the terminal, the end of the note is cut off."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column

from autosched.core.progress import OUTSIDE

_WIDE = 110
"""Columns of a terminal in which names of stages are padded, so that the bar stands still, and the bar is long."""


class LiveProgress:
    """A progress bar with the stage, the incumbent and the time left; implements ``core.progress.Progress``."""

    def __init__(self, console: Console) -> None:
        wide = console.width >= _WIDE
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<28}" if wide else "{task.description}", markup=False),
            BarColumn(bar_width=24 if wide else 8),
            # Nothing where a stage has no parts that are counted.
            TextColumn("{task.fields[counted]}", markup=False),
            # The only one that gives way.
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=console,
            expand=True,
            transient=True,
            # A log file gets one line a stage instead.
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=1, counted="", note="")
        self._console = console
        self._deadline: float | None = None
        self._stage = ""

    def __enter__(self) -> LiveProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def stage(self, name: str, left_s: float | None = None) -> None:
        """Show a new stage."""
        self._deadline = time.monotonic() + left_s if left_s is not None else self._deadline
        if not self._console.is_terminal and name != self._stage:
            left = self._left()
            self._console.print(f"autosched: {name}{f' ({left})' if left else ''}", highlight=False, soft_wrap=True)
        self._stage = name
        self._bar.reset(self._task, total=1, description=name, counted="", note=self._left())

    def update(
        self, *, done: int, total: int, incumbent: str = "", measured: int = 0, failed: int = 0, left_s: float | None = None
    ) -> None:
        """Move the bar."""
        if left_s is not None:
            self._deadline = time.monotonic() + left_s
        notes = [left] if (left := self._left()) else []
        if incumbent:
            notes.append(incumbent)
        if measured:
            notes.append(f"{measured} measured")
        if failed:
            notes.append(f"{failed} failed")
        self._bar.update(self._task, completed=done, total=max(total, 1), counted=f"{done}/{max(total, 1)}", note=", ".join(notes))

    def _left(self) -> str:
        if self._deadline is None:
            return ""
        if self._deadline == OUTSIDE:
            return "not in the budget"
        left_s = self._deadline - time.monotonic()
        # A job never ends without its final comparison, so the last stages may come after the budget.
        return f"{left_s:.0f} s left" if left_s >= 1 else "budget spent, finishing"
