"""The main job, end to end: a model goes in, a measured and verified schedule comes out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autosched.capture.call_check import require_call
from autosched.config import check_seed
from autosched.core.custom_operators import trusting
from autosched.core.progress import Progress, Silent, require_progress
from autosched.core.standing_aside import as_they_came
from autosched.core.variants import Lowering
from autosched.pipeline.benching import bench
from autosched.pipeline.budget import budget_for
from autosched.pipeline.bundles import check, read, trace
from autosched.pipeline.cache import remember
from autosched.pipeline.call_times import bench_paused
from autosched.pipeline.request import (
    TUNED,
    check_request,
    dtype_of,
    folder_of,
    mode_note,
    moved_note,
    name_of,
    names_of_strategies,
    source_of,
    where_to_measure,
)
from autosched.pipeline.result import Tuned, check_writable
from autosched.pipeline.shapes import TunedShapes, tune_shapes
from autosched.runtime.attribute_tensors import tensors_kept

if TYPE_CHECKING:
    import torch

    from autosched.core.report import TuneReport
    from autosched.device.compiled_baseline import ModelSource
    from autosched.pipeline.options import Options, Outcome

__all__ = [
    "Tuned",
    "TunedShapes",
    "bench",
    "bench_paused",
    "check",
    "check_request",
    "check_writable",
    "compare",
    "read",
    "trace",
    "tune",
    "tune_shapes",
]


def tune(
    model: torch.nn.Module,
    example_inputs: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    device: str | torch.device = "cuda",
    effort: str = "balanced",
    budget_s: float | None = None,
    seed: int = 0,
    *,
    rewrite: bool = True,
    lowering: str | None = None,
    fresh: bool = False,
    name: str | None = None,
    dtype: str | None = None,
    source: ModelSource | None = None,
    cost_model: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    custom_operators: Sequence[str] = (),
) -> Tuned:
    """Measure a model's operators, search schedules, verify the best on the device, and keep the winner.

    The winner is also kept in the cache of tuned schedules, where ``autosched.compile`` and ``torch.compile`` find it.

    Args:
        model: in inference mode; left unchanged.
        example_inputs: positional arguments of one call; nested containers are allowed.
        example_kwargs: keyword arguments of that call.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``, which is CUDA if there is a GPU; ``cuda`` alone is the GPU that the model is on,
            else PyTorch's current one. A model that is elsewhere stays there, and a copy of its weights is measured. ``replay:DIR`` answers
            from the recorded runs in ``DIR`` and measures nothing.
        effort: ``quick``, ``balanced`` or ``full``: the preset budget.
        budget_s: seconds for measuring and searching, instead of the preset's.
        seed: of every random choice.
        rewrite: whether to fold, simplify and fuse operators first; ``False`` is the lowering ``aten``.
        lowering: a name of ``core.variants.Lowering``; ``None`` or ``auto`` to try those that this machine can compile, tune
            the one or two that can win, and keep the best. The report's ``lowerings`` says what became of each.
        fresh: whether to measure again what an earlier run has measured.
        name: of the model, in reports.
        dtype: of the model, in reports; ``bench`` builds the model with it.
        source: where another process can build the same model, for the ``torch.compile`` baseline; else the exported program is compiled.
        cost_model: folder of the one that predicts the pairs that are not measured; ``None`` for the one trained on this machine, or one
            that ships for it.
        progress: told where the job is.
        custom_operators: namespaces of operators outside PyTorch that may be captured and run, such as ``("mylib",)`` for ``mylib::norm``:
            each an operator of its own, which must be functional and deterministic.

    Raises:
        AutoschedError: every error a user can cause; its class says which.
    """
    from autosched.pipeline.options import Options

    require_call("tune", model, example_inputs, example_kwargs)
    check_seed(seed)
    require_progress(progress)
    budget = budget_for(effort, budget_s)
    options = Options(
        str(device), effort, budget, seed, Lowering.REWRITTEN, fresh, None, True, budget.compiled_baseline, name_of(name, model),
        dtype_of(dtype), source_of(source), folder_of(cost_model),
    )  # fmt: skip
    with trusting(custom_operators), as_they_came(model), tensors_kept(model):
        outcome = _run(model, example_inputs, example_kwargs, options, progress or Silent(), lowering, rewrite=rewrite)
    tuned = Tuned(outcome, options)
    kept = remember(tuned)
    tuned.report = dataclasses.replace(tuned.report, cached=str(kept) if kept is not None else None)
    return tuned


def compare(
    model: torch.nn.Module,
    example_inputs: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    device: str | torch.device = "cuda",
    effort: str = "quick",
    budget_s: float | None = None,
    seed: int = 0,
    *,
    strategies: str | Sequence[str] | None = None,
    rewrite: bool = True,
    lowering: str | None = None,
    compiled: bool = True,
    name: str | None = None,
    source: ModelSource | None = None,
    cost_model: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    custom_operators: Sequence[str] = (),
) -> TuneReport:
    """Measure every strategy and baseline side by side in one run: none is left out, so it may take longer than its budget.

    Args:
        strategies: names to compare, or one; ``None`` for all that suit an unattended run, and the device loop.
        lowering: as for :func:`tune`; where none is named, the table is that of the lowering that ``tune`` would keep.
        compiled: whether to time ``torch.compile`` too, in its own process.

    The other arguments and the errors are those of :func:`tune`; an unknown strategy raises ``UnknownName``. The report's ``summary()`` is
    the table as text; no schedule is kept.
    """
    from autosched.pipeline.options import Options

    require_call("compare", model, example_inputs, example_kwargs)
    check_seed(seed)
    require_progress(progress)
    budget = budget_for(effort, budget_s)
    chosen = names_of_strategies(strategies)
    options = Options(
        str(device),
        effort,
        budget,
        seed,
        Lowering.REWRITTEN,
        False,
        chosen,
        chosen is None or TUNED in chosen,
        compiled,
        name_of(name, model),
        None,
        source_of(source),
        folder_of(cost_model),
        complete=True,
    )
    with trusting(custom_operators), as_they_came(model), tensors_kept(model):
        return _run(model, example_inputs, example_kwargs, options, progress or Silent(), lowering, rewrite=rewrite).report


def _run(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Options,
    progress: Progress,
    lowering: str | None,
    *,
    rewrite: bool,
) -> Outcome:
    """One job, or a contest of lowerings where none was asked for."""
    from autosched.costmodel.persist import read_card
    from autosched.pipeline.clock import StageClock
    from autosched.pipeline.contest import run_contest
    from autosched.pipeline.granularity import REPLAY, UNCOMPARED, coarser_note, considered, templates_note, uncompared_note
    from autosched.pipeline.job import Job
    from autosched.pipeline.left_out import left_out_sentence
    from autosched.pipeline.other_work import other_work_note
    from autosched.pipeline.readiness import begin_searches, drop_searches, ready_lanes
    from autosched.pipeline.replaying import open_device

    if options.cost_model is not None:
        # Found out now, not after minutes of capturing and compiling.
        read_card(options.cost_model)
    options = dataclasses.replace(options, device=where_to_measure(options.device, model, args, kwargs))
    clock = StageClock(progress)
    device = None if options.device.startswith("replay:") else open_device(options.device)
    kind = device.key.kind if device is not None else REPLAY
    began_beside = other_work_note(device, "when this job began") if device is not None else ""
    begin_searches(clock)
    try:
        lanes_note = ready_lanes(kind, clock)
        choice = considered(lowering, rewrite=rewrite, kind=kind)
        if choice.chosen:
            outcome = run_contest(model, args, kwargs, options, choice, clock)
            untried = not options.compiled and Lowering.INDUCTOR in choice.lowerings
            note = templates_note(outcome.captured.program) if untried and kind == "cpu" else ""
            uncompared = uncompared_note(outcome.report) if untried else ""
        else:
            uncompared = ""
            outcome = Job(model, args, kwargs, dataclasses.replace(options, lowering=choice.lowerings[0]), clock).run()
            note = coarser_note(outcome.report)
    finally:
        drop_searches()
    left_out = left_out_sentence(outcome.left_out, options.budget.total_s)
    said = [began_beside, note, lanes_note, left_out, moved_note(outcome.device, model, args, kwargs), mode_note(model), uncompared]
    notes = (*outcome.report.notes, *filter(None, said))
    verdict = outcome.report.verdict + (UNCOMPARED if uncompared else "")
    return dataclasses.replace(outcome, report=dataclasses.replace(outcome.report, notes=notes, stages=clock.times(), verdict=verdict))
