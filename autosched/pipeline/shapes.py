"""Tuning one model for several shapes of inputs: a job for each, one budget, one journal of measurements, one file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autosched.capture.call_check import require_call
from autosched.core.errors import AutoschedError, UsageError
from autosched.core.progress import OUTSIDE, Progress, Silent, require_progress
from autosched.core.report import TuneReport
from autosched.export.bundle import encode_bundle, write_bundle
from autosched.pipeline.budget import budget_for
from autosched.pipeline.granularity import AUTO
from autosched.pipeline.result import Tuned
from autosched.runtime.bundle.format import MAX_SHAPES, Bundle
from autosched.runtime.shapes import call_key, describe_shape

if TYPE_CHECKING:
    import torch

    from autosched.device.compiled_baseline import ModelSource


@dataclass(frozen=True, slots=True)
class ShapesReport:
    """One report for each shape, in the order asked for, and the file they were written to."""

    shapes: tuple[TuneReport, ...]
    bundle: str | None = None


class TunedShapes:
    """Schedules for several shapes. ``shapes`` are as :func:`autosched.tune` returns them; ``save`` writes one file for all."""

    def __init__(self, shapes: Sequence[Tuned], batches: Sequence[int | None]) -> None:
        self.shapes = tuple(shapes)
        self._batches = tuple(batches)
        self._written: str | None = None

    @property
    def report(self) -> ShapesReport:
        """Every figure."""
        return ShapesReport(tuple(tuned.report for tuned in self.shapes), self._written)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """What :meth:`save` writes, one for each shape."""
        return tuple(_noted(tuned.bundle, batch) for tuned, batch in zip(self.shapes, self._batches, strict=True))

    def to_bytes(self) -> bytes:
        """The bundle's bytes; ``autosched.load`` takes them as well as a path."""
        return encode_bundle(*self.bundles)

    def save(self, path: str | os.PathLike[str]) -> ShapesReport:
        """Write the bundle and return the reports with its path filled in.

        Raises:
            UsageError: if the file cannot be written.
        """
        self._written = os.fspath(write_bundle(path, *self.bundles))
        return self.report

    def summary(self) -> str:
        """For each shape its verdict and a line for each strategy, as text."""
        return "\n".join(f"{describe_shape(tuned.bundle.program)}\n{tuned.summary()}" for tuned in self.shapes)


