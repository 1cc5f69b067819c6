"""Loading tuned schedules where they are used: verdict, bind, audit, one comparison with the model, and a guard at every call.

On any doubt the model runs as it came, with one warning that names the reason; ``strict=True`` raises instead. Nothing here needs
the tuning stack, and nothing touches CUDA unless the model is there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch

from autosched.core.callers import warn_caller
from autosched.core.custom_operators import trusting
from autosched.core.errors import AutoschedError, DeviceError, IncompatibleArtifact, InputMismatch, UnsupportedGraph, UsageError
from autosched.core.frames import empty_frames
from autosched.core.from_outside import let_through
from autosched.core.program import ConstantSource
from autosched.core.records import DeviceKey, Engine, SoftwareKey
from autosched.core.standing_aside import all_aside
from autosched.core.wrappers import spread_over_processes, wrapped_in
from autosched.runtime.binding import Binder
from autosched.runtime.bundle.format import Bundle, label_of, printable, read_bundles
from autosched.runtime.calling_threads import calling_threads
from autosched.runtime.cpu_kernels.library import kernel_library
from autosched.runtime.cpu_kernels.ways import WAYS
from autosched.runtime.current_device import current_index
from autosched.runtime.guard import FallbackWarning, LoadedModel
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.key_order import KeyOrders
from autosched.runtime.lane_choice import for_engine
from autosched.runtime.load_report import LoadReport, ShapeReport
from autosched.runtime.native.build import build_native, native_library, obstacle
from autosched.runtime.no_memory import ROOM, lacks_memory
from autosched.runtime.prepared import ChangedMeanwhile, InAnotherMode, Prepared
from autosched.runtime.shape_table import ShapeTable
from autosched.runtime.shapes import find_buckets
from autosched.runtime.shapes_padding import Padding
from autosched.runtime.slot import Slot
from autosched.runtime.thread_state import ThreadKept
from autosched.runtime.verdict import GRAVEST_FIRST, Compatibility, Difference, Verdict, check_bundle, differences_of
from autosched.runtime.weights import UnwatchableModel, part_in_training

__all__ = ["FallbackWarning", "LoadReport", "LoadedModel", "ShapeReport", "load"]


def load(
    source: str | os.PathLike[str] | bytes,
    model: torch.nn.Module,
    *,
    strict: bool = False,
    pad: bool = False,
    max_shapes: int = 8,
    prepare: Literal["all", "first-use"] = "all",
    frozen: bool = False,
    in_place: bool = True,
    custom_operators: Sequence[str] = (),
) -> LoadedModel:
    """Bind a schedule file to the model it was made for.

    The file's key is compared with this host and with the model's parameters. If they fit, the schedule for each shape is bound to the
    model's own parameters (no copy), its operators are audited in order, and its outputs are compared with the model's on random inputs,
    within ``numerics.tolerance`` of each dtype; NaN and infinities must be where the model has them. A call runs the schedule for the
    shapes and dtypes of its inputs; where there is none, the model runs as it came.

    Changes of the model are noticed at the next call: weights, buffers, modules, hooks, modes, an instance's own ``forward``, and the
    attributes of modules with the lists, sets, dictionaries, configuration objects and tensors in them. PyTorch does not count what is
    written through ``parameter.data``, NumPy, a collective of ``torch.distributed`` (``broadcast``) or another process: a schedule reads
    most weights where they are, and of those that something was computed from ahead (folded, packed), two words each are compared on a
    CPU, so that new weights are noticed. Not noticed, so call ``refresh()`` after them: such writes to some of a weight's numbers (pruning,
    clamping), or on a GPU; what is in large arrays, lists or dictionaries or deep inside of others; methods and attributes of a class;
    settings of the process. Side effects of ``forward`` (counters, prints, hooks that only look) do not happen on a schedule.

    Args:
        source: path of a schedule file, or its bytes.
        model: in eval mode, on the device the file was tuned for.
        strict: raise on any doubt, now and at call time, instead of running the model as it came with a warning.
        pad: run a call of another size on the next larger shape and cut the outputs. The file needs two shapes or more that differ
            in one size; padding is refused where added rows are seen to change the others.
        max_shapes: how many schedules are in memory at most; the one used longest ago makes room, and is prepared again when needed.
        prepare: ``all`` binds and verifies every shape now, up to ``max_shapes``; ``first-use`` each at its first call.
        frozen: you vouch that the model's modules and weights stay as they are, and nothing looks at every one of them at each call;
            after a change, ``refresh()`` reads them again. Training mode and hooks are looked at all the same.
        in_place: let schedules overwrite, while they run, what the model itself changes in place (a cache of keys and values), where nobody
            can see the difference; a call whose operator fails after that raises ``HalfWritten``. False: what is changed is made anew and
            copied when the run has succeeded, so that a call that fails has changed nothing.
        custom_operators: namespaces of operators outside PyTorch that the file may run, such as ``("mylib",)`` for ``mylib::norm``; the
            package that registers them must be imported. A file that needs another namespace is not used.

    Returns:
        A callable with the model's signature; see :class:`LoadedModel`. Its ``report()`` says what is ready and what memory it takes.

    Raises:
        UsageError: if there is no file at the path, ``model`` is no module, or an option is out of range.
        ArtifactCorrupt: with ``strict``, if the file is damaged or forged.
        IncompatibleArtifact: with ``strict``, if it was made for another host or model, computes something else, or cannot be padded.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"load() got a {type(model).__name__} as model; expected the torch.nn.Module that the file was tuned for")
    _require_options(max_shapes, prepare, strict=strict, pad=pad, frozen=frozen, in_place=in_place)
    facts = _Facts(label_of(source), strict)
    try:
        _require_no_capture()
        with all_aside():
            with ThreadKept(_home(model, "")), trusting(custom_operators):
                table = _open(source, model, facts, pad=pad, max_shapes=max_shapes, frozen=frozen, in_place=in_place)
            if prepare == "all":
                _warm(table, model, facts)
        if table.kind == "cpu":
            # Whoever loads need not be who calls.
            calling_threads.let_go()
    except AutoschedError as error:
        if strict or _only_the_caller_can_mend(error):
            raise
        reason = str(error)
        _warn(model, reason)
        return LoadedModel(model, None, facts.report(reason), strict=False, short=lacks_memory(error))
    return LoadedModel(model, table, facts.report(), strict=strict)


