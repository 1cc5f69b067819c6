"""The table that ``tune`` and ``compare`` print: as many of its columns as the terminal has room for, never a cell that is cut off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autosched.core.records import Source
from autosched.core.report import FoundSchedule, StrategyRow, TuneReport

_Cell = Callable[[StrategyRow], str]

_COLUMNS: Mapping[str, _Cell] = MappingProxyType(
    {
        "predicted us": lambda row: _number(row.predicted_us),
        "measured us": lambda row: _number(row.measured_us) if row.failure is None else str(row.failure.kind),
        "95 % interval": lambda row: f"{row.ci_us[0]:,.0f} - {row.ci_us[1]:,.0f}" if row.ci_us else "",
        "vs sequential": lambda row: _ratio(row.speedup_vs_sequential),
        "vs best baseline": lambda row: _ratio(row.speedup_vs_best_baseline),
        "peak MiB": lambda row: f"{row.peak_memory_bytes / 2**20:,.1f}" if row.peak_memory_bytes is not None else "",
        "max error": lambda row: f"{row.max_abs_error:.1e}" if row.max_abs_error is not None else "",
    }
)
# What a narrow terminal goes without, first to go first, after frame and long headings; name, measured time and interval always stay.
_DROPPED_FIRST = ("peak MiB", "max error", "vs best baseline", "predicted us", "vs sequential")

_SHORT = MappingProxyType({"vs sequential": "vs seq.", "vs best baseline": "vs best"})


def strategy_table(report: TuneReport, console: Console) -> tuple[Table, tuple[str, ...]]:
    """The schedules of ``report``, fastest first, each once, and the headings of columns that ``console`` is too narrow for."""
    unlimited = console.options.update(max_width=10_000)
    table = _table(report, list(_COLUMNS), narrow=False)
    for count in range(len(_DROPPED_FIRST) + 1):
        if console.measure(table, options=unlimited).maximum <= console.width:
            return table, _DROPPED_FIRST[: max(0, count - 1)]
        table = _table(report, [heading for heading in _COLUMNS if heading not in _DROPPED_FIRST[:count]], narrow=True)
    return table, _DROPPED_FIRST


def _table(report: TuneReport, headings: list[str], *, narrow: bool) -> Table:
    # Plain text throughout: a failure's detail or a model's name may look like markup.
    title = f"{report.model} on {report.device.name} ({report.operators} operators, {report.lowering}); {report.source.value}"
    table = Table(title=Text(title), box=box.SIMPLE_HEAD if narrow else box.HEAVY_HEAD)
    table.add_column("strategy", no_wrap=True)
    for heading in headings:
        shown = f"{report.source.value} us" if heading == "measured us" else heading
        table.add_column(_SHORT.get(heading, shown) if narrow else shown, justify="right", no_wrap=True)
    for found in report.schedules():
        row = found.row
        style = "bold" if row.name == report.chosen else ("dim" if row.failure else "")
        cells = [_name(found, report), *(_COLUMNS[heading](row) for heading in headings)]
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _name(found: FoundSchedule, report: TuneReport) -> str:
    row = found.row
    simulated = row.source is Source.SIMULATED
    held = (("kept", row.name == report.chosen), ("baseline", row.is_baseline), ("simulated", simulated))
    marks = [mark for mark, holds in held if holds]
    return row.name + (f" ({', '.join(marks)})" if marks else "") + found.suffix


def _number(value: float | None) -> str:
    return f"{value:,.0f}" if value is not None else ""


def _ratio(value: float | None) -> str:
    return f"{value:.3f}x" if value is not None else ""
