"""Commands of the cost model: ``collect``, ``train`` and ``evaluate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autosched.cli.options import DeviceOption, JsonOption, SeedOption
from autosched.cli.printing import emit, live_progress


def collect(
    models: Annotated[list[str] | None, typer.Argument(help="Models to measure; default: the small suite.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the store; an existing one is added to.")] = Path("runs"),
    device: DeviceOption = "auto",
    budget: Annotated[str, typer.Option(help="Time for all models together, such as 10m.")] = "10m",
    pairs: Annotated[int, typer.Option(min=0, help="Most ordered pairs for each model.")] = 400,
    groups: Annotated[int, typer.Option(min=0, help="Most groups of three and four for each model.")] = 24,
    schedules: Annotated[int, typer.Option(min=0, help="Most whole schedules for each model.")] = 12,
    cost_model: Annotated[
        Path | None, typer.Option("--cost-model", help="A cost model; half of the pairs are then those it is least sure of.")
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Measure operators, pairs, groups and schedules on this device; run it again to go on where it stopped.

    Example: autosched collect torchvision:googlenet autosched:randwire -o runs --device cpu --budget 5m
    """
    from autosched import zoo
    from autosched.config import parse_seconds
    from autosched.pipeline import collecting

    names = models or [entry.name for entry in zoo.names() if not entry.package]
    loaded = [zoo.load(name, seed=seed) for name in names]
    subjects = [collecting.Subject(item.name, item.model, item.args, item.kwargs) for item in loaded]
    with live_progress() as progress:
        result = collecting.collect(
            subjects,
            output,
            device=device,
            budget_s=parse_seconds(budget),
            aims=collecting.Aims(pairs, groups, schedules),
            cost_model=cost_model,
            seed=seed,
            progress=progress,
        )
    if json:
        emit(result)
    else:
        print(result.summary())


def train(
    runs: Annotated[
        Path | None, typer.Argument(help="A store written by 'autosched collect'; default: what tuning jobs measured on this device.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder to write the cost model to; default: where tuning on this device looks.")
    ] = None,
    start: Annotated[Path | None, typer.Option("--from", help="A cost model trained elsewhere, to begin from.")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Fit the cost models, keep what wins on held-out model families, and print the table and the learning curve.

    Example: autosched train runs -o costmodel
    """
    from autosched.pipeline import retraining

    if runs is None or output is None:
        own_runs, own_model = retraining.places_of(device)
        runs, output = runs or own_runs, output or own_model
    training = retraining.train(runs, output, start=start, seed=seed)
    if json:
        emit({"model": str(output), "chosen": training.decision, "held_out": training.held_out, "curve": training.curve})
        return
    print(training.model.card.markdown())
    for point in training.curve:
        print(f"{point.model} fitted on {point.pairs} pairs: mean |log error| {point.metrics.mean_abs_log:.4f} on held-out rows")
    print(f"written to {output}")


def evaluate(
    model: Annotated[Path, typer.Argument(help="A folder written by 'autosched train'.")],
    runs: Annotated[Path, typer.Argument(help="A store to compare with.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write tables and figures to this folder.")] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Compare a cost model's predictions with measured runs, baselines beside."""
    from autosched.pipeline import retraining

    result = retraining.evaluate(model, runs, seed=seed)
    if output is not None:
        from autosched.costmodel.plots import write_plots

        output.mkdir(parents=True, exist_ok=True)
        (output / "evaluation.json").write_bytes(result.to_json())
        write_plots(result, result.curve, output / "evaluation.html")
    if json:
        emit(result)
        return
    from rich.console import Console

    from autosched.cli.costmodel_tables import print_evaluation

    print_evaluation(result, Console(width=None if sys.stdout.isatty() else 150))


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command()(collect)
    app.command()(train)
    app.command()(evaluate)