def _require_options(max_shapes: object, prepare: object, **flags: object) -> None:
    # Of a configuration's text any word is true, "false" as well, and with frozen=True nobody would look at weights.
    for name, given in flags.items():
        if not isinstance(given, bool):
            raise UsageError(f"{name} is {given!r}; expected True or False")
    if isinstance(max_shapes, bool) or not isinstance(max_shapes, int) or max_shapes < 1:
        raise UsageError(f"max_shapes is {max_shapes!r}; expected a whole number, at least 1")
    if prepare not in ("all", "first-use"):
        raise UsageError(f"prepare is {prepare!r}; expected 'all' or 'first-use'")


def _require_no_capture() -> None:
    """What prepares and compares a schedule waits for the device, which would end a capture of the caller's."""
    cuda: Any = torch.cuda  # its Python side is not typed
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        raise DeviceError("load() was called while a CUDA graph is being captured, which cannot hold what it does; load before the capture")


def _only_the_caller_can_mend(error: AutoschedError) -> bool:
    return isinstance(error, UsageError) and not isinstance(error, (UnsupportedGraph, InputMismatch))


@dataclass(slots=True)
class _Facts:
    """What is known by the time a load ends, well or not."""

    label: str
    strict: bool
    bundles: Sequence[Bundle] = ()
    verdicts: list[Verdict] = field(default_factory=list)

    def report(self, reason: str = "") -> LoadReport:
        if not self.bundles:
            return LoadReport(not reason, reason)
        first = self.bundles[0]
        found = {verdict.compatibility for verdict in self.verdicts}
        lines = dict.fromkeys(line for verdict in self.verdicts for line in verdict.lines)
        return LoadReport(
            scheduled=not reason,
            reason=reason,
            schedule=printable(first.evidence.report.chosen),
            operators=max(len(bundle.program.graph) for bundle in self.bundles),
            lanes=max(bundle.schedule.lanes for bundle in self.bundles),
            verdict=next((str(item) for item in GRAVEST_FIRST if item in found), ""),
            differences=tuple(lines),
            notes=_unchecked(first.key.device.kind) if not reason else (),
        )


def _unchecked(kind: str) -> tuple[str, ...]:
    """What a schedule on such a device runs without here."""
    if kind != "cuda":
        return ()
    from autosched.runtime.cuda.load import unaudited

    return (words,) if (words := unaudited()) else ()


def _warn(model: torch.nn.Module, reason: str) -> None:
    warn_caller(f"autosched runs {type(model).__name__} without a schedule: {reason}", FallbackWarning)


