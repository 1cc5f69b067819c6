"""What the commands print: one JSON object, a report as a table, a progress bar on stderr."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from autosched.core.report import TuneReport
    from autosched.progress import LiveProgress


def emit(value: Any) -> None:
    """Write ``value`` (anything msgspec can encode) to stdout as one JSON object."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    sys.stdout.flush()


def live_progress() -> LiveProgress:
    """A progress bar on stderr, to be used with ``with``."""
    from rich.console import Console

    from autosched.progress import LiveProgress

    return LiveProgress(Console(stderr=True))


def show_report(report: TuneReport, as_json: bool) -> None:
    """Print a report.

    Raises:
        typer.Exit: with code 3 if the machine was too restless for any statement.
    """
    if as_json:
        emit(report)
    else:
        _print_report(report)
    if report.unstable:
        print("autosched: this machine was too restless for any statement; stop other work on it and run again", file=sys.stderr)
        raise typer.Exit(3)


def _print_report(report: TuneReport) -> None:
    from rich.console import Console

    from autosched.cli.strategy_table import strategy_table
    from autosched.core.report import where_time_went

    console = Console()
    # Piped into a file, the table keeps all its columns.
    if not console.is_terminal:
        console = Console(width=150)
    table, dropped = strategy_table(report, console)
    console.print(table)
    if dropped:
        wider = f"not shown for want of width: {', '.join(dropped)}; widen the terminal, pipe into a file, or use --json"
        console.print(wider, highlight=False, markup=False, style="dim")
    for failed in report.strategies:
        if failed.failure is not None:
            console.print(f"{failed.name} failed, {failed.failure.kind}: {failed.failure.detail}", highlight=False, markup=False)
    console.print(report.verdict, highlight=False, markup=False)
    for tried in report.lowerings:
        console.print(f"lowering {tried.sentence()}", highlight=False, markup=False)
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(
        f"{report.measurements} measurements, {report.failures} failures, {report.search_s:.1f} s, "
        f"noise floor {report.noise_floor_pct:.1f} %, seed {report.seed}",
        highlight=False,
    )
    if spent := where_time_went(report.stages):
        console.print(f"where the time went: {spent}", highlight=False, markup=False)
    for line in _next_steps(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _next_steps(report: TuneReport) -> tuple[str, ...]:
    """Where the schedule went and how to use it; nothing for a comparison, which keeps none."""
    if report.bundle:
        return (
            f"written to {report.bundle}",
            f"measure it again: autosched bench {shlex.quote(report.bundle)}",
            f"run it: autosched.load({report.bundle!r}, model)",
        )
    if report.cached:
        return (
            f"kept in the cache: {report.cached}",
            f"measure it again: autosched bench {shlex.quote(report.cached)}",
            'run it: torch.compile(model, backend="autosched") or autosched.compile(model, inputs) finds it on this machine',
            "to take it along or to load it by name: -o FILE",
        )
    return ()
