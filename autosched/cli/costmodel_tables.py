"""What ``autosched train`` and ``autosched evaluate`` print: every table of errors, baselines beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autosched.cli.printing import say

if TYPE_CHECKING:
    from autosched.costmodel.evaluate import Evaluation
    from autosched.costmodel.metrics import CurvePoint, Metrics
    from autosched.costmodel.trained import Card

_METRICS = (
    "rows",
    "contended",
    "MAPE %",
    "contended MAPE %",
    "contended median APE %",
    "contended Spearman",
    "makespan MAPE %",
    "90 % interval holds %",
)
# What a narrow terminal shows in place of these words.
_SHORT = (("contended", "cont."), ("Spearman", "rank corr."), ("makespan", "span"), ("interval holds", "holds"), ("schedules", "sched."))


def print_training(card: Card, curve: Sequence[CurvePoint], console: Console) -> None:
    """What a model was trained on, the errors of every kind on held-out rows, the learning curve, and why it was chosen."""
    simulated = f", {card.simulated} of them SIMULATED" if card.simulated else ""
    lanes = f" ({card.engine} lanes)" if card.engine else ""
    say(console, f"{card.pairs} pairs{simulated} on {', '.join(card.devices)}{lanes}; model families: {', '.join(card.families)}")
    say(console, f"noise floor of repeats {_floor(card.noise_floor_pct)}, seed {card.seed}")
    if card.held_out:
        rows = [(name, *_cells(row)) for name, row in card.held_out.items()]
        _print(console, f"errors on rows held out by {card.decision.folds}", ("model", *_METRICS), rows)
    else:
        say(console, "nothing was held out, so nothing is known of its errors")
    for point in curve:
        error = point.metrics.mean_abs_log
        say(console, f"{point.model} fitted on {point.pairs} pairs: mean |log error| {error:.4f} on held-out rows")
    say(console, f"chosen: {card.decision.chosen} ({card.decision.reason})")


def _floor(noise_floor_pct: float | None) -> str:
    return "unknown" if noise_floor_pct is None else f"{noise_floor_pct:.1f} %"


def print_evaluation(found: Evaluation, console: Console) -> None:
    """Pairs (all, unseen families, by family, by class), groups, whole schedules, calibration, importance."""
    simulated = f"; {found.simulated} pairs SIMULATED" if found.simulated else ""
    if found.folder:
        # Nothing but the terminal breaks a path.
        console.print(f"the cost model in {found.folder}", highlight=False, markup=False, soft_wrap=True)
    say(console, f"{found.rows} rows, noise floor of repeats {_floor(found.noise_floor_pct)}{simulated}")
    for title, metrics in (
        ("all rows", found.overall),
        ("unseen model families", found.unseen),
        ("by model family", found.by_family),
        ("by class of pair", found.by_class),
    ):
        if metrics:
            _print(console, f"{found.model}: {title}", ("model", *_METRICS), [(name, *_cells(row)) for name, row in metrics.items()])
    # The prior was fitted to nothing.
    if found.seen_families and found.model != "analytic":
        seen = f"these model families were in its training: {', '.join(found.seen_families)}" if found.unseen else ""
        where = "what counts is the table of unseen ones" if found.unseen else "its errors on held-out ones are in its card.md"
        say(console, f"{seen or 'every model family here was in its training'}, which flatters it; {where}")
    if found.composition:
        _print(
            console,
            "three and four at once, composed from pairs: error of the time together, %",
            ("k", "groups", found.model, "no interference", "one after the other"),
            [
                (
                    str(row.k),
                    str(row.groups),
                    *(f"{value:.1f}" for value in (row.model_mape_pct, row.no_interference_mape_pct, row.sequential_mape_pct)),
                )
                for row in found.composition
            ],
        )
    if found.schedules:
        _print(
            console,
            "whole schedules, no pair of them measured",
            ("model", "graphs", "schedules", "makespan MAPE %", "bias %", "Spearman", "regret of its choice %", "of a blind choice %"),
            [
                (
                    row.model, str(row.graphs), str(row.schedules), f"{row.mape_pct:.1f}", f"{row.bias_pct:+.1f}",
                    "" if row.spearman is None else f"{row.spearman:.2f}", f"{row.regret_pct:.1f}", f"{row.random_regret_pct:.1f}",
                )
                for row in found.schedules
            ],
        )  # fmt: skip
    if found.calibration:
        _print(
            console,
            "calibration: slowdowns predicted and measured",
            ("predicted from", "to", "rows", "mean predicted", "mean measured", "inside the 90 % interval %"),
            [
                (
                    f"{row.predicted_from:.2f}", f"{row.predicted_to:.2f}", str(row.rows), f"{row.predicted_mean:.2f}",
                    f"{row.measured_mean:.2f}", "" if row.inside_pct is None else f"{row.inside_pct:.0f}",
                )
                for row in found.calibration
            ],
        )  # fmt: skip
    if found.importance:
        rows = [(name, f"{rise:.4f}") for name, rise in found.importance[:10]]
        _print(console, "permutation importance: rise of mean |log error|", ("feature", "rise"), rows)


def _cells(row: Metrics) -> tuple[str, ...]:
    values = (
        (row.contended_mape_pct, 1), (row.contended_median_ape_pct, 1), (row.contended_spearman, 2), (row.makespan_mape_pct, 1),
        (row.coverage_pct, 1),
    )  # fmt: skip
    rest = (f"{value:.{digits}f}" if value is not None else "" for value, digits in values)
    return (str(row.rows), str(row.contended_rows), f"{row.mape_pct:.1f}", *rest)


def _print(console: Console, title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    # Fits 80 columns: no frame, and headings in several lines of short words where there is no room for one.
    wide = console.width >= 120
    # Plain text throughout: a family takes its name from a model's, which may look like markup.
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=not wide)
    for place, heading in enumerate(headings):
        for word, short in () if wide else _SHORT:
            heading = heading.replace(word, short)
        table.add_column(heading, justify="right" if place else "left", no_wrap=not place)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
