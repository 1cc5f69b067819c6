"""A tuned schedule measured again: beside the best sequential one and the model as it comes, in interleaved rounds."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from autosched.core.errors import IncompatibleArtifact, UnstableMeasurement
from autosched.core.progress import Progress, Silent
from autosched.core.records import Engine
from autosched.core.schedule import Schedule, sequential
from autosched.device.base import Session
from autosched.device.registry import AUTO
from autosched.device.timing import is_unstable, noise_floor_pct, paired_ratio, summarize
from autosched.pipeline.baselines import eager_externals
from autosched.pipeline.bundles import chosen, open_here
from autosched.pipeline.judge import CHANGED_PACE, Times, claimable, interleave
from autosched.pipeline.readiness import ready_lanes
from autosched.runtime.bundle.format import Bundle, printable
from autosched.runtime.kernels import random_inputs
from autosched.runtime.shapes import describe_shape, shape_name
from autosched.runtime.trees import unflatten_inputs

ROUNDS = 40
# Nobody waits longer for the rounds of one shape: those that were asked for, and those of a machine too slow or too busy for the default.
_LONGEST_S = 3600.0
_DEFAULT_S = 300.0
_TUNED = "tuned"


@dataclass(frozen=True, slots=True)
class BenchResult:
    """``autosched bench``: medians in microseconds, measured in interleaved rounds. ``ci_us`` belongs to ``tuned_us``.

    ``speedup_vs_sequential`` and its interval come from paired rounds; ``beyond_noise`` and ``eager_beyond_noise`` say whether anything may
    be claimed of it and of ``speedup_vs_eager``. ``tuned_when_made_us`` is what the tuning job measured. ``restless``: the machine changed
    its pace meanwhile, so that times by themselves say nothing; what may be claimed of ratios still may.
    """

    file: str
    model: str
    device: str
    chosen: str
    tuned_us: float
    sequential_us: float
    eager_us: float | None
    ci_us: tuple[float, float]
    speedup_vs_sequential: float
    speedup_ci: tuple[float, float]
    speedup_vs_eager: float | None
    rounds: int
    noise_floor_pct: float
    tuned_when_made_us: float | None
    shape: str = ""
    beyond_noise: bool = False
    eager_beyond_noise: bool | None = None
    restless: bool = False

    def summary(self) -> str:
        """For people."""
        lines = [
            f"{self.model} {self.shape} on {self.device}, {self.rounds} interleaved rounds, noise floor {self.noise_floor_pct:.1f} %",
            f"  tuned ({self.chosen}): {self.tuned_us:,.0f} us (95 % interval {self.ci_us[0]:,.0f} to {self.ci_us[1]:,.0f})",
            f"  sequential: {self.sequential_us:,.0f} us; tuned is {self.speedup_vs_sequential:.3f}x "
            f"(95 % interval {self.speedup_ci[0]:.3f} to {self.speedup_ci[1]:.3f}){unless(self.beyond_noise)}",
        ]
        if self.eager_us is not None:
            said = f"tuned is {self.speedup_vs_eager:.3f}x{unless(self.eager_beyond_noise is not False)}"
            lines.append(f"  as it comes (eager): {self.eager_us:,.0f} us; {said}")
        if self.restless:
            lines.append(f"  {CHANGED_PACE}")
        elif self.tuned_when_made_us is not None:
            change = 100 * (self.tuned_us / self.tuned_when_made_us - 1)
            lines.append(f"  when tuned it took {self.tuned_when_made_us:,.0f} us; today {change:+.1f} %")
        return "\n".join(lines)


class Stated(Protocol):
    """What ``autosched bench`` has to say of one shape."""

    def summary(self) -> str:
        """For people."""
        ...


Result = TypeVar("Result", bound=Stated)


@dataclass(frozen=True, slots=True)
class BenchShapes(Generic[Result]):
    """``autosched bench`` on a bundle of several shapes: one result for each of which anything may be said.

    ``unstable`` has a sentence for each of the others, in which the machine was too restless.
    """

    file: str
    shapes: tuple[Result, ...]
    unstable: tuple[str, ...] = ()

    def summary(self) -> str:
        """For people."""
        return "\n".join([*(result.summary() for result in self.shapes), *self.unstable])


def bench(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    rounds: int | None = None,
    seed: int = 0,
    shape: str | None = None,
    batch: int | None = None,
    device: str = AUTO,
    progress: Progress | None = None,
) -> BenchResult | BenchShapes[BenchResult]:
    """Time tuned schedules beside the best sequential one and the model as it comes; every shape, or those asked for.

    Args:
        rounds: how many; by default ``ROUNDS``, or as many as five minutes allow, and seven at the least.
        device: where; ``auto`` is the first device of this machine that the bundle was tuned for.

    Returns:
        A result, or, if several shapes are meant, one for each.

    Raises:
        IncompatibleArtifact: if a schedule does not fit this machine or model.
        UnstableMeasurement: if the machine is too restless, for every shape.
    """
    bundles = chosen(path, shape, batch)
    if any(bundle.key.software.engine is Engine.NATIVE for bundle in bundles):
        ready_lanes(bundles[0].key.device.kind, progress or Silent())
    results: list[BenchResult] = []
    unstable: list[str] = []
    for bundle in bundles:
        try:
            results.append(_bench(path, bundle, model, device, rounds, seed, progress))
        except UnstableMeasurement as error:
            unstable.append(f"{shape_name(bundle.program)}: {error}")
            if len(unstable) == len(bundles):
                raise
    return results[0] if len(bundles) == 1 else BenchShapes(os.fspath(path), tuple(results), tuple(unstable))


def _bench(
    path: str | os.PathLike[str],
    bundle: Bundle,
    model: torch.nn.Module,
    device: str,
    rounds: int | None,
    seed: int,
    progress: Progress | None,
) -> BenchResult:
    told = progress or Silent()
    session = open_here(path, bundle, model, device)
    told.stage("bench")
    try:
        in_order = _in_order(bundle, session.limits.widths)
        # Where a sequential schedule was kept, it is not timed against itself.
        others = [(name, schedule) for name, schedule in in_order if schedule != bundle.schedule]
        times, eager = _timed(session, bundle, model, others, rounds, seed, told)
    finally:
        session.close()
    if not times.columns.get(_TUNED):
        raise IncompatibleArtifact(os.fspath(path), [f"it does not run here: {times.failures.get(_TUNED, 'no time was taken')}"])
    rivals = [name for name, _ in others if times.columns.get(name)] + ([_TUNED] if len(others) < len(in_order) else [])
    if not rivals:
        failed = ", ".join(f"{name}: {times.failures.get(name, 'no time was taken')}" for name, _ in others)
        raise IncompatibleArtifact(os.fspath(path), [f"no sequential schedule runs here to compare it with ({failed})"])
    return stated(path, bundle, times, rivals, eager)


def _in_order(bundle: Bundle, widths: Sequence[int]) -> list[tuple[str, Schedule]]:
    """The sequential schedules of a bundle's program, by name: of each width in the variants that were kept, as in tuning, where their gain
    is no schedule's; and where those are not the operators' calls, with the calls as well.
    """
    calls = {width: sequential(bundle.program.graph, width=width) for width in widths}
    kept = {width: dataclasses.replace(schedule, variant=bundle.schedule.variant) for width, schedule in calls.items()}
    found = [(f"sequential {width} wide", schedule) for width, schedule in kept.items()]
    return found + [(f"sequential {width} wide, calls", schedule) for width, schedule in calls.items() if schedule != kept[width]]


def stated(path: str | os.PathLike[str], bundle: Bundle, times: Times, rivals: Sequence[str], eager: str | None) -> BenchResult:
    """What may be said of ``times``; ``rivals`` are the sequential schedules in them, ``eager`` the model as it comes.

    Raises:
        UnstableMeasurement: if nothing may be: the machine changed its pace, and no ratio can be claimed in spite of it.
    """
    tuned = summarize(times.columns[_TUNED])
    noise = noise_floor_pct(times.columns[_TUNED], times.again)
    restless = is_unstable(times.columns[_TUNED])
    # The hardest to beat, in pairs: where the machine goes at two paces, a rival's median may be of the slower one.
    ratios = {name: paired_ratio(times.columns[name], times.columns[_TUNED]) for name in rivals}
    best = min(ratios, key=lambda name: ratios[name].ratio)
    ratio = ratios[best]
    against_eager = paired_ratio(times.columns[eager], times.columns[_TUNED]) if eager is not None else None
    eager_us = float(np.median(times.columns[eager])) if eager is not None else None
    beyond = claimable(ratio, noise, restless=restless)
    eager_beyond = claimable(against_eager, noise, restless=restless) if against_eager is not None else None
    if restless and not (beyond or eager_beyond):
        raise UnstableMeasurement(
            f"the tuned schedule varied too much from round to round (A/A floor {noise:.0f} %); stop other work and try again"
        )
    report = bundle.evidence.report
    return BenchResult(
        file=os.fspath(path),
        model=printable(report.model),
        device=printable(bundle.key.device.name),
        chosen=printable(report.chosen),
        tuned_us=tuned.median_us,
        sequential_us=float(np.median(times.columns[best])),
        eager_us=eager_us,
        ci_us=(tuned.ci_low_us, tuned.ci_high_us),
        speedup_vs_sequential=ratio.ratio,
        speedup_ci=(ratio.ci_low, ratio.ci_high),
        speedup_vs_eager=against_eager.ratio if against_eager is not None else None,
        rounds=tuned.count,
        noise_floor_pct=noise,
        tuned_when_made_us=next((row.measured_us for row in report.strategies if row.name == report.chosen), None),
        shape=describe_shape(bundle.program),
        beyond_noise=beyond,
        eager_beyond_noise=eager_beyond,
        restless=restless,
    )


def _timed(
    session: Session,
    bundle: Bundle,
    model: torch.nn.Module,
    others: list[tuple[str, Schedule]],
    rounds: int | None,
    seed: int,
    progress: Progress,
) -> tuple[Times, str | None]:
    """Rounds of the tuned schedule, ``others`` and the model as it comes; and the name of the fastest way to run the latter."""
    given = random_inputs(bundle.program, seed)[: len(bundle.program.given)]
    args, kwargs = unflatten_inputs(bundle.program, given)
    with eager_externals(model, args, kwargs, bundle.key.device.kind, bundle.program) as eager:
        times = interleave(
            session,
            [(_TUNED, bundle.schedule), *others],
            eager,
            rounds=ROUNDS if rounds is None else rounds,
            deadline=time.monotonic() + (_DEFAULT_S if rounds is None else _LONGEST_S),
            progress=progress,
            anchor=_TUNED,
        )
    names = [item.name for item in eager if times.columns.get(item.name)]
    return times, min(names, key=lambda name: float(np.median(times.columns[name])), default=None)


def unless(beyond: bool) -> str:
    """What is added to a ratio of which nothing may be claimed."""
    return "" if beyond else ": no difference beyond the noise floor"
