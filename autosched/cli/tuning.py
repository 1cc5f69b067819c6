"""Commands that tune: ``tune`` and ``compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autosched.cli.options import (
    BatchOption,
    BudgetOption,
    CostModelOption,
    CustomOperatorsOption,
    DeviceOption,
    DtypeOption,
    EffortOption,
    JsonOption,
    KeepMemoryOption,
    LoweringOption,
    ModelArgument,
    QuietOption,
    RewriteOption,
    SeedOption,
    check_spared,
    keep_memory_if,
    names_in,
)
from autosched.cli.printing import live_progress, show_report, tell_what_compiles_besides
from autosched.cli.shapes import BatchesOption, parse_batches, tune_several


def tune(
    model: ModelArgument,
    device: DeviceOption = "auto",
    effort: EffortOption = "balanced",
    budget: BudgetOption = None,
    batch: BatchesOption = None,
    dtype: DtypeOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Write the schedule to a file; the cache keeps it too if the machine was quiet enough."
        ),
    ] = None,
    rewrite: RewriteOption = True,
    lowering: LoweringOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what an earlier run has measured.")] = False,
    cost_model: CostModelOption = None,
    custom_operators: CustomOperatorsOption = None,
    keep_memory: KeepMemoryOption = False,
    seed: SeedOption = 0,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Measure MODEL, search schedules, verify the best on the device, and keep the winner: in the cache, and with -o in a file.

    Example: autosched tune torchvision:googlenet --device cpu --effort quick -o googlenet.autosched
    Example: autosched tune autosched:randwire --batch 1,4,16 -o randwire.autosched
    """
    from autosched import pipeline, zoo
    from autosched.config import parse_seconds
    from autosched.core.custom_operators import parse_namespaces
    from autosched.device.compiled_baseline import from_zoo
    from autosched.pipeline.budget import budget_for

    keep_memory_if(keep_memory)
    budget_s = parse_seconds(budget) if budget is not None else None
    if output is not None:
        pipeline.check_writable(output)
        check_spared(output, model)
    batches = parse_batches(batch)
    trusted = parse_namespaces(names_in(custom_operators))
    pipeline.check_request(device, effort, budget_s, lowering, cost_model=cost_model)
    loaded = [zoo.load(model, batch=size, dtype=dtype, seed=seed) for size in batches]
    if budget_for(effort).compiled_baseline and not quiet:
        tell_what_compiles_besides(device, effort, budget_s, "--effort quick")
    if len(loaded) > 1:
        tune_several(
            model, loaded, batches, output, json, device=device, effort=effort, budget_s=budget_s, seed=seed, rewrite=rewrite, fresh=fresh,
            lowering=lowering, dtype=dtype, cost_model=cost_model, custom_operators=trusted, quiet=quiet,
        )  # fmt: skip
        return
    ((size, one),) = zip(batches, loaded, strict=True)
    with live_progress(quiet=quiet) as progress:
        tuned = pipeline.tune(
            one.model,
            one.args,
            one.kwargs,
            device=device,
            effort=effort,
            budget_s=budget_s,
            seed=seed,
            rewrite=rewrite,
            lowering=lowering,
            fresh=fresh,
            name=one.name,
            dtype=dtype,
            source=from_zoo(model, batch=size, dtype=dtype, seed=seed),
            cost_model=cost_model,
            custom_operators=trusted,
            progress=progress,
        )
    report = tuned.report
    if output is not None:
        report = tuned.save(output)
    show_report(report, json, namespaces=trusted)
    if not json and report.bundle is None and report.cached is None:
        print("the schedule was not kept; -o FILE writes it to a file")


def compare(
    model: ModelArgument,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Such as sequential,estf,beam; a name that there is not is answered with all; default: those that suit the device.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    effort: EffortOption = "quick",
    budget: BudgetOption = None,
    batch: BatchOption = None,
    dtype: DtypeOption = None,
    rewrite: RewriteOption = True,
    lowering: LoweringOption = None,
    compiled: Annotated[bool, typer.Option("--compiled/--no-compiled", help="Measure torch.compile too, in its own process.")] = True,
    cost_model: CostModelOption = None,
    custom_operators: CustomOperatorsOption = None,
    keep_memory: KeepMemoryOption = False,
    seed: SeedOption = 0,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Measure every strategy and every baseline on MODEL side by side in one run.

    Example: autosched compare autosched:randwire --device cpu --strategies sequential,critical_path,beam
    """
    from autosched import pipeline, zoo
    from autosched.config import parse_seconds
    from autosched.core.custom_operators import parse_namespaces
    from autosched.device.compiled_baseline import from_zoo

    keep_memory_if(keep_memory)
    budget_s = parse_seconds(budget) if budget is not None else None
    trusted = parse_namespaces(names_in(custom_operators))
    names = [name.strip() for name in strategies.split(",") if name.strip()] if strategies is not None else None
    pipeline.check_request(device, effort, budget_s, lowering, names, cost_model)
    loaded = zoo.load(model, batch=batch, dtype=dtype, seed=seed)
    if compiled and not quiet:
        tell_what_compiles_besides(device, effort, budget_s, "--no-compiled")
    with live_progress(quiet=quiet) as progress:
        report = pipeline.compare(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            strategies=names,
            device=device,
            effort=effort,
            budget_s=budget_s,
            seed=seed,
            rewrite=rewrite,
            lowering=lowering,
            compiled=compiled,
            name=loaded.name,
            source=from_zoo(model, batch=batch, dtype=dtype, seed=seed),
            cost_model=cost_model,
            custom_operators=trusted,
            progress=progress,
        )
    show_report(report, json)


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command()(tune)
    app.command()(compare)
