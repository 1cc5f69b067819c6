"""What can be done with a tuned schedule on this machine: check it, bench it, trace it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from autosched.core.errors import DeviceError, IncompatibleArtifact, UnstableMeasurement, UsageError
from autosched.core.progress import Progress, Silent
from autosched.core.records import DeviceKey, Failure
from autosched.core.schedule import sequential
from autosched.device.base import Session
from autosched.device.registry import device_named
from autosched.device.timing import is_unstable, noise_floor_pct, paired_ratio
from autosched.export.trace import write_trace
from autosched.pipeline.baselines import eager_externals
from autosched.pipeline.judge import interleave
from autosched.runtime.bundle_format import Bundle, OperatorTimes, read_bundles
from autosched.runtime.kernels import gather_constants, random_inputs
from autosched.runtime.shapes import choose_shapes, describe_shape, shape_name
from autosched.runtime.trees import unflatten_inputs
from autosched.runtime.verdict import Compatibility, Verdict, check_bundle

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A bundle, and how to build the model it was tuned for when nobody names another.

    Args:
        bundle: the first of the shapes meant.
        dtype: ``None`` for float32.
        seed: of the model's random weights.
        bundles: all shapes meant.
    """

    bundle: Bundle
    model_name: str
    dtype: str | None
    seed: int
    bundles: tuple[Bundle, ...]


def read(path: str | os.PathLike[str], *, shape: str | None = None, batch: int | None = None) -> Opened:
    """Read a bundle and the model options in its evidence.

    Args:
        shape, batch: which shapes are meant, as ``runtime.shapes.choose_shapes`` takes them; all by default.

    Raises:
        UsageError, ArtifactCorrupt, IncompatibleArtifact: as ``read_bundles``.
        UsageError: if there is no such shape.
    """
    bundles = _chosen(path, shape, batch)
    first = bundles[0]
    dtype = dict(first.evidence.environment).get("dtype", "float32")
    seed = dict(first.evidence.seeds).get("tune", 0)
    return Opened(first, first.evidence.report.model, None if dtype == "float32" else dtype, seed, bundles)


def _chosen(path: str | os.PathLike[str], shape: str | None, batch: int | None) -> tuple[Bundle, ...]:
    bundles = read_bundles(path)
    noted = [dict(bundle.evidence.environment).get("batch", "") for bundle in bundles]
    batches = [int(text) if text.isdecimal() and len(text) < 10 else None for text in noted]
    places = choose_shapes([bundle.program for bundle in bundles], batches, shape=shape, batch=batch)
    return tuple(bundles[place] for place in places)


