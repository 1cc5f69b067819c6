"""Commands of the cost model: ``collect``, ``train`` and ``evaluate``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autosched.cli.options import CustomOperatorsOption, JsonOption, KeepMemoryOption, QuietOption, SeedOption, keep_memory_if, names_in
from autosched.cli.printing import complain, emit, live_progress, results_console, tell

if TYPE_CHECKING:
    from autosched.core.errors import UsageError
    from autosched.costmodel.evaluate import Evaluation
    from autosched.pipeline.model_choice import Judged

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto (CUDA if there is a GPU).")]


def collect(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Models to measure, named as for 'autosched tune'; default: those named autosched:NAME."),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder of the store; an existing one is added to.")] = Path(
        "runs"
    ),
    device: DeviceOption = "auto",
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time for all models together, such as 10m.")] = "10m",
    pairs: Annotated[int, typer.Option(min=0, help="Most ordered pairs for each model.")] = 400,
    groups: Annotated[int, typer.Option(min=0, help="Most groups of three and four for each model.")] = 24,
    schedules: Annotated[int, typer.Option(min=0, help="Most whole schedules for each model.")] = 12,
    cost_model: Annotated[
        Path | None,
        typer.Option(
            "--cost-model", metavar="DIR", help="A folder of 'autosched train'; half of the pairs are then those it is least sure of."
        ),
    ] = None,
    custom_operators: CustomOperatorsOption = None,
    keep_memory: KeepMemoryOption = False,
    seed: SeedOption = 0,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Measure operators, pairs, groups and schedules on this device; run it again to go on where it stopped.

    What is timed while other processes have the cores is measured again by the next run; exit code 3 if nothing else was.

    Example: autosched collect torchvision:googlenet autosched:randwire -o runs --device cpu --budget 5m
    """
    from autosched import zoo
    from autosched.config import parse_seconds
    from autosched.core.custom_operators import trusting
    from autosched.core.errors import UsageError
    from autosched.device.registry import device_named
    from autosched.pipeline import collecting
    from autosched.zoo_models import suite

    keep_memory_if(keep_memory)
    budget_s = parse_seconds(budget)
    _require_own(device)
    device_named(device)  # a mistake here is found before models are built
    names = models or [entry.name for entry in suite.names() if not entry.package]
    loaded = [zoo.load(name, seed=seed) for name in names]
    subjects = [collecting.Subject(item.name, item.model, item.args, item.kwargs) for item in loaded]
    with trusting(names_in(custom_operators)), live_progress(quiet=quiet) as progress:
        result = collecting.collect(
            subjects,
            output,
            device=device,
            budget_s=budget_s,
            aims=collecting.Aims(pairs, groups, schedules),
            cost_model=cost_model,
            seed=seed,
            progress=progress,
        )
    if len(result.not_measured) == len(subjects):
        raise UsageError("none of these models could be measured:\n  " + "\n  ".join(result.left_out))
    if json:
        emit(result)
    else:
        tell(result.summary())
    if result.disturbed and not result.kept:
        complain("autosched: nothing of this run was kept; stop other work on this machine and run the same command again")
        raise typer.Exit(3)


