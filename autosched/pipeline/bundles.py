"""What can be done with a tuned schedule on this machine: read it, check it, trace it. Timing it is ``benching``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from autosched.core.errors import DeviceError, IncompatibleArtifact, UsageError
from autosched.core.records import DeviceKey, Failure
from autosched.device.base import Session
from autosched.device.registry import AUTO, device_like
from autosched.export.trace import write_trace
from autosched.pipeline.result import BUILT_BATCH
from autosched.runtime.bundle.format import Bundle, OperatorTimes, printable, read_bundles
from autosched.runtime.kernels import gather_constants
from autosched.runtime.shapes import choose_shapes, describe_shape, shape_names
from autosched.runtime.verdict import GRAVEST_FIRST, Compatibility, Verdict, check_bundle

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A bundle, and how to build the model it was tuned for when nobody names another.

    Args:
        bundle: the first of the shapes meant.
        batch: that the model was built with; ``None`` where none was named.
        dtype: ``None`` for float32.
        seed: of the model's random weights.
        bundles: all shapes meant.
    """

    bundle: Bundle
    model_name: str
    batch: int | None
    dtype: str | None
    seed: int
    bundles: tuple[Bundle, ...]

    @property
    def keeps_memory(self) -> bool:
        """Whether it was tuned in a process that kept freed memory (``runtime.kept_memory``), so that it is to be timed in one."""
        return any(bundle.key.software.keeps_memory for bundle in self.bundles)


def read(path: str | os.PathLike[str], *, shape: str | None = None, batch: int | None = None) -> Opened:
    """Read a bundle and the model options in its evidence.

    Args:
        shape, batch: which shapes are meant, as ``runtime.shapes.choose_shapes`` takes them; all by default.

    Raises:
        UsageError, ArtifactCorrupt, IncompatibleArtifact: as ``read_bundles``.
        UsageError: if there is no such shape.
    """
    bundles = chosen(path, shape, batch)
    first = bundles[0]
    dtype = dict(first.evidence.environment).get("dtype", "float32")
    seed = dict(first.evidence.seeds).get("tune", 0)
    return Opened(first, first.evidence.report.model, _size(first, BUILT_BATCH), None if dtype == "float32" else dtype, seed, bundles)


def chosen(path: str | os.PathLike[str], shape: str | None, batch: int | None) -> tuple[Bundle, ...]:
    """The shapes of a bundle that are meant, all by default."""
    return tuple(bundle for bundle, _ in _named(path, shape, batch))


def _named(path: str | os.PathLike[str], shape: str | None, batch: int | None) -> list[tuple[Bundle, str]]:
    """The same, each with what ``--shape`` calls it."""
    bundles = read_bundles(path)
    programs, batches = [bundle.program for bundle in bundles], [_size(bundle, "batch") for bundle in bundles]
    names = shape_names(programs)
    return [(bundles[place], names[place]) for place in choose_shapes(programs, batches, shape=shape, batch=batch)]


def _size(bundle: Bundle, name: str) -> int | None:
    """A batch size noted in a bundle; what is none, in a file from a stranger, counts as not noted."""
    text = dict(bundle.evidence.environment).get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 and int(text) > 0 else None


def _only(path: str | os.PathLike[str], shape: str | None, batch: int | None) -> Bundle:
    found = _named(path, shape, batch)
    if len(found) > 1:
        names = "; ".join(name for _, name in found)
        raise UsageError(f"{os.fspath(path)} holds {len(found)} shapes; choose one of {names} with --shape, or by --batch")
    return found[0][0]


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
    path: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    *,
    shape: str | None = None,
    batch: int | None = None,
    device: str = AUTO,
) -> CheckResult:
    """Compare a bundle with this machine (``device`` as in :func:`open_here`) and, if given, a model; every shape, or those asked for."""
    bundles = chosen(path, shape, batch)
    verdicts = [verdict_here(bundle, model, device) for bundle in bundles]
    worst = min((verdict.compatibility for verdict in verdicts), key=GRAVEST_FIRST.index)
    lines = dict.fromkeys(line for verdict in verdicts for line in verdict.lines)
    report = bundles[0].evidence.report
    names = printable(report.model), bundles[0].key.graph, printable(report.chosen)
    shapes = tuple(describe_shape(bundle.program) for bundle in bundles)
    return CheckResult(os.fspath(path), worst, tuple(lines), *names, shapes)


def verdict_here(bundle: Bundle, model: torch.nn.Module | None = None, device: str = AUTO) -> Verdict:
    """Whether ``bundle`` fits this machine and, if given, a model. A machine without such a device is one more that it does not fit.

    Args:
        device: as in :func:`open_here`.

    Raises:
        UnknownName, DeviceMissing, UsageError: for a device that was named and is not here.
    """
    try:
        found = device_like(bundle.key.device, device)
        return check_bundle(bundle, found.key, found.software, model)
    except DeviceError as error:
        if device != AUTO:
            raise
        # A machine without the device, or that cannot use it, can still be asked; the answer is then incompatible, and why.
        nothing = DeviceKey("none", f"no such device ({error})", ())
        return check_bundle(bundle, nothing, bundle.key.software, model, numerics=bundle.key.numerics)


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
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    output: Path,
    *,
    shape: str | None = None,
    batch: int | None = None,
    device: str = AUTO,
) -> TraceResult:
    """Run a tuned schedule with time stamps and write a timeline, planned beside measured.

    Raises:
        UsageError: if the bundle holds several shapes and not one of them was chosen.
        IncompatibleArtifact: if the schedule does not fit this machine or model, or does not run.
    """
    bundle = _only(path, shape, batch)
    session = open_here(path, bundle, model, device)
    try:
        record = session.schedules([bundle.schedule], rounds=7, trace=True)[0]
    finally:
        session.close()
    if isinstance(record, Failure):
        raise IncompatibleArtifact(os.fspath(path), [f"it does not run here: {record.kind}: {record.detail}"])
    measured = OperatorTimes(record.operator_start_us, record.operator_end_us)
    write_trace(output, bundle.program.graph, bundle.schedule, planned=bundle.evidence.planned, measured=measured)
    return TraceResult(os.fspath(output), len(bundle.program.graph), bundle.schedule.lanes, max(measured.end_us, default=0.0))


def open_here(path: str | os.PathLike[str], bundle: Bundle, model: torch.nn.Module, device: str = AUTO) -> Session:
    """A session of the bundle's program with the model's constants.

    Args:
        device: where; ``auto`` is the first device of this machine that the bundle was tuned for.

    Raises:
        IncompatibleArtifact: if it does not fit this machine or model.
    """
    verdict = verdict_here(bundle, model, device)
    if verdict.compatibility is Compatibility.INCOMPATIBLE:
        raise IncompatibleArtifact(os.fspath(path), verdict.lines)
    constants = gather_constants(bundle.program, model, bundle.literals)
    return device_like(bundle.key.device, device).open(bundle.program, constants, timeout_s=_TIMEOUT_S)
