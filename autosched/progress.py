"""Tables and the progress line of the command line, with rich. Everything goes to stderr except results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from autosched.core.records import Source
from autosched.core.report import StrategyRow, TuneReport

if TYPE_CHECKING:
    from autosched.costmodel.metrics import Metrics


class LiveProgress:
    """A progress bar with the stage, the incumbent and the time left; implements ``core.progress.Progress``."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<28}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=1, note="")
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
            # A log file gets one line a stage instead of a bar.
            self._console.print(f"autosched: {name}{self._left()}", highlight=False)
        self._stage = name
        self._bar.reset(self._task, total=1, description=name, note=self._left())

    def update(
        self, *, done: int, total: int, incumbent: str = "", measured: int = 0, failed: int = 0, left_s: float | None = None
    ) -> None:
        """Move the bar."""
        if left_s is not None:
            self._deadline = time.monotonic() + left_s
        notes = [incumbent] if incumbent else []
        if measured:
            notes.append(f"{measured} measured")
        if failed:
            notes.append(f"{failed} failed")
        self._bar.update(self._task, completed=done, total=max(total, 1), note=", ".join(notes) + self._left())

    def _left(self) -> str:
        if self._deadline is None:
            return ""
        return f" ({max(self._deadline - time.monotonic(), 0):.0f} s left)"


def strategy_table(report: TuneReport) -> Table:
    """The table that ``tune`` and ``compare`` print."""
    # Plain text throughout: a failure's detail or a model's name may look like markup.
    title = f"{report.model} on {report.device.name} ({report.operators} operators, {report.lowering}); {report.source.value}"
    table = Table(title=Text(title))
    table.add_column("strategy")
    taken = f"{report.source.value} us"
    for heading in ("predicted us", taken, "95 % interval", "vs sequential", "vs best baseline", "peak MiB", "max error"):
        table.add_column(heading, justify="right")
    fastest_first = sorted(report.strategies, key=lambda row: (row.measured_us is None, row.measured_us or 0.0))
    for row in fastest_first:
        style = "bold" if row.name == report.chosen else ("dim" if row.failure else "")
        table.add_row(*(Text(cell) for cell in _cells(row, report)), style=style)
    return table


def _cells(row: StrategyRow, report: TuneReport) -> list[str]:
    simulated = row.source is Source.SIMULATED
    held = (("kept", row.name == report.chosen), ("baseline", row.is_baseline), ("simulated", simulated))
    marks = [mark for mark, holds in held if holds]
    name = row.name + (f" ({', '.join(marks)})" if marks else "")
    if row.failure is not None:
        return [name, _number(row.predicted_us), f"{row.failure.kind}", row.failure.detail[:40], "", "", "", ""]
    interval = f"{row.ci_us[0]:,.0f} - {row.ci_us[1]:,.0f}" if row.ci_us else ""
    memory = f"{row.peak_memory_bytes / 2**20:,.1f}" if row.peak_memory_bytes is not None else ""
    error = f"{row.max_abs_error:.1e}" if row.max_abs_error is not None else ""
    return [
        name,
        _number(row.predicted_us),
        _number(row.measured_us),
        interval,
        _ratio(row.speedup_vs_sequential),
        _ratio(row.speedup_vs_best_baseline),
        memory,
        error,
    ]


def metrics_table(title: str, metrics: Mapping[str, Metrics]) -> Table:
    """Errors of a cost model beside its baselines, as ``evaluate`` prints them."""
    table = Table(title=title)
    table.add_column("model")
    for heading in (
        "rows",
        "contended",
        "MAPE %",
        "contended MAPE %",
        "contended median APE %",
        "Spearman",
        "makespan MAPE %",
        "90 % coverage",
    ):
        table.add_column(heading, justify="right")
    for name, row in metrics.items():
        table.add_row(
            name,
            str(row.rows),
            str(row.contended_rows),
            f"{row.mape_pct:.1f}",
            *(
                f"{value:.{digits}f}" if value is not None else ""
                for value, digits in (
                    (row.contended_mape_pct, 1),
                    (row.contended_median_ape_pct, 1),
                    (row.contended_spearman, 2),
                    (row.makespan_mape_pct, 1),
                    (row.coverage_pct, 1),
                )
            ),
        )
    return table


def _number(value: float | None) -> str:
    return f"{value:,.0f}" if value is not None else ""


def _ratio(value: float | None) -> str:
    return f"{value:.3f}x" if value is not None else ""
