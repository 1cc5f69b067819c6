"""One lowering of a model, captured, compiled and open on the device: what qualification measures, and what a job tunes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched.capture.export import Captured, capture
from autosched.core.errors import UnsupportedGraph
from autosched.core.progress import Progress
from autosched.core.variants import WHOLE, Lowering
from autosched.device.ahead import compile_ahead
from autosched.device.base import Device, Session, StartsEarly
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.variants import Refusals, compile_variants
from autosched.runtime.audit import changes_callers_memory
from autosched.runtime.inductor_modes import Mode

# One worker answer may take this long before the worker is given up: loading a large model included.
_TIMEOUT_S = 120.0


@dataclass(frozen=True, eq=False)
class Prepared:
    """A lowering ready to be measured.

    Args:
        session: open; whoever asked for this closes it.
        notes: what a reader of the report should know of it.
        prepared_s: seconds it took.
        refused: compiled variants that cannot be had in this run.
    """

    captured: Captured
    device: Device
    session: Session
    notes: tuple[str, ...]
    prepared_s: float
    refused: Refusals = frozenset()

    @property
    def lowering(self) -> str:
        """What an operator is."""
        return self.captured.program.lowering


def capture_as(
    lowering: Lowering,
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    kind: str,
    limit_s: float | None = None,
) -> Captured | str:
    """Capture for a device of ``kind``, or say why Inductor's code cannot be used.

    Args:
        limit_s: seconds that Inductor may take for the whole model; it then compiles in a process of its own, which is ended after that.

    Raises:
        UnsupportedGraph: if the model cannot be captured.
    """
    if lowering not in WHOLE:
        captured = capture(model, tuple(args), kwargs, target=kind, lowering=lowering)
        _require_pure(captured)
        return captured
    from autosched.pipeline.inductor_capture import inductor_source, lower_inductor

    source, device = inductor_source(model, tuple(args), kwargs, target=kind)
    if limit_s is not None:
        threads = sorted({torch.get_num_threads(), 1}, reverse=True) if kind == "cpu" else [1]
        if why := compile_ahead(source.program, source.constants, device, threads, limit_s, lowering):
            return why
    found = lower_inductor(source, device, Mode(lowering))
    return found if isinstance(found, Captured) else found.reason


def _require_pure(captured: Captured) -> None:
    # Measuring would run its updates thousands of times, and no server could load the schedule: its check against the model counts too.
    if operator := changes_callers_memory(captured.program.graph):
        raise UnsupportedGraph(
            f"the model changes a buffer in place (operator {operator}), so that a call depends on those before it; expected a model "
            "that leaves its buffers as they are. Return the new value instead, and keep it outside."
        )


def prepare(
    lowering: Lowering,
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    device: Device,
    progress: Progress,
    *,
    limit_s: float | None = None,
) -> Prepared | str:
    """Capture ``model`` in ``lowering``, open it on ``device`` and compile what it needs; or why that cannot be had.

    Args:
        limit_s: seconds for compiling: a region that is not begun by then runs call by call, and Inductor's code for the whole model that
            is not there by then is given up. ``None`` for as long as it takes.

    Raises:
        UnsupportedGraph, DeviceMissing, WorkerLost: see their classes.
    """
    begin = time.monotonic()
    progress.stage(f"capture, {lowering}")
    captured = _captured_early(device, lowering, model, args, kwargs, limit_s)
    if isinstance(captured, str):
        return captured
    ledger = Ledger()
    progress.stage(f"starting the worker, {lowering}")
    session = device.open(captured.program, captured.constants, timeout_s=_TIMEOUT_S)
    try:
        # Starts the worker, so that its start is not taken from the budget.
        _ = session.limits
        refused = compile_variants(session, captured.program, ledger, progress, limit_s)
    except BaseException:
        session.close()
        raise
    return Prepared(captured, device, session, tuple(ledger.notes), time.monotonic() - begin, refused)


def _captured_early(
    device: Device,
    lowering: Lowering,
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    limit_s: float | None,
) -> Captured | str:
    """As ``capture_as``, while the measuring process imports what it needs."""
    if not isinstance(device, StartsEarly):
        return capture_as(lowering, model, args, kwargs, device.key.kind, limit_s)
    device.start_early(timeout_s=_TIMEOUT_S)
    captured: Captured | str = ""
    try:
        captured = capture_as(lowering, model, args, kwargs, device.key.kind, limit_s)
    finally:
        if isinstance(captured, str):
            device.drop_early()
    return captured
