"""Commands on a tuned schedule: ``bench``, ``check``, ``trace`` and ``report``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from autosched.cli.options import ChosenDeviceOption, CustomOperatorsOption, FileArgument, JsonOption, QuietOption, SeedOption, names_in
from autosched.cli.printing import emit, live_progress
from autosched.cli.shapes import ChosenBatchOption, ShapeOption
from autosched.runtime.kept_memory import keep_memory


def bench(
    file: FileArgument,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model; by default the one the schedule was tuned for.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=5, help="Interleaved rounds; default: 40, or as many as fit into five minutes; with --pause 100.")
    ] = None,
    pause: Annotated[
        float | None, typer.Option(metavar="MS", help="Instead: single calls as a server makes them, each after so many milliseconds.")
    ] = None,
    shape: ShapeOption = None,
    batch: ChosenBatchOption = None,
    device: ChosenDeviceOption = "auto",
    custom_operators: CustomOperatorsOption = None,
    seed: SeedOption = 0,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Measure a tuned schedule against the sequential one and against the model as it comes, interleaved; every shape by default."""
    from autosched import pipeline, zoo
    from autosched.core.custom_operators import trusting

    _look(device)
    bundle = pipeline.read(file, shape=shape, batch=batch)
    if bundle.keeps_memory:
        keep_memory()
    loaded = zoo.load(model if model is not None else bundle.model_name, dtype=bundle.dtype, seed=bundle.seed)
    with trusting(names_in(custom_operators)), live_progress(quiet=quiet) as progress:
        run = partial(pipeline.bench, rounds=rounds) if pause is None else partial(pipeline.bench_paused, pause_ms=pause, calls=rounds)
        result = run(file, loaded.model, seed=seed, shape=shape, batch=batch, device=device, progress=progress)
    if json:
        emit(result)
    else:
        print(result.summary())


def check(
    file: FileArgument,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Also check it against this model.")] = None,
    shape: ShapeOption = None,
    batch: ChosenBatchOption = None,
    device: ChosenDeviceOption = "auto",
    custom_operators: CustomOperatorsOption = None,
    json: JsonOption = False,
) -> None:
    """Say whether a tuned schedule fits this machine: exact, degraded or incompatible, with a line for each difference."""
    from autosched import pipeline, zoo
    from autosched.core.custom_operators import trusting

    _look(device)
    bundle = pipeline.read(file, shape=shape, batch=batch)
    loaded = zoo.load(model, dtype=bundle.dtype, seed=bundle.seed) if model is not None else None
    with trusting(names_in(custom_operators)):
        result = pipeline.check(file, loaded.model if loaded is not None else None, shape=shape, batch=batch, device=device)
    if json:
        emit(result)
    else:
        print(result.summary())
    if not result.usable:
        raise typer.Exit(4)


def trace(
    file: FileArgument,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model; by default the one the schedule was tuned for.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write the trace.")] = Path("trace.json"),
    shape: ShapeOption = None,
    batch: ChosenBatchOption = None,
    device: ChosenDeviceOption = "auto",
    custom_operators: CustomOperatorsOption = None,
    json: JsonOption = False,
) -> None:
    """Run a tuned schedule once with time stamps and write a timeline for Perfetto (ui.perfetto.dev)."""
    from autosched import pipeline, zoo
    from autosched.core.custom_operators import trusting

    pipeline.check_writable(output)
    _look(device)
    bundle = pipeline.read(file, shape=shape, batch=batch)
    if bundle.keeps_memory:
        keep_memory()
    loaded = zoo.load(model if model is not None else bundle.model_name, dtype=bundle.dtype, seed=bundle.seed)
    with trusting(names_in(custom_operators)):
        result = pipeline.trace(file, loaded.model, output, shape=shape, batch=batch, device=device)
    if json:
        emit(result)
    else:
        print(result.summary())


def report(
    file: FileArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write the page.")] = Path("report.html"),
    json: JsonOption = False,
) -> None:
    """Write what a tuning job found as one HTML page that needs no network.

    Example: autosched report googlenet.autosched -o report.html
    """
    from autosched.export.report import write_report
    from autosched.runtime.bundle.format import read_bundles

    result = write_report(output, read_bundles(file))
    if json:
        emit(result)
    else:
        print(result.summary())


def _look(device: str) -> None:
    """Find a device that is not here before a model is built."""
    from autosched.device.registry import AUTO, device_named

    if device != AUTO:
        device_named(device)


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command()(bench)
    app.command()(check)
    app.command()(trace)
    app.command()(report)
