"""One lowering of a model, captured, compiled and open on the device: what qualification measures, and what a job tunes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from autosched.capture.export import Captured, lower_draft
from autosched.capture.screen import require_operators
from autosched.core.program import ConstantSource
from autosched.core.progress import Progress
from autosched.core.variants import WHOLE, Lowering
from autosched.device.ahead import compile_ahead
from autosched.device.base import Device, Session, StartsEarly
from autosched.device.host import physical_cores, whole_widths
from autosched.device.registry import place_of
from autosched.export.bundle import require_literals_fit
from autosched.pipeline.attempts import EXPORTS, Attempts
from autosched.pipeline.compiling import compile_variants
from autosched.pipeline.left_out import LeftOut
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.original import Original
from autosched.pipeline.variants import Refusals
from autosched.runtime.inductor.modes import Mode

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
        left_out: what there was no time to compile, with the seconds of compiling that it lacked.
        regions_s: seconds of ``prepared_s`` in which its regions were compiled.
        measured: whether the job has measured its operators alone by now.
    """

    captured: Captured
    device: Device
    session: Session
    notes: tuple[str, ...]
    prepared_s: float
    refused: Refusals = frozenset()
    left_out: tuple[LeftOut, ...] = ()
    regions_s: float = 0.0
    measured: bool = False

    @property
    def lowering(self) -> str:
        """What an operator is."""
        return self.captured.program.lowering


@dataclass(frozen=True, slots=True)
class NotHad:
    """Why a lowering is not to be had; ``needs_s`` is the time (seconds) that compiling it needs, where only that is missing."""

    why: str
    needs_s: float | None = None


def capture_as(lowering: Lowering, original: Original, device: Device, limit_s: float | None = None) -> Captured | NotHad:
    """Capture for ``device``, or say why Inductor's code cannot be used.

    Args:
        limit_s: seconds that Inductor may take for the whole model; it then compiles in processes of its own, which are ended after that,
            and is not begun where it is known not to finish.

    Raises:
        UnsupportedGraph: if the model cannot be captured.
    """
    kind = device.key.kind
    if lowering not in WHOLE:
        return lower_draft(original.draft(), lowering, kind, original.structure)
    from autosched.pipeline.inductor_capture import inductor_source, lower_inductor

    source, home = inductor_source(original.draft(), target=place_of(device), structure=original.structure)
    attempts = Attempts(source.program, lowering, device)
    threads = whole_widths(physical_cores())[::-1] if kind == "cpu" else (1,)
    if limit_s is not None:
        needs_s = attempts.needs_s(original.export_cpu_s)
        if needs_s > limit_s:
            return NotHad(f"Inductor would take more than {needs_s:.0f} s for the whole model here, and {limit_s:.0f} s were left", needs_s)
        if why := compile_ahead(source.program, source.constants, home, threads, limit_s, lowering):
            if why.timed_out:
                attempts.unfinished(limit_s)
                return NotHad(why.reason, max(attempts.needs_s(original.export_cpu_s), limit_s))
            return NotHad(why.reason)
    found = lower_inductor(source, home, Mode(lowering), threads=threads[0] if kind == "cpu" else None)
    if not isinstance(found, Captured):
        return NotHad(found.reason)
    attempts.finished()
    return found


def compiling_needs_s(lowering: Lowering, original: Original, device: Device) -> float:
    """Seconds below which compiling ``original`` as a whole is not begun, as far as that is known before."""
    if lowering not in WHOLE or device.key.kind not in EXPORTS:
        return 0.0
    from autosched.pipeline.inductor_capture import inductor_source

    source, _ = inductor_source(original.draft(), target=device.key.kind, structure=original.structure)
    return Attempts(source.program, lowering, device).needs_s(original.export_cpu_s)


def prepare(
    lowering: Lowering, original: Original, device: Device, progress: Progress, *, limit_s: float | None = None
) -> Prepared | NotHad:
    """Capture a model in ``lowering``, open it on ``device`` and compile what it needs; or why that cannot be had.

    Args:
        limit_s: seconds for compiling: a region that is not begun by then runs call by call, and Inductor's code for the whole model that
            is not there by then is given up. ``None`` for as long as it takes.

    Raises:
        UnsupportedGraph, DeviceMissing, WorkerLost: see their classes.
    """
    begin = time.monotonic()
    progress.stage(f"capture, {lowering}")
    captured = _captured_early(device, lowering, original, limit_s)
    if isinstance(captured, NotHad):
        return captured
    program = captured.program
    require_operators(len(program.graph))
    require_literals_fit(captured.constants[item.value] for item in program.bindings if item.source is ConstantSource.LITERAL)
    ledger = Ledger()
    progress.stage(f"starting the worker, {lowering}")
    session = device.open(captured.program, captured.constants, timeout_s=_TIMEOUT_S)
    try:
        # Starts the worker, so that its start is not taken from the budget.
        _ = session.limits
        compiling = time.monotonic()
        refused = compile_variants(session, captured.program, ledger, progress, limit_s)
    except BaseException:
        session.close()
        raise
    end = time.monotonic()
    return Prepared(captured, device, session, tuple(ledger.notes), end - begin, refused, tuple(ledger.left_out), end - compiling)


def _captured_early(device: Device, lowering: Lowering, original: Original, limit_s: float | None) -> Captured | NotHad:
    """As ``capture_as``, while the measuring process imports what it needs."""
    if not isinstance(device, StartsEarly):
        return capture_as(lowering, original, device, limit_s)
    device.start_early(timeout_s=_TIMEOUT_S, compiling=lowering is Lowering.FUSED)
    captured: Captured | NotHad | None = None
    try:
        captured = capture_as(lowering, original, device, limit_s)
    finally:
        if not isinstance(captured, Captured):
            device.drop_early()
    return captured