def train(
    runs: Annotated[
        Path | None,
        typer.Argument(metavar="RUNS", help="A store written by 'autosched collect'; default: what tuning jobs measured on this device."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="DIR", help="Folder to write the cost model to; default: where tuning on this device looks."
        ),
    ] = None,
    start: Annotated[Path | None, typer.Option("--from", metavar="DIR", help="A cost model trained elsewhere, to begin from.")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Fit the cost models, keep what wins on held-out model families, and print the table and the learning curve.

    Without -o the model is installed: tuning on this device uses it from then on.

    Example: autosched train runs
    """
    from autosched.pipeline import retraining

    _require_own(device)
    own_runs, own_model = retraining.places_of(device)
    runs, output = runs or own_runs, output or own_model
    with live_progress(quiet=quiet) as progress:
        training = retraining.train(
            runs, output, start=start, install_on=device if output == own_model else None, seed=seed, progress=progress
        )
    if json:
        emit({"model": str(output), "chosen": training.decision, "held_out": training.held_out, "curve": training.curve})
        return
    from autosched.cli.costmodel_tables import print_training

    print_training(training.model.card, training.curve, results_console())
    print(f"written to {output}")
    installed = retraining.judged_on(device, output) if output == own_model else None
    tell(whether_used(training.decision.chosen, output, installed, simulated=training.model.card.simulated))


def whether_used(chosen: str, output: Path, installed: tuple[Judged, Judged] | None, *, simulated: int = 0) -> str:
    """What a following tuning job will do with the model.

    Args:
        installed: where it was installed, what tuning on the device makes of it, and what it takes now.
        simulated: how many of its pairs no device measured.
    """
    more = "'autosched collect' more runs and train again"
    if installed is None:
        if chosen == "analytic":
            return f"no learned model is good enough yet: with it, tuning goes on with the analytic prior; {more}"
        if simulated:
            return f"{chosen} was trained on simulated runs: no tuning job uses it, even with --cost-model {output}"
        every = "for every job on this device, train without -o"
        return f"{chosen} is good enough to be used: autosched tune MODEL --cost-model {output}; {every}"
    own, in_use = installed
    if own.folder is not None:
        return f"{chosen} is good enough to be used: 'autosched tune' on this device uses it from now on ({own.why})"
    takes = f"{in_use.name}, {in_use.why}" if in_use.folder is not None else "the analytic prior"
    if chosen == "analytic":
        return f"no learned model is good enough yet: tuning on this device goes on with {takes}; {more}"
    return f"{own.why}, so it is not used: tuning on this device goes on with {takes}"


def evaluate(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODELDIR",
            help="A folder written by 'autosched train'; default: the one that tuning on this device reads.",
        ),
    ] = None,
    runs: Annotated[
        Path | None, typer.Argument(metavar="RUNS", help="A store to compare with; default: what tuning jobs measured on this device.")
    ] = None,
    device: DeviceOption = "auto",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Also write tables and figures to this folder.")
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Compare a cost model's predictions with measured runs, baselines beside.

    Example: autosched evaluate costmodel runs
    """
    from autosched.pipeline import retraining

    _require_own(device)
    if output is not None:
        from autosched.costmodel.plots import require_plotly

        # Found out before the comparison is made.
        require_plotly()
        _make_folder(output)
    result = retraining.evaluate(model or retraining.model_of(device), runs or retraining.places_of(device)[0], seed=seed)
    if output is not None:
        _write_evaluation(result, output)
    if json:
        emit(result)
        return
    from autosched.cli.costmodel_tables import print_evaluation

    print_evaluation(result, results_console())


def _write_evaluation(result: Evaluation, folder: Path) -> None:
    from autosched.core.atomic_write import write_atomically
    from autosched.costmodel.plots import write_plots

    try:
        write_atomically(folder / "evaluation.json", result.to_json())
        write_plots(result, result.curve, folder / "evaluation.html")
    except OSError as error:
        raise _unwritable(folder, f"{error.strerror}: {error.filename2 or error.filename or folder}") from error


def _require_own(device: str) -> None:
    """Nothing is measured on recorded runs, and no model is installed for them."""
    from autosched.core.errors import UsageError

    if device.startswith("replay:"):
        runs = shlex.quote(device.removeprefix("replay:"))
        raise UsageError(
            f"--device is {device!r}, and these commands are for a device of this machine; name one, or leave it out. "
            f"'autosched train {runs}' learns from the recorded runs."
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "its permissions do not allow it"
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise _unwritable(folder, why)


def _unwritable(folder: Path, why: str) -> UsageError:
    from autosched.core.errors import UsageError

    return UsageError(f"cannot write tables and figures to {folder}: {why}. Name a folder that is writable, or can be made, and has room.")


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command()(collect)
    app.command()(train)
    app.command()(evaluate)