def _only(path: str | os.PathLike[str], shape: str | None, batch: int | None) -> Bundle:
    bundles = _chosen(path, shape, batch)
    if len(bundles) > 1:
        names = ", ".join(shape_name(bundle.program) for bundle in bundles)
        raise UsageError(f"{os.fspath(path)} holds {len(bundles)} shapes; choose one of {names} with --shape, or by --batch")
    return bundles[0]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """``autosched check``: the worst verdict of all shapes and one line for each differing field."""

    file: str
    verdict: Compatibility
    differences: tuple[str, ...]
    model: str
    graph_hash: str
    chosen: str
    shapes: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether the schedule may run here at all."""
        return self.verdict is not Compatibility.INCOMPATIBLE

    def summary(self) -> str:
        """For people."""
        lines = [f"{self.file}: {self.verdict} ({self.model}, {self.chosen}, graph {self.graph_hash[:12]})"]
        if len(self.shapes) > 1:
            lines.append(f"  shapes: {'; '.join(self.shapes)}")
        return "\n".join([*lines, *(f"  {line}" for line in self.differences)])


def check(
    path: str | os.PathLike[str], model: torch.nn.Module | None = None, *, shape: str | None = None, batch: int | None = None
) -> CheckResult:
    """Compare a bundle with this machine and, if given, a model; every shape of it, or those asked for."""
    bundles = _chosen(path, shape, batch)
    verdicts = [verdict_here(bundle, model) for bundle in bundles]
    worst = min((verdict.compatibility for verdict in verdicts), key=_GRAVITY.index)
    lines = dict.fromkeys(line for verdict in verdicts for line in verdict.lines)
    report = bundles[0].evidence.report
    shapes = tuple(describe_shape(bundle.program) for bundle in bundles)
    return CheckResult(os.fspath(path), worst, tuple(lines), report.model, bundles[0].key.graph, report.chosen, shapes)


_GRAVITY = (Compatibility.INCOMPATIBLE, Compatibility.DEGRADED, Compatibility.EXACT)


def verdict_here(bundle: Bundle, model: torch.nn.Module | None = None) -> Verdict:
    """Whether ``bundle`` fits this machine and, if given, a model. A machine without the device is one more that it does not fit."""
    try:
        device = device_named(bundle.key.device.kind)
        return check_bundle(bundle, device.key, device.software, model)
    except DeviceError:
        # A machine without the device can still be asked; the answer is then incompatible in every field.
        return check_bundle(
            bundle, DeviceKey("none", "no such device on this machine", ()), bundle.key.software, model, numerics=bundle.key.numerics
        )


@dataclass(frozen=True, slots=True)
class BenchResult:
    """``autosched bench``: medians in microseconds, measured in interleaved rounds. ``ci_us`` belongs to ``tuned_us``.

    ``speedup_vs_sequential`` and its interval come from paired rounds; ``tuned_when_made_us`` is what the tuning job measured.
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

    def summary(self) -> str:
        """For people."""
        lines = [
            f"{self.model} {self.shape} on {self.device}, {self.rounds} interleaved rounds, noise floor {self.noise_floor_pct:.1f} %",
            f"  tuned ({self.chosen}): {self.tuned_us:,.0f} us (95 % interval {self.ci_us[0]:,.0f} to {self.ci_us[1]:,.0f})",
            f"  sequential: {self.sequential_us:,.0f} us; tuned is {self.speedup_vs_sequential:.3f}x "
            f"(95 % interval {self.speedup_ci[0]:.3f} to {self.speedup_ci[1]:.3f})",
        ]
        if self.eager_us is not None:
            lines.append(f"  as it comes (eager): {self.eager_us:,.0f} us; tuned is {self.speedup_vs_eager:.3f}x")
        if self.tuned_when_made_us is not None:
            change = 100 * (self.tuned_us / self.tuned_when_made_us - 1)
            lines.append(f"  when tuned it took {self.tuned_when_made_us:,.0f} us; today {change:+.1f} %")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class BenchShapes:
    """``autosched bench`` on a bundle of several shapes: one result for each."""

    file: str
    shapes: tuple[BenchResult, ...]

    def summary(self) -> str:
        """For people."""
        return "\n".join(result.summary() for result in self.shapes)


