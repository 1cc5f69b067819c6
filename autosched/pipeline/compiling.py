"""The variants of operators that a compiler makes, and those that have weights of their own, made ready before anything is timed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from autosched.core.graph import OpGraph
from autosched.core.program import Program
from autosched.core.progress import Progress
from autosched.core.variants import Variant
from autosched.device.base import Session
from autosched.device.variants import NO_TIME, CompilesBeside, VariantSession
from autosched.pipeline.left_out import LeftOut
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.variants import Refusals, all_of, offered_of
from autosched.runtime.regions.pieces import UNCOMPILED

_MOST_NOTES = 4
# Share of the operators that must have been compiled for their rate to say how long the others would take.
_TELLING = 0.25


def compile_variants(session: Session, program: Program, ledger: Ledger, progress: Progress, limit_s: float | None = None) -> Refusals:
    """Compile every variant of every operator once, so that no measurement waits for a compiler; what cannot be had is noted.

    Args:
        limit_s: seconds for all of them together; what is not begun by then runs call by call, and ``ledger`` says how many more seconds
            it would have taken. ``None`` for as long as it takes.
    """
    offered = offered_of(session, program)
    if offered is None or not isinstance(session, VariantSession):
        return frozenset()
    lost: set[tuple[int, int, int]] = set()
    progress.stage("compiling regions")
    # What no limit ends comes first: the compilers, which are at work meanwhile, are waited for no longer than what is left of it.
    columns = [
        (width, variant)
        for variant in sorted(all_of(offered), key=lambda item: item not in UNCOMPILED)
        if variant
        for width in session.limits.widths
    ]
    apart = [column for column in columns if column[1] not in UNCOMPILED]
    reasons: dict[tuple[int, int], str] = {}
    begin = time.monotonic()

    def left_s() -> float | None:
        return None if limit_s is None else max(limit_s - (time.monotonic() - begin), 0.0)

    compiled, processes = 0, 1 if apart else 0
    if apart and apart != columns and isinstance(session, CompilesBeside):
        session.begin_variants(apart, limit_s)
    for done, (width, variant) in enumerate(columns):
        if apart and (width, variant) == apart[0]:
            compiled, processes = session.prepare_variants(apart, left_s())
        for operator, reason in session.compile_variant(width, variant, left_s()).items():
            if reason:
                lost.add((operator, width, int(variant)))
                reasons.setdefault((operator, int(variant)), reason)
        progress.update(done=done + 1, total=len(columns))
    if processes:
        shared = f" ({compiled} compiled by {processes} processes)" if compiled and processes > 1 else ""
        ledger.notes.append(f"compiled regions were ready after {time.monotonic() - begin:.1f} s{shared}")
    ledger.notes += _refusal_notes(program.graph, offered, reasons)[:_MOST_NOTES]
    late = {operator for (operator, _), reason in reasons.items() if NO_TIME in reason}
    if late and limit_s is not None:
        wanted = sum(len(row) > 1 for row in offered)
        done = wanted - len(late)
        what = f"compiling {len(late)} of {wanted} operators of {program.lowering}"
        # The start of the compilers weighs too much in what the first few took.
        ledger.left_out.append(LeftOut(what, limit_s * len(late) / max(done, 1), told=done >= _TELLING * wanted))
    return frozenset(lost)


def _refusal_notes(graph: OpGraph, offered: Sequence[Sequence[int]], reasons: Mapping[tuple[int, int], str]) -> list[str]:
    """A line for each reason, of the operators left with their calls alone first; ``reasons`` by operator (-1 for all) and variant."""
    said: dict[tuple[str, str], list[str]] = {}
    for (operator, variant), reason in reasons.items():
        had = offered[operator][1:] if operator >= 0 else ()
        # The reason of each of its variants is a line of its own only where another variant is left.
        alone = all((operator, int(item)) in reasons for item in had)
        what = "not compiled, runs call by call" if alone else f"cannot be had as {Variant(variant).name.lower()}"
        if not alone or (operator, variant) == next(item for item in reasons if item[0] == operator):
            said.setdefault((what, reason), []).append(graph.operators[operator].name if operator >= 0 else "every region")
    notes = []
    for (what, reason), names in sorted(said.items(), key=lambda item: item[0][0].startswith("cannot")):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        notes.append(f"{what}: {listed}: {reason}")
    return notes
