"""Commands on a tuned schedule: ``bench``, ``check``, ``trace`` and ``report``."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autosched.cli.options import (
    ChosenDeviceOption,
    CustomOperatorsOption,
    FileArgument,
    JsonOption,
    QuietOption,
    SeedOption,
    check_spared,
    names_in,
)
from autosched.cli.printing import complain, emit, live_progress, tell
from autosched.cli.shapes import ChosenBatchOption, ShapeOption
from autosched.runtime.kept_memory import keep_memory

if TYPE_CHECKING:
    from autosched.pipeline.bundles import Opened
    from autosched.zoo import ZooModel

ModelOfFile = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The model; by default the one the schedule was tuned for, if a library has it."),
]
_CODE_OF_A_USER = re.compile(r"[\w.]+:\w+|[\w./-]+\.pt2")


def bench(
    file: FileArgument,
    model: ModelOfFile = None,
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
    from autosched import pipeline
    from autosched.core.custom_operators import trusting
    from autosched.pipeline.benching import BenchShapes

    _look(device)
    bundle = pipeline.read(file, shape=shape, batch=batch)
    if bundle.keeps_memory:
        keep_memory()
    loaded = _build("bench", file, bundle, model)
    with trusting(names_in(custom_operators)), live_progress(quiet=quiet) as progress:
        run = partial(pipeline.bench, rounds=rounds) if pause is None else partial(pipeline.bench_paused, pause_ms=pause, calls=rounds)
        result = run(file, loaded.model, seed=seed, shape=shape, batch=batch, device=device, progress=progress)
    if json:
        emit(result)
    else:
        tell(result.summary())
    if isinstance(result, BenchShapes) and result.unstable:
        of_all = f"{len(result.unstable)} of {len(result.unstable) + len(result.shapes)} shapes"
        complain(f"autosched: nothing can be said of {of_all}: the machine was too noisy; stop other work on it and try again")
        raise typer.Exit(3)


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
    from autosched import pipeline
    from autosched.core.custom_operators import trusting

    _look(device)
    bundle = pipeline.read(file, shape=shape, batch=batch)
    loaded = _build("check", file, bundle, model) if model is not None else None
    with trusting(names_in(custom_operators)):
        result = pipeline.check(file, loaded.model if loaded is not None else None, shape=shape, batch=batch, device=device)
    if json:
        emit(result)
    else:
        tell(result.summary())
    if not result.usable:
        raise typer.Exit(4)


def trace(
    file: FileArgument,
    model: ModelOfFile = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write the trace.")] = Path("trace.json"),
    shape: ShapeOption = None,
    batch: ChosenBatchOption = None,
    device: ChosenDeviceOption = "auto",
    custom_operators: CustomOperatorsOption = None,
    json: JsonOption = False,
) -> None:
    """Run a tuned schedule once with time stamps and write a timeline for Perfetto (ui.perfetto.dev)."""
    from autosched import pipeline
    from autosched.core.custom_operators import trusting

    pipeline.check_writable(output)
    check_spared(output, file, model or file)
    _look(device)
    bundle = pipeline.read(file, shape=shape, batch=batch)
    if bundle.keeps_memory:
        keep_memory()
    loaded = _build("trace", file, bundle, model)
    with trusting(names_in(custom_operators)):
        result = pipeline.trace(file, loaded.model, output, shape=shape, batch=batch, device=device)
    if json:
        emit(result)
    else:
        tell(result.summary())


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

    check_spared(output, file)
    result = write_report(output, read_bundles(file))
    if json:
        emit(result)
    else:
        tell(result.summary())


def _build(command: str, file: Path, opened: Opened, model: str | None) -> ZooModel:
    """The model that ``command`` is about, built as it was tuned: the one that was named, else the one in the file.

    Raises:
        UsageError: if none was named, and the file's is no library's: a file may come from a stranger, and names no code to be run.
    """
    from autosched import zoo
    from autosched.core.errors import UsageError
    from autosched.runtime.bundle.zip import printable

    tuned_for = opened.model_name
    if model is None and not zoo.of_library(tuned_for):
        told = _CODE_OF_A_USER.fullmatch(tuned_for)
        name = tuned_for if told else "MODEL"
        what = "" if told else ", with a module:function or a .pt2 file that is this model for MODEL"
        raise UsageError(
            f"{file} was tuned for {printable(tuned_for)!r}, which no library has, and a file by itself has nothing imported or called; "
            f"name the model if you trust it: autosched {command} {shlex.quote(str(file))} {name}{what}"
        )
    name = model if model is not None else tuned_for
    # Another function for the same model need not take a batch size.
    batch = opened.batch if name == tuned_for else None
    # An exported program has that in which it was exported.
    dtype = opened.dtype if not name.endswith(".pt2") else None
    return zoo.load(name, batch=batch, dtype=dtype, seed=opened.seed)


def _look(device: str) -> None:
    """Find a device that is not here before a model is built."""
    from autosched.core.errors import UsageError
    from autosched.device.registry import AUTO, device_named

    if device.startswith("replay:"):
        raise UsageError(f"--device is {device!r}, and no schedule runs on recorded runs; name a device of this machine, or leave it out")
    if device != AUTO:
        device_named(device)


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command()(bench)
    app.command()(check)
    app.command()(trace)
    app.command()(report)
