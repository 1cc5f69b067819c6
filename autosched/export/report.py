"""The report: one HTML file that needs no network, for people who did not run the job.

Model, operator and strategy names may come from a stranger's bundle: the template escapes every one, figures escape their labels, and the
page forbids itself to load anything (``default-src 'none'``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from autosched.core.atomic_write import write_atomically
from autosched.core.errors import UsageError, why_of
from autosched.core.records import Source
from autosched.core.report import FoundSchedule, StrategyRow, TuneReport, where_time_went
from autosched.runtime.bundle.format import Bundle, printable
from autosched.runtime.plan import make_plan
from autosched.search.heuristics.sequential import SEQUENTIAL, SEQUENTIAL_WIDE

# A table of more rows is no longer read; the bundle holds them all.
MOST_OPERATORS = 5000
_TEMPLATE = "report.html.j2"


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure at the top: what it is, its value, and a line under it."""

    title: str
    value: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StrategyCells:
    """One line of the strategy table, as text; ``marks`` are ``kept``, ``baseline``, both or none; ``others`` found that schedule too."""

    name: str
    others: str
    marks: tuple[str, ...]
    predicted: str
    measured: str
    interval: str
    vs_sequential: str
    vs_best: str
    memory: str
    error: str
    source: str


@dataclass(frozen=True, slots=True)
class OperatorCells:
    """One line of the operator table; times in microseconds as text, empty where unknown."""

    index: int
    name: str
    kind: str
    lane: int
    launch: int
    width: int
    variant: str
    alone: str
    planned: str
    measured: str
    stretch: str
    gflop: str
    megabytes: str
    source: str


@dataclass(frozen=True, slots=True)
class Section:
    """All that the page says of one shape of inputs. ``figures`` are ``(place, plotly's own JSON value)``."""

    title: str
    verdict: str
    pill: str
    tiles: tuple[Tile, ...]
    strategies: tuple[StrategyCells, ...]
    failures: tuple[tuple[str, str, str], ...]
    operators: tuple[OperatorCells, ...]
    left_out: int
    figures: tuple[tuple[str, Any], ...]
    notes: tuple[str, ...]
    rewrites: tuple[tuple[str, int], ...]
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    report: TuneReport

    @property
    def careful(self) -> bool:
        """Whether a reader should think twice: the verdict is no measurement of this device, or something else is faster beyond noise."""
        kept = _kept(self.report)
        gain = kept.speedup_vs_best_baseline if kept is not None else None
        slower = gain is not None and gain < 1.0 - self.report.noise_floor_pct / 100.0
        return slower or self.report.unstable or self.report.source is not Source.MEASURED

    def has(self, figure: str) -> bool:
        """Whether there is data for a figure of that name."""
        return any(place.rpartition("-")[0] == figure for place, _ in self.figures)


def report_html(bundles: Sequence[Bundle]) -> str:
    """The page.

    Args:
        bundles: one for each shape of inputs of a file, at least one.

    Raises:
        UsageError: if plotly or Jinja2 is not installed, or there is no bundle.
    """
    if not bundles:
        raise UsageError("there is nothing to report; expected at least one tuned schedule")
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(
            f"a report needs the package {error.name}, which is not installed; install it with: pip install 'autosched[report]'"
        ) from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files("autosched.export").joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    sections = [_section(bundle, shape, len(bundles)) for shape, bundle in enumerate(bundles)]
    return template.render(sections=sections, first=bundles[0], plotlyjs=get_plotlyjs())


@dataclass(frozen=True, slots=True)
class Written:
    """``autosched report``: the page's path, its size, and what it is about."""

    report: str
    bytes: int
    model: str
    chosen: tuple[str, ...]

    def summary(self) -> str:
        """For people."""
        return f"{self.model} ({', '.join(self.chosen)} kept) written to {self.report}; open it in a browser, it needs no network"


