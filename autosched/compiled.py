"""``autosched.compile``: a model with the schedule that was tuned for it, or a safe default, found by what the model computes.

A schedule is looked up by graph, device, versions and settings, and transferred onto the graph captured here, so that neither the
names of parameters nor the order of inputs matter. If there is none, the default is the fused operators one after another, each as
wide as this process allows: what PyTorch itself would do, without a search. Lanes are never tried unmeasured, for they can lose; and
the default itself must win a short race against the model as it came, or the model stays as it came.
"""

from __future__ import annotations

import enum
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autosched.capture.call_check import require_call
from autosched.capture.dynamo import alone, untraced
from autosched.capture.export import Captured, capture
from autosched.compile_options import CompileOptions, parse_options
from autosched.config import schedules_dir
from autosched.core.callers import warn_caller
from autosched.core.custom_operators import trusting
from autosched.core.errors import AutoschedError, IllegalSchedule, UnsupportedGraph, UsageError
from autosched.core.frames import empty_frames
from autosched.core.from_outside import let_through
from autosched.core.likeness import transfer
from autosched.core.program import ConstantSource, Program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.report import TuneReport
from autosched.core.schedule import sequential
from autosched.core.standing_aside import as_they_came
from autosched.core.variants import WHOLE, lowering_named
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime import cache
from autosched.runtime.bundle.format import Bundle, Evidence, OperatorTimes
from autosched.runtime.cores import usable_cores
from autosched.runtime.current_device import home_of, made_current
from autosched.runtime.guard import FallbackWarning, LoadedModel
from autosched.runtime.host_key import cpu_device_key, numerics_key, software_key
from autosched.runtime.inductor.modes import mode_of
from autosched.runtime.load import load
from autosched.runtime.load_report import LoadReport
from autosched.runtime.no_memory import lacks_memory
from autosched.runtime.state import Kept
from autosched.runtime.thread_state import ThreadKept, inference_mode
from autosched.runtime.trees import map_tensors, renewed_calls

_log = logging.getLogger(__name__)

DEFAULT = "sequential_default"
_RACE_ROUNDS = 9
_RACE_SECONDS = 0.5


