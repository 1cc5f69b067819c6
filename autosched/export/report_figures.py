"""The figures of the report, as plotly figures: strategies side by side, the timeline, and predictions against measurements.

Every string from a bundle is escaped here: plotly reads a few HTML tags in labels, and a bundle may come from a stranger.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autosched.core.graph import OpGraph
from autosched.core.report import StrategyRow
from autosched.runtime.bundle.format import Bundle, OperatorTimes
from autosched.runtime.plan import make_plan

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Colour-blind safe: Okabe and Ito, "Color Universal Design" (2008).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_OTHERS = "#BBBBBB"
_INK = "#1d2733"
_FONT = {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13, "color": _INK}
# More slices than this make a browser slow and a picture grey.
MOST_SLICES = 3000


@dataclass(frozen=True)
class NamedFigure:
    """A figure and where it goes: ``place`` is the id of its element."""

    place: str
    figure: Figure


def figures(bundle: Bundle, shape: int = 0) -> list[NamedFigure]:
    """Those figures of one bundle for which it holds data; ``shape`` keeps the places of several bundles apart."""
    report = bundle.evidence.report
    made = {
        "strategies": strategies_figure([found.row for found in report.schedules()], report.chosen),
        "timeline": timeline_figure(bundle),
        "scatter": scatter_figure(bundle),
    }
    return [NamedFigure(f"{name}-{shape}", figure) for name, figure in made.items() if figure is not None]


def strategies_figure(rows: Sequence[StrategyRow], chosen: str) -> Figure | None:
    """Measured medians with their intervals, the fastest on top, predictions beside them; ``None`` if nothing was measured."""
    from plotly import graph_objects as go

    # Drawn from below; of equals the kept one is on top, as in the table.
    timed = sorted((row for row in rows if row.measured_us is not None), key=lambda row: (-(row.measured_us or 0.0), row.name == chosen))
    if not timed:
        return None
    names = [_said(row.name) for row in timed]
    measured = [_milliseconds(row.measured_us) for row in timed]
    intervals = [row.ci_us or (row.measured_us, row.measured_us) for row in timed]
    colours = ["#009E73" if row.name == chosen else "#D55E00" if row.is_baseline else "#0072B2" for row in timed]
    figure = go.Figure(
        [
            go.Bar(
                x=measured,
                y=names,
                orientation="h",
                marker={"color": colours, "opacity": 0.85},
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": [_milliseconds(high) - middle for (_, high), middle in zip(intervals, measured, strict=True)],
                    "arrayminus": [middle - _milliseconds(low) for (low, _), middle in zip(intervals, measured, strict=True)],
                    "color": _INK,
                    "thickness": 1.2,
                    "width": 3,
                },
                name="measured (median, 95 % interval)",
                hovertemplate="%{y}: %{x:.3f} ms measured<extra></extra>",
            ),
            go.Scatter(
                x=[_milliseconds(row.predicted_us) if row.predicted_us is not None else None for row in timed],
                y=names,
                mode="markers",
                marker={"symbol": "diamond-open", "size": 9, "color": _INK, "line": {"width": 1.6}},
                name="predicted by the cost model",
                hovertemplate="%{y}: %{x:.3f} ms predicted<extra></extra>",
            ),
        ]
    )
    _style(figure, height=90 + 26 * len(timed), x_title="milliseconds")
    figure.update_layout(showlegend=False)
    # Names that look like numbers or dates would be placed by their value.
    figure.update_yaxes(type="category")
    # One strategy that is ten times slower must not squeeze the rest into a line; its figure is in the table.
    figure.update_xaxes(range=[0.0, min(1.08 * max(measured), 3.0 * measured[len(measured) // 2])])
    return figure


def timeline_figure(bundle: Bundle) -> Figure | None:
    """One row for each lane, the planned run above the measured one; ``None`` without times."""
    from plotly import graph_objects as go

    graph, plan = bundle.program.graph, make_plan(bundle.program.graph, bundle.schedule)
    runs = [(title, times) for title, times in _runs(bundle) if times.start_us]
    if not runs or len(graph) * len(runs) > MOST_SLICES:
        return None
    lanes = sorted({step.lane for step in plan.steps})
    rows = [f"{title} · lane {lane}" for title, _ in runs for lane in lanes]
    colours = _colours(graph)
    lane_of = {step.operator: step.lane for step in plan.steps}
    figure = go.Figure()
    for kind, colour in colours.items():
        here = [
            (title, times, operator)
            for title, times in runs
            for operator in graph.operators
            if (operator.kind if operator.kind in colours else _REST) == kind
        ]
        figure.add_trace(
            go.Bar(
                base=[times.start_us[operator.index] for _, times, operator in here],
                x=[max(0.0, times.end_us[operator.index] - times.start_us[operator.index]) for _, times, operator in here],
                y=[f"{title} · lane {lane_of[operator.index]}" for title, _, operator in here],
                orientation="h",
                marker={"color": colour, "line": {"color": "#ffffff", "width": 0.4}},
                name=_said(kind.removeprefix("aten::")),
                text=[_said(f"{operator.index}: {operator.name}") for _, _, operator in here],
                textposition="none",
                hovertemplate="%{text}<br>%{base:.1f} us, for %{x:.1f} us<extra></extra>",
            )
        )
    _add_waits(figure, runs, lane_of, [(producer, step.operator) for step in plan.steps for producer in step.waits])
    _style(figure, height=140 + 34 * len(rows), x_title="microseconds from the start of the run")
    figure.update_layout(barmode="overlay", bargap=0.25, legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"})
    figure.update_yaxes(categoryorder="array", categoryarray=rows[::-1])
    return figure


def _add_waits(
    figure: Figure, runs: Sequence[tuple[str, OperatorTimes]], lane_of: dict[int, int], waits: Sequence[tuple[int, int]]
) -> None:
    from plotly import graph_objects as go

    if not waits:
        return
    across: list[float | None] = []
    down: list[str | None] = []
    for title, times in runs:
        for producer, consumer in waits:
            across += [times.end_us[producer], times.start_us[consumer], None]
            down += [f"{title} · lane {lane_of[producer]}", f"{title} · lane {lane_of[consumer]}", None]
    figure.add_trace(
        go.Scatter(
            x=across, y=down, mode="lines", line={"color": _INK, "width": 0.7}, opacity=0.45, name="waits across lanes", hoverinfo="skip"
        )
    )


def scatter_figure(bundle: Bundle) -> Figure | None:
    """Predicted against measured time, for whole schedules and for the operators of the kept one; ``None`` without either."""
    from plotly.subplots import make_subplots

    rows = [row for row in bundle.evidence.report.strategies if row.predicted_us is not None and row.measured_us is not None]
    whole = [(row.measured_us or 0.0, row.predicted_us or 0.0, row.name) for row in rows]
    planned, measured = bundle.evidence.planned, bundle.evidence.measured
    parts: list[tuple[float, float, str]] = []
    if planned.start_us and measured.start_us:
        parts = [
            (measured.end_us[index] - measured.start_us[index], planned.end_us[index] - planned.start_us[index], operator.name)
            for index, operator in enumerate(bundle.program.graph.operators)
        ]
        # A view takes no time: on two logarithmic axes it has no place.
        parts = [part for part in parts if part[0] > 0 and part[1] > 0][:MOST_SLICES]
    if not whole and not parts:
        return None
    figure = make_subplots(1, 2, subplot_titles=("whole schedules", "operators of the kept schedule"), horizontal_spacing=0.12)
    for column, (points, colour) in enumerate(((whole, "#0072B2"), (parts, "#E69F00")), start=1):
        _add_points(figure, points, colour, column)
    _style(figure, height=430, x_title="measured, us")
    figure.update_yaxes(title_text="predicted, us", col=1)
    figure.update_xaxes(title_text="measured, us")
    figure.update_xaxes(type="log", dtick=1, col=2)
    figure.update_yaxes(type="log", dtick=1, col=2)
    figure.update_layout(showlegend=False)
    return figure


def _add_points(figure: Figure, points: Sequence[tuple[float, float, str]], colour: str, column: int) -> None:
    from plotly import graph_objects as go

    if not points:
        return
    least, most = (choose(value for point in points for value in point[:2]) for choose in (min, max))
    line = go.Scatter(x=[least, most], y=[least, most], mode="lines", line={"color": _INK, "width": 1, "dash": "dot"}, hoverinfo="skip")
    dots = go.Scatter(
        x=[point[0] for point in points],
        y=[point[1] for point in points],
        mode="markers",
        marker={"color": colour, "size": 8, "opacity": 0.7},
        text=[_said(point[2]) for point in points],
        hovertemplate="%{text}<br>measured %{x:,.1f} us, predicted %{y:,.1f} us<extra></extra>",
    )
    for trace in (line, dots):
        figure.add_trace(trace, row=1, col=column)


def _runs(bundle: Bundle) -> list[tuple[str, OperatorTimes]]:
    return [("planned", bundle.evidence.planned), ("measured", bundle.evidence.measured)]


_REST = "other operators"


def _colours(graph: OpGraph) -> dict[str, str]:
    """The kinds that occur most, a colour each; all the rest share one."""
    counts: dict[str, int] = {}
    for operator in graph.operators:
        counts[operator.kind] = counts.get(operator.kind, 0) + 1
    common = sorted(counts, key=lambda kind: (-counts[kind], kind))[: len(_COLOURS)]
    found = dict(zip(common, _COLOURS, strict=False))
    return found if len(common) == len(counts) else {**found, _REST: _OTHERS}


def _style(figure: Any, *, height: int, x_title: str) -> None:
    figure.update_layout(
        template="none",
        height=height,
        font=_FONT,
        margin={"l": 10, "r": 20, "t": 30, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="#ffffff",
        hoverlabel={"font": _FONT, "bgcolor": "#ffffff"},
    )
    figure.update_xaxes(title_text=x_title, gridcolor="#e6eaef", zeroline=False)
    figure.update_yaxes(automargin=True, gridcolor="#f0f2f5", zeroline=False)


def _milliseconds(time_us: float | None) -> float:
    return (time_us or 0.0) / 1000.0


def _said(text: str) -> str:
    """``text`` as plotly shows it letter for letter."""
    return html.escape(text, quote=False)
