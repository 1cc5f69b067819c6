"""Several shapes on the command line: ``tune --batch 1,4,16``, and choosing among the shapes of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosched.cli.printing import complain, emit, live_progress, next_steps, show_report

if TYPE_CHECKING:
    from autosched.pipeline.shapes import ShapesReport
    from autosched.zoo import ZooModel

BatchesOption = Annotated[
    str | None,
    typer.Option("--batch", help="Batch size of the example inputs; several, such as 1,4,16, give one file with a schedule for each."),
]
ShapeOption = Annotated[
    str | None, typer.Option("--shape", help="Which shape of the file, such as 4x3x224x224; inputs are separated by commas.")
]
ChosenBatchOption = Annotated[int | None, typer.Option("--batch", min=1, help="Which shape of the file, by its batch size.")]


def parse_batches(text: str | None) -> tuple[int | None, ...]:
    """``4`` or ``1,4,16`` as numbers; nothing as one unknown size.

    Raises:
        UsageError: for anything else, and for a size given twice.

    >>> parse_batches("1, 4")
    (1, 4)
    """
    from autosched.core.errors import UsageError

    if text is None:
        return (None,)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 10**6 for part in parts) or len(set(map(int, parts))) < len(parts):
        raise UsageError(f"--batch is {text!r}; expected sizes of at least 1, each once, such as 4 or 1,4,16")
    return tuple(int(part) for part in parts)


def tune_several(
    model: str, loaded: Sequence[ZooModel], batches: tuple[int | None, ...], output: Path | None, json: bool, *, quiet: bool, **options: Any
) -> None:
    """``autosched tune`` for several batch sizes; ``options`` are those of ``pipeline.tune_shapes``.

    Args:
        loaded: ``model`` for each of ``batches``.

    Raises:
        AutoschedError: every error a user can cause.
    """
    from autosched.device.compiled_baseline import from_zoo
    from autosched.pipeline.shapes import tune_shapes

    dtype, seed = options["dtype"], options["seed"]
    with live_progress(quiet=quiet) as progress:
        tuned = tune_shapes(
            # One model for all shapes: they share its weights. Only the example inputs differ.
            loaded[0].model,
            [item.args for item in loaded],
            [item.kwargs for item in loaded],
            name=loaded[0].name,
            # Built with the first batch, like the model here: weights that are drawn after the inputs would be others with another.
            sources=[from_zoo(model, batch=batches[0], dtype=dtype, seed=seed)] * len(batches),
            batches=batches,
            rescue=output,
            progress=progress,
            **options,
        )
    namespaces = options["custom_operators"]
    show_shapes(tuned.save(output) if output is not None else tuned.report, batches, json, namespaces)


def show_shapes(report: ShapesReport, batches: tuple[int | None, ...], as_json: bool, namespaces: Sequence[str] = ()) -> None:
    """Print the report of each shape, or all as one JSON object; ``namespaces`` as for ``show_report``.

    Raises:
        typer.Exit: with code 3 if the machine was too restless for a statement about any of them.
    """
    if as_json:
        emit(report)
    unstable = False
    for batch, item in zip(batches, report.shapes, strict=True):
        try:
            if as_json:
                unstable |= item.unstable
                continue
            print(f"batch {batch}")
            show_report(item, as_json=False, with_steps=report.bundle is None, namespaces=namespaces)
        except typer.Exit:
            unstable = True
    if report.bundle and not as_json:
        first = report.shapes[0]
        where, *then = next_steps(report.bundle, None, first.device.kind, first.model, namespaces)
        print(f"{len(report.shapes)} shapes {where}", *then, sep="\n")
    if unstable:
        if as_json:
            from autosched.core.report import RESTLESS

            complain(f"autosched: {RESTLESS}")
        raise typer.Exit(3)
