"""The command line. Results go to stdout, everything else to stderr; with ``--json`` stdout holds one JSON object and nothing else.

Exit codes: 0 ok, 2 usage, 3 unstable measurement, 4 incompatible or corrupt artifact, 5 device missing or faulty, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosched.core.errors import AutoschedError

if TYPE_CHECKING:
    from autosched.core.report import TuneReport

_INTERRUPTED = 130  # 128 + SIGINT, as a shell would say it

app = typer.Typer(
    name="autosched",
    help="Decide when and where each operator of a PyTorch model runs: measure, search, verify, export, load.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else there.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA if there is a GPU.")]
EffortOption = Annotated[str, typer.Option(help="quick, balanced or full.")]
BudgetOption = Annotated[str | None, typer.Option(help="Time for measuring and searching, such as 60s or 5m.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Batch size of the example inputs.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
SeedOption = Annotated[int, typer.Option(help="Seed of every random choice.")]
RewriteOption = Annotated[bool, typer.Option("--rewrite/--no-rewrite", help="Fold, simplify and fuse operators before scheduling.")]
ModelArgument = Annotated[
    str, typer.Argument(help="torchvision:NAME, timm:NAME, transformers:NAME, autosched:NAME, module:function or FILE.pt2.")
]
FileArgument = Annotated[Path, typer.Argument(help="A tuned schedule, written by 'autosched tune'.")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="autosched: %(message)s")
    as_json = "--json" in (arguments if arguments is not None else sys.argv[1:])
    try:
        code = app(args=arguments, standalone_mode=False)
    except AutoschedError as error:
        _fail(error, as_json)
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except SystemExit as stopped:
        # typer turns Ctrl-C into an exit of its own, without a word.
        code = stopped.code
    except Exception as error:
        code = _typer_exit(error, as_json)
    if code == _INTERRUPTED:
        print("autosched: interrupted; finished measurements are kept, the same command goes on from them", file=sys.stderr)
    raise SystemExit(code if isinstance(code, int) else 0)


def _typer_exit(error: Exception, as_json: bool) -> int:
    """The exit code of click's own errors (bad options, aborts); anything else is a bug and is raised again."""
    if type(error).__name__ == "Abort":
        return _INTERRUPTED
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if show is None or code is None:
        raise error
    if as_json:
        _emit({"error": {"type": "UsageError", "message": str(getattr(error, "message", error)), "exit_code": code}})
    show()
    return int(code)


def _fail(error: AutoschedError, as_json: bool) -> None:
    if as_json:
        _emit({"error": {"type": type(error).__name__, "message": str(error), "exit_code": error.exit_code}})
    print(f"autosched: {error}", file=sys.stderr)


def _emit(value: Any) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    sys.stdout.flush()