def _open(
    source: str | os.PathLike[str] | bytes,
    model: torch.nn.Module,
    facts: _Facts,
    *,
    pad: bool,
    max_shapes: int,
    frozen: bool,
    in_place: bool,
) -> ShapeTable:
    """All that is settled before anything runs."""
    label = facts.label
    facts.bundles = read_bundles(source)
    kind = facts.bundles[0].key.device.kind
    _require_weights(model, facts)
    device = _home(model, kind)
    if device.type != kind and kind in ("cpu", "cuda"):
        raise IncompatibleArtifact(
            label, [f"device: tuned on {kind}, but the model is on {device}; move the model, or tune for {device.type}"], what_to_do=""
        )
    if kind == "cpu":
        _ready_code(facts.bundles)
    host = _host_keys(kind, device, label)
    facts.verdicts = [check_bundle(bundle, *host, model) for bundle in facts.bundles]
    facts.bundles = [for_engine(bundle, host[1].engine) for bundle in facts.bundles]
    # Before the model is run to compare: a batch norm in training mode would change its statistics.
    if training := part_in_training(model):
        raise IncompatibleArtifact(
            label, [f"mode: tuned in eval mode, but {training} is in training mode; call model.eval() before load()"], what_to_do=""
        )
    fitting = [verdict.compatibility is not Compatibility.INCOMPATIBLE for verdict in facts.verdicts]
    if not any(fitting) or (facts.strict and not all(fitting)):
        differences = facts.verdicts[fitting.index(False)].lines
        wrapper, inner = wrapped_in(model)
        if wrapper:
            # Every parameter has another name then, which a line for each would hide.
            differences = (f"model: it is wrapped by {wrapper}; give load() the module itself, model.{inner}", *differences)
        elif part := _part_that_fits(facts.bundles[fitting.index(False)], host, model):
            differences = (f"model: it is larger than the tuned one, which its part may be; give load() that, model.{part}", *differences)
        elif part := _compiled_part(model):
            line = f"model: torch.compile has wrapped its part {part}, whose weights have other names then; {part}.compile() leaves them"
            differences = (line, *differences)
        raise IncompatibleArtifact(label, differences)
    padding = _padding(model, facts) if pad else None
    binder = Binder(model, device, label, frozen=frozen, overwrites=in_place, padded=padding is not None)
    slots: list[Slot] = []
    for place, (bundle, verdict, fits) in enumerate(zip(facts.bundles, facts.verdicts, fitting, strict=True)):
        slot = Slot(bundle.program, _Preparer(binder, bundle, place, padding, label))
        if not fits:
            slot.refused = f"the schedule does not fit here: {'; '.join(verdict.lines)}"
        slots.append(slot)
    return ShapeTable(slots, device, max_shapes=max_shapes, padding=padding, orders=KeyOrders(model))


def _require_weights(model: torch.nn.Module, facts: _Facts) -> None:
    """Whole and in memory, which a line for each difference from the tuned ones, or an operator that fails, would not say."""
    line = ""
    if spread := spread_over_processes(model):
        line = f"{spread}, which several processes share; a schedule runs in one process. Give load() a model that is not sharded"
    elif name := _without_values(model, facts.bundles):
        line = (
            f"weight {name} is on the meta device, which holds no values; give load() the model with its weights in memory, not offloaded"
        )
    if line:
        raise IncompatibleArtifact(facts.label, [f"model: {line}"], what_to_do="")


def _without_values(model: torch.nn.Module, bundles: Sequence[Bundle]) -> str:
    """The first weight that a schedule reads and that has no values, or the first of all if the model has none anywhere."""
    read = {binding.name for bundle in bundles for binding in bundle.program.bindings if binding.source is not ConstantSource.LITERAL}
    nowhere = _home(model, "").type == "meta"
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return next((name for name, tensor in tensors if tensor.is_meta and (nowhere or name in read)), "")


def _part_that_fits(bundle: Bundle, host: tuple[DeviceKey, SoftwareKey], model: torch.nn.Module) -> str:
    """Where in ``model`` a module has the parameters of a bundle that has any: libraries keep a model within one of theirs."""
    if not any(binding.source is not ConstantSource.LITERAL for binding in bundle.program.bindings):
        return ""
    if check_bundle(bundle, *host).compatibility is Compatibility.INCOMPATIBLE:
        return ""
    parts = ((name, module) for name, module in model.named_modules() if name)
    return next((name for name, part in parts if not any(map(_is_grave, differences_of(bundle.program, part)))), "")


def _is_grave(difference: Difference) -> bool:
    return difference.compatibility is Compatibility.INCOMPATIBLE