class Origin(enum.StrEnum):
    """Where a schedule came from."""

    CACHE = "cache"
    TUNED = "tuned"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A bundle for one graph and one set of input shapes; it fits every model with such parameters."""

    bundle: bytes
    origin: Origin
    program: Program


def compile(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    schedule: str | os.PathLike[str] | bytes = "auto",
    tune: str | None = None,
    budget_s: float | None = None,
    device: str = "auto",
    strict: bool = False,
    custom_operators: Sequence[str] = (),
) -> Callable[..., Any]:
    """A callable like ``model`` that runs a schedule.

    Args:
        model: in eval mode, on the device it is to run on.
        example_inputs: positional arguments of one call; the schedule is then found and verified now. Without them that happens at the
            first call, for each input shape, and for each part if the model cannot be captured whole (``torch.compile`` with this
            backend).
        example_kwargs: keyword arguments of that call.
        schedule: ``auto`` to look in the cache of tuned schedules; or the path or the bytes of a schedule file.
        tune: ``quick``, ``balanced`` or ``full``: tune if the cache has nothing, and keep the result there.
        budget_s: seconds for tuning, instead of the preset's.
        device: ``cpu``, ``cuda`` or ``cuda:N`` to insist on where the model is.
        strict: raise where the model would otherwise run as it came with a warning.
        custom_operators: namespaces of operators outside PyTorch that may be captured and run, as for ``load``.

    Returns:
        A ``LoadedModel``; or, without example inputs, what ``torch.compile`` returns.

    Raises:
        UsageError: for an option that cannot be honoured, or a missing file.
        AutoschedError: with ``strict``, if the model cannot be captured or its schedule may not run.
    """
    given: dict[str, Any] = {
        "tune": tune, "budget_s": budget_s, "device": device, "strict": strict, "custom_operators": custom_operators,
    }  # fmt: skip
    options = parse_options(given)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"compile() got a {type(model).__name__}; expected a torch.nn.Module")
    if schedule != "auto":
        if tune is not None:
            raise UsageError(f"compile() was told to tune ({tune!r}) and to use the schedule {_shown(schedule)}; expected one of the two")
        _require_home(options, home_of(model, (), None))
        return load(schedule, model, strict=strict, custom_operators=options.custom_operators)
    if example_inputs is None and example_kwargs is None:
        from autosched.plugin import autosched

        _tell_of_untraced(model, strict=strict)
        # One schedule is for one shape: sizes left open would only be closed again.
        compiled: Callable[..., Any] = torch.compile(model, backend=autosched, dynamic=False, options=given)
        return compiled
    given_inputs = () if example_inputs is None else example_inputs
    require_call("compile", model, given_inputs, example_kwargs)
    args, kwargs = tuple(given_inputs), dict(example_kwargs or {})
    try:
        return ready(model, recipe_for(model, args, kwargs, options), args, kwargs, options)
    except UsageError as error:
        if options.strict or not isinstance(error, UnsupportedGraph):
            raise
        return _as_it_came(model, str(error))
    except AutoschedError as error:
        if options.strict:
            raise
        return _as_it_came(model, str(error))


def _require_home(options: CompileOptions, home: torch.device) -> None:
    if options.device not in ("auto", home.type, str(home)):
        raise UsageError(f"option device is {options.device!r}, but the model is on {home}; move the model, or leave the option out")


def _tell_of_untraced(model: torch.nn.Module, *, strict: bool) -> None:
    """Say of which parts no backend will ever hear.

    Raises:
        UnsupportedGraph: with ``strict``, if there are any.
    """
    if part := untraced(model):
        reason = (
            f"torch.compile traces no {part}, nor what is done after it in the same forward; give compile() example inputs, with which the "
            "model is captured whole"
        )
        if strict:
            raise UnsupportedGraph(f"{type(model).__name__} may not be scheduled: {reason}")
        warn_caller(f"autosched runs parts of {type(model).__name__} without a schedule: {reason}", FallbackWarning)


def recipe_for(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: CompileOptions) -> Recipe:
    """A schedule for ``model`` called like this: from the cache, else tuned if asked for, else the default.

    Raises:
        UnsupportedGraph: if the model cannot be captured.
        UsageError: if the model is not on the device that ``options`` names.
        AutoschedError: if tuning fails.
    """
    home = home_of(model, args, kwargs)
    _require_home(options, home)
    if home.type not in ("cpu", "cuda"):
        raise UnsupportedGraph(f"the model is on {home}; expected cpu or cuda. Move the model.")
    if torch.is_autocast_enabled(home.type):
        raise UnsupportedGraph("autocast is on, which no schedule is made for; expected it off. Convert the model instead (model.half()).")
    trust = trusting(options.custom_operators)
    with ThreadKept(home), trust, alone(), made_current(home), inference_mode(False), torch.no_grad():
        args, kwargs = _usable(args), _usable(dict(kwargs))
        captured = capture(model, args, kwargs)
        device, software = _host_keys(home)
        key = cache.CacheKey(captured.structure, device, software.keeping_memory(False), numerics_key(home.type))
        found = cache.find(schedules_dir(), key)
        origin = Origin.CACHE
        if found is None and options.tune is not None:
            # Once, not again for each shape that comes to the same graph.
            found, origin = _tune(model, args, kwargs, home, options), Origin.TUNED
        if found is not None:
            try:
                fused_alike = _in_lowering(found.program, home.type, captured, model, args, kwargs)
                return Recipe(encode_bundle(_fitted(found, fused_alike)), origin, fused_alike.program)
            except (IllegalSchedule, UnsupportedGraph) as error:
                _log.warning("the tuned schedule of %s does not fit: %s", type(model).__name__, error)
        return Recipe(encode_bundle(_default(captured, device, software, type(model).__name__)), Origin.DEFAULT, captured.program)


def ready(model: torch.nn.Module, recipe: Recipe, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: CompileOptions) -> LoadedModel:
    """``model`` on the schedule of ``recipe``, verified against the model; or, where that is no faster, the model as it came.

    Raises:
        AutoschedError: with ``strict``, if the schedule may not run.
    """
    # Of a model without parameters nobody else knows where it runs.
    home = home_of(model, args, kwargs)
    with ThreadKept(home), as_they_came(model), alone(), made_current(home), inference_mode(False), torch.no_grad():
        loaded = load(recipe.bundle, model, strict=options.strict, custom_operators=options.custom_operators)
        report = loaded.report()
        if recipe.origin is not Origin.DEFAULT or not report.scheduled:
            return loaded
        short = False
        try:
            if _faster(loaded, model, recipe.program, _usable(args), _usable(dict(kwargs))):
                return loaded
            reason = "the default schedule is no faster here than the model in eager mode; tune to search for a better one"
        except (RuntimeError, MemoryError) as error:
            let_through(error)
            if not lacks_memory(error):
                raise
            # The model runs next, which it may well have the memory for without the schedule.
            empty_frames(error)
            reason = "there was not enough memory to run the model beside its default schedule, and to see whether that is faster"
            short = True
        _log.info("%s: %s", type(model).__name__, reason)
        return LoadedModel(model, None, replace(report, scheduled=False, reason=reason), strict=False, short=short)


def _in_lowering(
    tuned: Program, kind: str, captured: Captured, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Captured:
    """The model cut into operators as ``tuned`` was on a device of ``kind``; what was captured, if that is so already."""
    name = tuned.lowering
    if name == captured.program.lowering:
        return captured
    if name not in WHOLE:
        return capture(model, args, kwargs, lowering=lowering_named(name))
    from autosched.pipeline.inductor_capture import capture_inductor

    found = capture_inductor(model, args, kwargs, mode=mode_of(tuned, kind))
    if not isinstance(found, Captured):
        raise UnsupportedGraph(f"it was tuned in the lowering {name}, which this machine refuses: {found.reason}. Tune again here.")
    return found


def _fitted(found: Bundle, captured: Captured) -> Bundle:
    """The schedule of ``found`` in a bundle for the program captured here."""
    schedule = transfer(found.schedule, found.program.graph, captured.program.graph)
    report = replace(found.evidence.report, graph_hash=captured.program.graph.hash)
    # Times by operator index belong to the other program's indices.
    evidence = replace(found.evidence, report=report, planned=OperatorTimes(), measured=OperatorTimes(), solo_us=())
    key = found.key
    return make_bundle(captured.program, schedule, evidence, _literals(captured), key.device, key.software, numerics=key.numerics)


def _default(captured: Captured, device: DeviceKey, software: SoftwareKey, name: str) -> Bundle:
    graph = captured.program.graph
    width = max(1, min(torch.get_num_threads(), usable_cores())) if device.kind == "cpu" else 1
    report = TuneReport(
        model=name,
        graph_hash=graph.hash,
        device=device,
        lowering=captured.program.lowering,
        operators=len(graph),
        chosen=DEFAULT,
        best_baseline=DEFAULT,
        verdict="no schedule has been tuned for this graph here; the operators run one after another",
        ratio_low=1.0,
        ratio_high=1.0,
        strategies=(),
        measurements=0,
        failures=0,
        search_s=0.0,
        noise_floor_pct=0.0,
        seed=0,
        effort="none",
    )
    return make_bundle(captured.program, sequential(graph, width=width), Evidence(report), _literals(captured), device, software)


def _literals(captured: Captured) -> dict[str, torch.Tensor]:
    return {
        binding.name: captured.constants[binding.value].detach().cpu()
        for binding in captured.program.bindings
        if binding.source is ConstantSource.LITERAL
    }


def _tune(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], home: torch.device, options: CompileOptions) -> Bundle:
    from autosched.pipeline import tune

    tuned = tune(
        model, args, kwargs, device=str(home), effort=options.tune or "quick", budget_s=options.budget_s,
        custom_operators=options.custom_operators,
    )  # fmt: skip
    return tuned.bundle


def _faster(loaded: LoadedModel, model: torch.nn.Module, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the schedule beats the model in a short race: turn by turn, the median of the ratios under 1."""

    def call(run: Callable[..., Any]) -> Any:
        [(own_args, own_kwargs)] = renewed_calls(args, dict(kwargs), 1)
        return run(*own_args, **own_kwargs)

    runners: tuple[Callable[[], Any], ...] = (lambda: call(loaded), lambda: call(model))
    home = home_of(model, args, kwargs)
    restore = Kept.by(program, model, args, kwargs).restore if program.writes else lambda: None
    for run in (*runners, *runners):
        _timed(run, home, restore)
    ratios: list[float] = []
    begin = time.perf_counter()
    while len(ratios) < 3 or (len(ratios) < _RACE_ROUNDS and time.perf_counter() - begin < _RACE_SECONDS):
        # Who goes first changes from round to round.
        first = len(ratios) % 2
        times = {index: _timed(runners[index], home, restore) for index in (first, 1 - first)}
        ratios.append(times[0] / times[1])
    return statistics.median(ratios) < 1.0


def _timed(run: Callable[[], Any], home: torch.device, restore: Callable[[], None]) -> float:
    begin = time.perf_counter()
    try:
        run()
        if home.type == "cuda":
            torch.cuda.synchronize(home)
        return time.perf_counter() - begin
    finally:
        restore()


def _usable(item: Any) -> Any:
    """The same nested arguments without tensors made in inference mode, which autograd's bookkeeping refuses."""
    return map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, item)


def _host_keys(home: torch.device) -> tuple[DeviceKey, SoftwareKey]:
    if home.type == "cpu":
        return cpu_device_key(), software_key()
    from autosched.runtime.cuda.key import cuda_device_key, cuda_software_key

    index = home.index if home.index is not None else torch.cuda.current_device()
    return cuda_device_key(index), cuda_software_key(index)


def _as_it_came(model: torch.nn.Module, reason: str) -> LoadedModel:
    warn_caller(f"autosched runs {type(model).__name__} without a schedule: {reason}", FallbackWarning)
    return LoadedModel(model, None, LoadReport(False, reason), strict=False)


def _shown(schedule: object) -> str:
    return "given as bytes" if isinstance(schedule, bytes) else repr(schedule)