def write_report(path: str | os.PathLike[str], bundles: Sequence[Bundle]) -> Written:
    """Write :func:`report_html` to ``path``.

    Raises:
        UsageError: as :func:`report_html`, or if the file cannot be written.
    """
    page = report_html(bundles).encode()
    target = Path(path)
    try:
        write_atomically(target, page)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {target}: {why_of(error)}. Choose a folder that exists and is writable.") from error
    reports = [bundle.evidence.report for bundle in bundles]
    return Written(str(target), len(page), printable(reports[0].model), tuple(printable(item.chosen) for item in reports))


def _section(bundle: Bundle, shape: int, shapes: int) -> Section:
    from autosched.export.report_figures import figures

    report = bundle.evidence.report
    failed = [row for row in report.strategies if row.failure is not None]
    inputs = ", ".join(f"{list(bundle.program.graph.values[value].spec.shape)}" for value in bundle.program.graph.inputs)
    return Section(
        title=f"inputs {inputs}" if shapes > 1 else "",
        verdict=report.verdict,
        pill=_pill(report),
        tiles=_tiles(bundle),
        strategies=tuple(_strategy(found, report) for found in report.schedules() if found.row.failure is None),
        failures=tuple((row.name, str(row.failure.kind), row.failure.detail) for row in failed if row.failure is not None),
        operators=_operators(bundle),
        left_out=max(0, len(bundle.program.graph) - MOST_OPERATORS),
        figures=tuple((item.place, json.loads(item.figure.to_json())) for item in figures(bundle, shape)),
        notes=report.notes,
        rewrites=tuple(item for item in bundle.evidence.rewrites if item[1]),
        facts=_facts(bundle),
        report=report,
    )


def _kept(report: TuneReport) -> StrategyRow | None:
    return next((row for row in report.strategies if row.name == report.chosen), None)


def _pill(report: TuneReport) -> str:
    if report.source is not Source.MEASURED:
        return f"{report.source}, not measured"
    if report.unstable:
        return "no statement"
    kept = _kept(report)
    return "sequential schedule kept" if kept is None or kept.name in (SEQUENTIAL.name, SEQUENTIAL_WIDE.name) else "tuned schedule kept"


def _tiles(bundle: Bundle) -> tuple[Tile, ...]:
    report = bundle.evidence.report
    kept = _kept(report)
    tiles: list[Tile] = []
    if kept is not None and kept.measured_us is not None:
        interval = f"95 % interval {_ms(kept.ci_us[0])} to {_ms(kept.ci_us[1])} ms" if kept.ci_us else "median"
        tiles.append(Tile("measured", f"{_ms(kept.measured_us)} ms", interval))
        tiles.append(Tile("over one lane", _times(kept.speedup_vs_sequential), _confirmed(report)))
        tiles.append(Tile("over the best baseline", _times(kept.speedup_vs_best_baseline), report.best_baseline))
        if kept.predicted_us is not None:
            off_pct = 100 * (kept.predicted_us / kept.measured_us - 1)
            tiles.append(Tile("predicted", f"{_ms(kept.predicted_us)} ms", f"{abs(off_pct):.1f} % too {'fast' if off_pct < 0 else 'slow'}"))
        bounds = [bound for bound in (report.critical_path_us, report.work_us) if bound]
        # Times alone are measured, too: a schedule that was faster has refuted what follows from them.
        if bounds and max(bounds) <= kept.measured_us:
            said = f"critical path {_ms(report.critical_path_us)}, work over capacity {_ms(report.work_us)} ms"
            tiles.append(Tile("no schedule beats", f"{_ms(max(bounds))} ms", said))
    used = len({bundle.schedule.lane[index] for index in range(len(bundle.program.graph))})
    tiles.append(Tile("operators", f"{report.operators}", f"on {used} lane{'s' if used != 1 else ''}"))
    tiles.append(Tile("measurements", f"{report.measurements:,}", f"{report.failures} failed"))
    tiles.append(Tile("job", f"{report.search_s:.0f} s", f"effort {report.effort}, seed {report.seed}"))
    tiles.append(Tile("noise floor", f"{report.noise_floor_pct:.1f} %", "two runs of one schedule"))
    return tuple(tiles)