def _compiled_part(model: torch.nn.Module) -> str:
    return next((f"model.{name}" for name, module in model.named_modules() if name and wrapped_in(module)[0] == "torch.compile"), "")


def _ready_code(bundles: Sequence[Bundle]) -> None:
    """Build the C++ of ours that a schedule was tuned with, if it is not there and can be: once on a machine, some ten seconds.

    Before the verdict, which says what could not be had, and why.
    """
    if any(bundle.key.software.engine is Engine.NATIVE for bundle in bundles) and native_library() is None and not obstacle():
        build_native()
    if any(variant in WAYS and WAYS[variant].wanted() for bundle in bundles for variant in bundle.schedule.variant):
        kernel_library()


def _padding(model: torch.nn.Module, facts: _Facts) -> Padding | None:
    programs = [bundle.program for bundle in facts.bundles]
    buckets = find_buckets(programs)
    if not isinstance(buckets, str):
        return Padding(programs, buckets, model, facts.label)
    if facts.strict:
        raise IncompatibleArtifact(facts.label, [f"padding: {buckets}"])
    _warn(model, f"calls of other shapes cannot be padded: {buckets}")
    return None


class _Preparer:
    """Prepares one shape; whatever goes wrong is an error of autosched's own."""

    def __init__(self, binder: Binder, bundle: Bundle, place: int, padding: Padding | None, label: str) -> None:
        self._binder = binder
        self._bundle = bundle
        self._place = place
        self._padding = padding
        self._label = label

    def __call__(self) -> Prepared:
        try:
            prepared = self._binder.prepare(self._bundle)
            if self._padding is not None:
                self._padding.settle(self._place, prepared)
        except (UnsupportedGraph, InputMismatch) as error:
            raise IncompatibleArtifact(self._label, [printable(str(error))]) from error
        except UnwatchableModel as error:
            raise IncompatibleArtifact(self._label, [f"model: {printable(str(error))}"], what_to_do="") from error
        except AutoschedError:
            raise
        except Exception as error:
            let_through(error)
            reason = f"{type(error).__name__}: {printable(str(error))}"
            lines = [f"its schedule cannot run on this model here: {reason}"]
            if lacks_memory(error):
                raise IncompatibleArtifact(self._label, lines, what_to_do=ROOM) from error
            if apart := _apart(self._binder.model):
                raise IncompatibleArtifact(self._label, [*lines, apart], what_to_do="Move the model to one device.") from error
            raise IncompatibleArtifact(self._label, lines) from error
        return prepared


def _apart(model: torch.nn.Module) -> str:
    """Where the weights are, if on several devices; no obstacle by itself, since the schedule may not read those elsewhere."""
    devices = dict.fromkeys(str(tensor.device) for tensor in (*model.parameters(), *model.buffers()))
    return f"device: the model's weights are on {' and '.join(devices)}; a schedule runs on one device" if len(devices) > 1 else ""


def _warm(table: ShapeTable, model: torch.nn.Module, facts: _Facts) -> None:
    """Prepare what there is room for. A shape that fails is refused; if all fail, the first reason is raised."""
    first: AutoschedError | None = None
    for slot in [slot for slot in table.slots if not slot.refused][: table.max_shapes]:
        try:
            table.warm(slot)
        except AutoschedError as error:
            if facts.strict:
                raise
            if isinstance(error, ChangedMeanwhile | InAnotherMode):
                # By another thread, which puts new weights in place, say: the next call compares again.
                continue
            # The next one needs the memory.
            empty_frames(error)
            first = first or error
            slot.refused = str(error)
    left = [slot for slot in table.slots if not slot.refused]
    if first is not None:
        if not left:
            raise first
        _warn(model, f"one of {len(table.slots)} shapes has no schedule: {first}")
    if table.padding is not None and table.padding.refused:
        if facts.strict:
            raise IncompatibleArtifact(facts.label, [table.padding.refused])
        _warn(model, f"calls of other shapes are not padded: {table.padding.refused}")


def _home(model: torch.nn.Module, kind: str) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cuda", current_index()) if kind == "cuda" else torch.device("cpu")


def _host_keys(kind: str, device: torch.device, label: str) -> tuple[DeviceKey, SoftwareKey]:
    if kind == "cpu":
        return cpu_device_key(), software_key()
    if kind == "cuda":
        from autosched.runtime.cuda.key import cuda_device_key, cuda_software_key

        index = device.index or 0
        return cuda_device_key(index), cuda_software_key(index)
    raise IncompatibleArtifact(label, [f"device: tuned on {printable(kind)!r}, which this version does not run"])