def bench(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    rounds: int = 40,
    seed: int = 0,
    shape: str | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> BenchResult | BenchShapes:
    """Time tuned schedules beside the best sequential one and the model as it comes; every shape, or those asked for.

    Returns:
        A result, or, if several shapes are meant, one for each.

    Raises:
        IncompatibleArtifact: if a schedule does not fit this machine or model.
        UnstableMeasurement: if the machine is too restless.
    """
    results = [_bench(path, bundle, model, rounds, seed, progress) for bundle in _chosen(path, shape, batch)]
    return results[0] if len(results) == 1 else BenchShapes(os.fspath(path), tuple(results))


def _bench(
    path: str | os.PathLike[str], bundle: Bundle, model: torch.nn.Module, rounds: int, seed: int, progress: Progress | None
) -> BenchResult:
    import numpy as np

    session = _open(path, bundle, model)
    told = progress or Silent()
    told.stage("bench")
    graph = bundle.program.graph
    try:
        named = [(f"sequential {width} wide", sequential(graph, width=width)) for width in session.limits.widths]
        # Where the sequential schedule was kept, it is not timed against itself.
        kept_sequential = any(schedule == bundle.schedule for _, schedule in named)
        named = [(name, schedule) for name, schedule in named if schedule != bundle.schedule]
        inputs = random_inputs(bundle.program, seed)
        args, kwargs = unflatten_inputs(bundle.program, inputs)
        with eager_externals(model, args, kwargs, bundle.key.device.kind) as eager:
            times = interleave(
                session,
                [("tuned", bundle.schedule), *named],
                eager,
                rounds=rounds,
                deadline=time.monotonic() + 3600.0,
                progress=told,
                anchor="tuned",
            )
    finally:
        session.close()
    if "tuned" not in times.columns or not times.columns["tuned"]:
        raise IncompatibleArtifact(os.fspath(path), [f"it does not run here: {times.failures.get('tuned', 'no time was taken')}"])
    rng = np.random.default_rng(seed)
    noise = noise_floor_pct(times.columns["tuned"], times.again, rng)
    if is_unstable(times.columns["tuned"], limit_pct=25.0):
        raise UnstableMeasurement(
            f"the tuned schedule varied too much from round to round (A/A floor {noise:.0f} %); stop other work and try again"
        )
    rivals = [name for name, _ in named if times.columns.get(name)] + (["tuned"] if kept_sequential else [])
    best = min(rivals, key=lambda name: float(np.median(times.columns[name])))
    ratio = paired_ratio(times.columns[best], times.columns["tuned"], rng)
    eager_us = [sample.median_us for item in eager if (sample := times.samples(item.name)) is not None]
    tuned = times.samples("tuned")
    assert tuned is not None  # it has a column
    report = bundle.evidence.report
    when_made = next((row.measured_us for row in report.strategies if row.name == report.chosen), None)
    return BenchResult(
        file=os.fspath(path),
        model=report.model,
        device=bundle.key.device.name,
        chosen=report.chosen,
        tuned_us=tuned.median_us,
        sequential_us=float(np.median(times.columns[best])),
        eager_us=min(eager_us) if eager_us else None,
        ci_us=(tuned.ci_low_us, tuned.ci_high_us),
        speedup_vs_sequential=ratio.ratio,
        speedup_ci=(ratio.ci_low, ratio.ci_high),
        speedup_vs_eager=min(eager_us) / tuned.median_us if eager_us else None,
        rounds=tuned.count,
        noise_floor_pct=noise,
        tuned_when_made_us=when_made,
        shape=describe_shape(bundle.program),
    )


@dataclass(frozen=True, slots=True)
class TraceResult:
    """``autosched trace``."""

    trace: str
    operators: int
    lanes: int
    span_us: float

    def summary(self) -> str:
        """For people."""
        where = f"{self.operators} operators on {self.lanes} lane{'s' if self.lanes != 1 else ''} over {self.span_us:,.0f} us"
        return f"{where} written to {self.trace}; open it at ui.perfetto.dev"


def trace(
    path: str | os.PathLike[str], model: torch.nn.Module, output: Path, *, shape: str | None = None, batch: int | None = None
) -> TraceResult:
    """Run a tuned schedule with time stamps and write a timeline, planned beside measured.

    Raises:
        UsageError: if the bundle holds several shapes and not one of them was chosen.
        IncompatibleArtifact: if the schedule does not fit this machine or model, or does not run.
    """
    bundle = _only(path, shape, batch)
    session = _open(path, bundle, model)
    try:
        record = session.schedules([bundle.schedule], rounds=7, trace=True)[0]
    finally:
        session.close()
    if isinstance(record, Failure):
        raise IncompatibleArtifact(os.fspath(path), [f"it does not run here: {record.kind}: {record.detail}"])
    measured = OperatorTimes(record.operator_start_us, record.operator_end_us)
    write_trace(output, bundle.program.graph, bundle.schedule, planned=bundle.evidence.planned, measured=measured)
    return TraceResult(os.fspath(output), len(bundle.program.graph), bundle.schedule.lanes, max(measured.end_us, default=0.0))


def _open(path: str | os.PathLike[str], bundle: Bundle, model: torch.nn.Module) -> Session:
    verdict = verdict_here(bundle, model)
    if verdict.compatibility is Compatibility.INCOMPATIBLE:
        raise IncompatibleArtifact(os.fspath(path), verdict.lines)
    constants = gather_constants(bundle.program, model, bundle.literals)
    return device_named(bundle.key.device.kind).open(bundle.program, constants, timeout_s=_TIMEOUT_S)