def tune_shapes(
    model: torch.nn.Module,
    examples: Sequence[Sequence[Any]],
    example_kwargs: Sequence[Mapping[str, Any] | None] | None = None,
    device: str | torch.device = "cuda",
    effort: str = "balanced",
    budget_s: float | None = None,
    seed: int = 0,
    *,
    sources: Sequence[ModelSource | None] | None = None,
    batches: Sequence[int | None] | None = None,
    rescue: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> TunedShapes:
    """Tune ``model`` for several shapes of inputs, to be saved as one bundle that ``autosched.load`` dispatches by shape.

    The budget is divided among the shapes; time that one leaves goes to those after it. Operators of equal shapes are measured once.
    Where the lowering is the job's choice, it is chosen at the first shape, and the others are tuned in that one: give the shape that
    matters most first.

    Args:
        model: in inference mode; left unchanged.
        examples: for each shape the positional arguments of one call.
        example_kwargs: for each shape the keyword arguments of that call.
        device, effort, seed: as for :func:`autosched.tune`.
        budget_s: seconds for all shapes together, instead of the preset's.
        sources: for each shape, where another process can build the same model, for the ``torch.compile`` baseline.
        batches: for each shape its batch size, if it is to be found by that.
        rescue: a file for the shapes that came through where a later one cannot be tuned; the error names it. One that is there stays.
        progress: told where the job is.
        options: further keyword arguments of :func:`autosched.tune`.

    Raises:
        UsageError: if there is no example, too many, or two of the same shape.
        AutoschedError: every other error a user can cause; its class says which.
    """
    from autosched.pipeline import tune
    from autosched.pipeline.memory import forgetting_once

    for name, given in (("examples", examples), ("example_kwargs", example_kwargs), ("sources", sources), ("batches", batches)):
        if not isinstance(given, Sequence) and (given is not None or name == "examples"):
            raise UsageError(f"tune_shapes() got a {type(given).__name__} as {name}; expected a list with one item for each shape")
    require_progress(progress)
    count = len(examples)
    if not 1 <= count <= MAX_SHAPES:
        raise UsageError(f"{count} examples; expected 1 to {MAX_SHAPES}, one for each shape")
    keywords = example_kwargs if example_kwargs is not None else [None] * count
    places = sources if sources is not None else [None] * count
    sizes = batches if batches is not None else [None] * count
    if not len(keywords) == len(places) == len(sizes) == count:
        raise UsageError(f"{count} examples, {len(keywords)} example_kwargs, {len(places)} sources, {len(sizes)} batches; expected as many")
    for position, (args, kwargs) in enumerate(zip(examples, keywords, strict=True)):
        require_call(f"example {position} of tune_shapes", model, args, kwargs)
    _require_distinct(examples, keywords)
    chooses = options.get("lowering") in (None, AUTO) and options.get("rewrite", True)
    left_s = budget_for(effort, budget_s).total_s
    found: list[Tuned] = []
    with forgetting_once():
        for index, (args, kwargs, source) in enumerate(zip(examples, keywords, places, strict=True)):
            share_s = left_s / (count - index)
            told = _Numbered(progress or Silent(), index + 1, count)
            if chooses and found:
                options["lowering"] = found[0].report.lowering
            with _saying_which(told.prefix, TunedShapes(found, sizes[:index]), rescue):
                found.append(tune(model, args, kwargs, device, effort, share_s, seed, source=source, progress=told, **options))
            # One stage at least is finished when the budget is spent, so a job may take more than its share.
            left_s -= min(sum(stage.seconds for stage in found[-1].report.stages if stage.in_budget), share_s)
    if len({call_key(tuned.bundle.program) for tuned in found}) < count:
        raise UsageError("two of the examples answer the same call; give each shape once")
    return TunedShapes(found, sizes)


def _require_distinct(examples: Sequence[Sequence[Any]], keywords: Sequence[Mapping[str, Any] | None]) -> None:
    """Found out before an hour of tuning, not after it."""
    from autosched.runtime.call_form import leaf_key
    from autosched.runtime.trees import describe_tree

    seen: set[object] = set()
    for args, kwargs in zip(examples, keywords, strict=True):
        leaves, tree = describe_tree((tuple(args), dict(kwargs or {})))
        key = (tree, tuple(leaf_key(leaf) for leaf in leaves))
        if key in seen:
            raise UsageError("two of the examples have the same shapes; give each shape once")
        seen.add(key)


@contextlib.contextmanager
def _saying_which(prefix: str, before: TunedShapes, rescue: str | os.PathLike[str] | None) -> Iterator[None]:
    """Within, an error begins with the shape that it is about: nothing else tells the one example among many that cannot be tuned.

    It ends with what became of the shapes ``before``.
    """
    try:
        yield
    except AutoschedError as error:
        error.args = (f"{prefix}{error}{_rescued(before, rescue)}",)
        raise


def _rescued(before: TunedShapes, rescue: str | os.PathLike[str] | None) -> str:
    """Write the shapes ``before`` to a file, for they may be a night's work; a sentence on where they are."""
    if rescue is None or not before.shapes:
        return ""
    if os.path.lexists(rescue):
        return f" {os.fspath(rescue)} is left as it was: it may hold more shapes than were tuned now."
    try:
        before.save(rescue)
    except AutoschedError as error:
        return f" What was tuned before it cannot be kept: {error}"
    shapes = ", ".join(describe_shape(bundle.program) for bundle in before.bundles)
    return f" What was tuned before it is in {os.fspath(rescue)}: {shapes}."


def _noted(bundle: Bundle, batch: int | None) -> Bundle:
    if batch is None:
        return bundle
    environment = tuple(sorted({**dict(bundle.evidence.environment), "batch": str(batch)}.items()))
    return dataclasses.replace(bundle, evidence=dataclasses.replace(bundle.evidence, environment=environment))


class _Numbered:
    """Passes progress on, saying which shape it is about."""

    def __init__(self, inner: Progress, number: int, count: int) -> None:
        self._inner = inner
        self.prefix = f"shape {number} of {count}: " if count > 1 else ""
        # The budget of the shape before is over, and this one's does not begin with its first stage.
        self._unless_said = OUTSIDE if number > 1 else None

    def stage(self, name: str, left_s: float | None = None) -> None:
        self._inner.stage(self.prefix + name, self._unless_said if left_s is None else left_s)
        self._unless_said = None

    def update(
        self, *, done: int, total: int, incumbent: str = "", measured: int = 0, failed: int = 0, left_s: float | None = None
    ) -> None:
        self._inner.update(done=done, total=total, incumbent=incumbent, measured=measured, failed=failed, left_s=left_s)
