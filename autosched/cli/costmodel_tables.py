"""What ``autosched evaluate`` prints: every table of an evaluation, baselines beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from autosched.progress import metrics_table

if TYPE_CHECKING:
    from autosched.costmodel.evaluate import Evaluation


def print_evaluation(found: Evaluation, console: Console) -> None:
    """Pairs (all, unseen families, by family, by class), groups, whole schedules, calibration, importance."""
    simulated = f"; {found.simulated} pairs SIMULATED" if found.simulated else ""
    floor = "unknown" if found.noise_floor_pct is None else f"{found.noise_floor_pct:.1f} %"
    console.print(f"{found.rows} rows, noise floor of repeats {floor}{simulated}", highlight=False)
    for title, metrics in (
        ("all rows", found.overall),
        ("unseen model families", found.unseen),
        ("by model family", found.by_family),
        ("by class of pair", found.by_class),
    ):
        if metrics:
            console.print(metrics_table(f"{found.model}: {title}", metrics))
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


def _print(console: Console, title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(title=title)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