@app.command()
def tune(
    model: ModelArgument,
    device: DeviceOption = "auto",
    effort: EffortOption = "balanced",
    budget: BudgetOption = None,
    batch: BatchOption = None,
    dtype: DtypeOption = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the schedule.")] = None,
    rewrite: RewriteOption = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what an earlier run has measured.")] = False,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Measure MODEL, search schedules, verify the best on the device, and write the winner.

    Example: autosched tune torchvision:googlenet --device cpu --effort quick -o googlenet.autosched
    """
    from autosched import pipeline, zoo
    from autosched.config import parse_seconds
    from autosched.device.compiled_baseline import from_zoo

    budget_s = parse_seconds(budget) if budget is not None else None
    if output is not None:
        pipeline.check_writable(output)
    loaded = zoo.load(model, batch=batch, dtype=dtype, seed=seed)
    with _progress() as progress:
        tuned = pipeline.tune(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            device=device,
            effort=effort,
            budget_s=budget_s,
            seed=seed,
            rewrite=rewrite,
            fresh=fresh,
            name=loaded.name,
            dtype=dtype,
            source=from_zoo(model, batch=batch, dtype=dtype, seed=seed),
            progress=progress,
        )
    report = tuned.report
    if output is not None:
        report = tuned.save(output)
    _show(report, json)


@app.command()
def compare(
    model: ModelArgument,
    strategies: Annotated[str | None, typer.Option(help="Comma-separated names; default: all that suit the device.")] = None,
    device: DeviceOption = "auto",
    effort: EffortOption = "quick",
    budget: BudgetOption = None,
    batch: BatchOption = None,
    dtype: DtypeOption = None,
    rewrite: RewriteOption = True,
    compiled: Annotated[bool, typer.Option("--compiled/--no-compiled", help="Measure torch.compile too, in its own process.")] = True,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Measure every strategy and every baseline on MODEL side by side in one run.

    Example: autosched compare autosched:randwire --device cpu --strategies sequential,critical_path,beam
    """
    from autosched import pipeline, zoo
    from autosched.config import parse_seconds
    from autosched.device.compiled_baseline import from_zoo

    loaded = zoo.load(model, batch=batch, dtype=dtype, seed=seed)
    with _progress() as progress:
        report = pipeline.compare(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            strategies=[name.strip() for name in strategies.split(",") if name.strip()] if strategies is not None else None,
            device=device,
            effort=effort,
            budget_s=parse_seconds(budget) if budget is not None else None,
            seed=seed,
            rewrite=rewrite,
            compiled=compiled,
            name=loaded.name,
            source=from_zoo(model, batch=batch, dtype=dtype, seed=seed),
            progress=progress,
        )
    _show(report, json)


@app.command()
def bench(
    file: FileArgument,
    model: Annotated[str | None, typer.Argument(help="The model; by default the one the schedule was tuned for.")] = None,
    rounds: Annotated[int, typer.Option(min=5, help="Interleaved rounds.")] = 40,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Measure a tuned schedule against the sequential one and against the model as it comes, interleaved."""
    from autosched import pipeline, zoo

    bundle = pipeline.read(file)
    loaded = zoo.load(model if model is not None else bundle.model_name, dtype=bundle.dtype, seed=bundle.seed)
    with _progress() as progress:
        result = pipeline.bench(file, loaded.model, rounds=rounds, seed=seed, progress=progress)
    if json:
        _emit(result)
    else:
        print(result.summary())


@app.command()
def check(
    file: FileArgument,
    model: Annotated[str | None, typer.Argument(help="Also check it against this model.")] = None,
    json: JsonOption = False,
) -> None:
    """Say whether a tuned schedule fits this machine: exact, degraded or incompatible, with a line for each difference."""
    from autosched import pipeline, zoo

    bundle = pipeline.read(file)
    loaded = zoo.load(model, dtype=bundle.dtype, seed=bundle.seed) if model is not None else None
    result = pipeline.check(file, loaded.model if loaded is not None else None)
    if json:
        _emit(result)
    else:
        print(result.summary())
    if not result.usable:
        raise typer.Exit(4)


@app.command()
def trace(
    file: FileArgument,
    model: Annotated[str | None, typer.Argument(help="The model; by default the one the schedule was tuned for.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the trace.")] = Path("trace.json"),
    json: JsonOption = False,
) -> None:
    """Run a tuned schedule once with time stamps and write a timeline for Perfetto (ui.perfetto.dev)."""
    from autosched import pipeline, zoo

    bundle = pipeline.read(file)
    loaded = zoo.load(model if model is not None else bundle.model_name, dtype=bundle.dtype, seed=bundle.seed)
    result = pipeline.trace(file, loaded.model, output)
    if json:
        _emit(result)
    else:
        print(result.summary())


@app.command()
def collect(
    models: Annotated[list[str] | None, typer.Argument(help="Models to measure; default: the small suite.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the store; an existing one is added to.")] = Path("runs"),
    device: DeviceOption = "auto",
    budget: Annotated[str, typer.Option(help="Time for all models together, such as 10m.")] = "10m",
    pairs: Annotated[int, typer.Option(min=0, help="Most ordered pairs for each model.")] = 400,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Measure operators and pairs of operators on this device; run it again to go on where it stopped.

    Example: autosched collect torchvision:googlenet autosched:randwire -o runs --device cpu --budget 5m
    """
    from autosched import zoo
    from autosched.config import parse_seconds
    from autosched.pipeline import retraining

    names = models or [entry.name for entry in zoo.names() if not entry.package]
    loaded = [zoo.load(name, seed=seed) for name in names]
    subjects = [retraining.Subject(item.name, item.model, item.args, item.kwargs) for item in loaded]
    with _progress() as progress:
        result = retraining.collect(
            subjects, output, device=device, budget_s=parse_seconds(budget), max_pairs=pairs, seed=seed, progress=progress
        )
    if json:
        _emit(result)
    else:
        print(result.summary())


@app.command()
def train(
    runs: Annotated[Path, typer.Argument(help="A store written by 'autosched collect'.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write the cost model to.")],
    start: Annotated[Path | None, typer.Option("--from", help="A cost model trained elsewhere, to begin from.")] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Fit the cost models, keep what wins on held-out model families, and print the table and the learning curve."""
    from autosched.pipeline import retraining

    training = retraining.train(runs, output, start=start, seed=seed)
    if json:
        _emit({"model": str(output), "chosen": training.decision, "held_out": training.held_out, "curve": training.curve})
        return
    print(training.model.card.markdown())
    for point in training.curve:
        print(f"{point.model} fitted on {point.pairs} pairs: mean |log error| {point.metrics.mean_abs_log:.4f} on held-out rows")
    print(f"written to {output}")


@app.command()
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
        write_plots(result, (), output / "evaluation.html")
    if json:
        _emit(result)
        return
    from rich.console import Console

    from autosched.progress import metrics_table

    console = Console(width=None if sys.stdout.isatty() else 150)
    for title, metrics in (("all rows", result.overall), ("unseen model families", result.unseen)):
        if metrics:
            console.print(metrics_table(f"{result.model}: {title}", metrics))


@app.command("models")
def list_models(json: JsonOption = False) -> None:
    """List the models that can be tuned by name."""
    from autosched import zoo

    entries = zoo.names()
    if json:
        _emit({"models": entries})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="models that can be named; any other torchvision, timm or transformers name works too")
    for heading in ("name", "what it is", "needs"):
        table.add_column(heading)
    for entry in entries:
        table.add_row(entry.name, entry.description, entry.package)
    Console().print(table)


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Say what this machine can do, and what is missing."""
    from autosched.doctor import examine

    findings = examine()
    if json:
        _emit({"findings": findings})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="autosched doctor")
    for heading in ("what", "state", "detail", "what to do"):
        table.add_column(heading, overflow="fold")
    colours = {"ok": "green", "missing": "yellow", "problem": "red"}
    for finding in findings:
        table.add_row(finding.what, f"[{colours[finding.state]}]{finding.state}[/]", finding.detail, finding.advice)
    Console().print(table)


def _progress() -> Any:
    from rich.console import Console

    from autosched.progress import LiveProgress

    return LiveProgress(Console(stderr=True))


def _show(report: TuneReport, as_json: bool) -> None:
    if as_json:
        _emit(report)
    else:
        _print_report(report)
    if report.unstable:
        print("autosched: this machine was too restless for any statement; stop other work on it and run again", file=sys.stderr)
        raise typer.Exit(3)


def _print_report(report: TuneReport) -> None:
    from rich.console import Console

    from autosched.progress import strategy_table

    console = Console()
    # Piped into a file, the table keeps all its columns.
    if not console.is_terminal:
        console = Console(width=150)
    console.print(strategy_table(report))
    console.print(report.verdict, highlight=False)
    for note in report.notes:
        console.print(f"note: {note}", highlight=False)
    console.print(
        f"{report.measurements} measurements, {report.failures} failures, {report.search_s:.1f} s, "
        f"noise floor {report.noise_floor_pct:.1f} %, seed {report.seed}",
        highlight=False,
    )
    if report.bundle:
        console.print(f"written to {report.bundle}", highlight=False)


if __name__ == "__main__":
    main()