def _confirmed(report: TuneReport) -> str:
    """What the duel, whose rounds chose nothing, says of the speed-up over one lane; the fastest of many is partly the luckiest."""
    low, high = report.ratio_low, report.ratio_high
    if (low, high) == (1.0, 1.0) or min(low, high) <= 0.0:
        return "the same operators one after another"
    return f"the same operators one after another; in fresh rounds {_times(1 / high)} to {_times(1 / low)}"


def _strategy(found: FoundSchedule, report: TuneReport) -> StrategyCells:
    row = found.row
    return StrategyCells(
        name=row.name,
        others=", ".join(found.others),
        marks=(*(("kept",) if row.name == report.chosen else ()), *(("baseline",) if row.is_baseline else ())),
        predicted=_ms(row.predicted_us),
        measured=_ms(row.measured_us),
        interval=f"{_ms(row.ci_us[0])} to {_ms(row.ci_us[1])}" if row.ci_us else "",
        vs_sequential=_times(row.speedup_vs_sequential),
        vs_best=_times(row.speedup_vs_best_baseline),
        memory=f"{row.peak_memory_bytes / 2**20:.1f}" if row.peak_memory_bytes is not None else "",
        error=f"{row.max_abs_error:.1e}" if row.max_abs_error is not None else "",
        source=str(row.source),
    )


def _operators(bundle: Bundle) -> tuple[OperatorCells, ...]:
    graph, evidence = bundle.program.graph, bundle.evidence
    found: list[OperatorCells] = []
    for launch, step in enumerate(make_plan(graph, bundle.schedule).steps[:MOST_OPERATORS]):
        operator = graph.operators[step.operator]
        planned, measured = (
            times.end_us[step.operator] - times.start_us[step.operator] if times.start_us else None
            for times in (evidence.planned, evidence.measured)
        )
        alone = evidence.solo_us[step.operator] if evidence.solo_us else None
        found.append(
            OperatorCells(
                index=step.operator,
                name=operator.name,
                kind=operator.kind.removeprefix("aten::"),
                lane=step.lane,
                launch=launch,
                width=step.width,
                variant=str(step.variant) if step.variant else "",
                alone=_us(alone),
                planned=_us(planned),
                measured=_us(measured),
                stretch=f"{measured / alone:.2f}" if alone and measured is not None else "",
                gflop=f"{operator.flops / 1e9:.3f}" if operator.flops else "",
                megabytes=f"{(operator.bytes_read + operator.bytes_written) / 1e6:.2f}",
                source=operator.source,
            )
        )
    return tuple(found)


def _facts(bundle: Bundle) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    key, report = bundle.key, bundle.evidence.report
    schedule = (
        ("model", report.model),
        ("graph", key.graph),
        ("lowering", report.lowering),
        *(("lowering tried", row.sentence()) for row in report.lowerings),
        ("written by", f"autosched {bundle.created_by.autosched}, torch {bundle.created_by.torch}, Python {bundle.created_by.python}"),
        *((("where the time went", spent),) if (spent := where_time_went(report.stages)) else ()),
        *((f"seed of {name}", str(seed)) for name, seed in bundle.evidence.seeds),
    )
    return (
        ("schedule", schedule),
        ("device", (("name", key.device.name), ("kind", key.device.kind), *key.device.details)),
        ("software", key.software.versions),
        ("numerics", key.numerics),
        ("as tuned", bundle.evidence.environment),
    )


def _ms(time_us: float | None) -> str:
    if time_us is None:
        return ""
    value = time_us / 1000.0
    return f"{value:,.{1 if value >= 100 else 2 if value >= 10 else 3 if value >= 0.1 else 4}f}"


def _us(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us:,.1f}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}x"
