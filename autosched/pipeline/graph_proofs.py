"""Proofs that only a captured graph allows: a static audit of its nodes, edges and addresses, and replays under injected delays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from autosched.core.graph import OpGraph
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, sequential
from autosched.datasets.facts import LaunchFacts
from autosched.device.base import Session
from autosched.device.cuda.profile import OperatorProfile
from autosched.runtime.cuda.audit import audit_graph
from autosched.runtime.cuda.captured import CapturedGraph
from autosched.runtime.plan import FreeRule, make_plan
from autosched.verify.race_stress import Stressable, stress


@runtime_checkable
class GraphSession(Stressable, Protocol):
    """A session whose schedules are captured graphs: the CUDA device's."""

    def captured(self, schedule: Schedule, rule: FreeRule = FreeRule.VECTOR_CLOCK) -> CapturedGraph | Failure:
        """Capture ``schedule`` and describe its nodes, edges and memory."""

    def profiles(self, *, cold: bool = True, variants: Sequence[int] = ()) -> list[OperatorProfile | Failure]:
        """What every operator launches, by operator, each in its variant of ``variants`` (default its calls)."""


def audit_capture(session: Session, graph: OpGraph, schedule: Schedule) -> Failure | None:
    """What is wrong with the captured graph of ``schedule``; ``None`` if nothing is, or if the device captures none.

    A device that captures graphs but cannot read them back (no cuda-bindings) is passed over here; delays still test it.
    """
    if not isinstance(session, GraphSession):
        return None
    captured = session.captured(schedule)
    if isinstance(captured, Failure):
        return None if captured.kind is FailureKind.UNAVAILABLE else captured
    report = audit_graph(graph, make_plan(graph, schedule), captured)
    return None if report.sound else Failure(FailureKind.MISMATCH, f"the captured graph is unsound: {'; '.join(report.problems[:3])}")


def audit_note(session: Session, graph: OpGraph) -> str:
    """What to tell the reader of what an audit of captured graphs cannot see here; empty where it sees all, or where there are none."""
    if not isinstance(session, GraphSession):
        return ""
    captured = session.captured(sequential(graph))
    if isinstance(captured, CapturedGraph):
        if not captured.early_edges:
            return ""
        return (
            f"{captured.early_edges} edges of the captured graph let a kernel start before the one before it has ended (programmatic "
            "dependent launch, by a library); that those kernels wait by themselves is taken on trust, and tested by outputs and delays"
        )
    if captured.kind is not FailureKind.UNAVAILABLE:
        return ""
    return f"captured graphs were not audited: {captured.detail}; outputs and delays were tested"


def stress_capture(session: Session, graph: OpGraph, schedule: Schedule, seed: int) -> Failure | None:
    """Replay under delays and poisoned memory; ``None`` if every replay gave the reference's bits, or the device captures none.

    Takes seconds, so it is for a schedule that is about to be kept.
    """
    if not isinstance(session, GraphSession):
        return None
    report = stress(session, graph, schedule, rng=random.Random(seed))
    if isinstance(report, Failure):
        return report
    return None if report.sound else Failure(FailureKind.MISMATCH, f"a race under delays: {'; '.join(report.problems[:3])}")


def launch_facts(session: Session, graph: OpGraph, variants: Sequence[int] = ()) -> dict[str, LaunchFacts]:
    """How each kernel is launched, by operator signature, in the variant that stands for each operator (``[n]``, default its calls).

    Empty where the device cannot tell.
    """
    if not isinstance(session, GraphSession):
        return {}
    found: dict[str, LaunchFacts] = {}
    for operator, profile in zip(graph.operators, session.profiles(cold=False, variants=variants), strict=True):
        if isinstance(profile, Failure) or (longest := profile.longest) is None:
            continue
        found[operator.signature] = LaunchFacts(
            blocks=longest.blocks,
            threads_per_block=longest.threads,
            registers_per_thread=longest.registers,
            shared_bytes=longest.static_shared_bytes + longest.dynamic_shared_bytes,
            blocks_per_sm=longest.resident_blocks,
            kernels=len(profile.kernels),
        )
    return found
