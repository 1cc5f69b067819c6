"""The lowering ``inductor`` and its other modes: what Inductor makes of the whole model, launch by launch, as operators.

The model is captured as for the lowering ``aten`` on a CPU, where Inductor itself folds and packs the constants, and as ``rewritten`` for a
GPU, where folding has been done before; then compiled here, on the device it is captured for (a GPU is touched by this process), frozen:
weights are laid out once, not at each call. The sequential schedule of these operators, none in another variant than its calls, runs the
launches of ``torch.compile`` in the order of ``torch.compile``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosched.capture.build import build_program, counted_in_place
from autosched.capture.draft import Draft
from autosched.capture.export import Captured, draft_of
from autosched.capture.rewrite import rewrite_draft
from autosched.capture.structure import structure_of
from autosched.core.graph import Operator, OpGraph, Value
from autosched.core.in_place import is_copy
from autosched.core.program import Program, Ref
from autosched.runtime.current_device import made_current
from autosched.runtime.float32 import full_float32, rounded_as
from autosched.runtime.inductor.bind import Recording, bound_of, first_difference, forms_of, record
from autosched.runtime.inductor.common import Refused
from autosched.runtime.inductor.modes import PLAIN, Mode
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.numerics import compare
from autosched.runtime.rounding import coarsest_of
from autosched.runtime.slot import read_by_stride
from autosched.runtime.thread_count import torch_threads

logger = logging.getLogger(__name__)

_SEED = 20_261  # of the inputs of the comparison with the source program
_FUSED = ("cpp_fused", "triton_poi_", "triton_red_", "triton_per_", "triton_for_")


def capture_inductor(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str = "",
    mode: Mode = PLAIN,
) -> Captured | Refused:
    """Capture ``model`` as the launches of Inductor's whole-graph code.

    Args:
        model, args, kwargs: as for ``export.capture``.
        target: device the code is for, as PyTorch names it; by default that of the example inputs. For a GPU this process uses it.
        mode: how Inductor compiles; by default with its own defaults, frozen.

    Returns:
        What was captured; its ``constants`` are the model's own tensors, as for any lowering. Or why there is nothing: no compiler, code
        that is not understood, launches that compute something else. Then another lowering is to be used.

    Raises:
        UnsupportedGraph: if the model cannot be captured in any lowering.
    """
    source, device = inductor_source(draft_of(model, args, kwargs), target=target)
    return lower_inductor(source, device, mode)


def inductor_source(draft: Draft, *, target: str = "", structure: str = "") -> tuple[Captured, torch.device]:
    """What :func:`lower_inductor` compiles for the model of ``draft`` (changed here), and the device it is for: ``target`` as there.

    ``structure``: ``structure_of(draft)``, if that is known.
    """
    structure = structure or structure_of(draft)
    device = torch.device(target) if target else draft.device
    rewrites = rewrite_draft(draft, device.type) if device.type != "cpu" else ()
    source, constants = build_program(draft, "rewritten" if rewrites else "aten")
    return Captured(source, constants, rewrites, structure), device


def lower_inductor(captured: Captured, device: torch.device | str, mode: Mode = PLAIN, *, threads: int | None = None) -> Captured | Refused:
    """The same model as the launches of Inductor's code.

    Args:
        captured: a program of ATen calls (no packed weights where ``device`` is a CPU).
        device: where it is compiled, and run once.
        mode: as in :func:`capture_inductor`.
        threads: on a CPU, most that an operator will have; by default as many as PyTorch's have now.
    """
    home = torch.device(device)
    if read_by_stride(captured.program):
        # A call with such an input laid out otherwise must not run on a copy of it, and launches do not tell.
        return Refused("the model reads the memory of an input by strides of its own (as_strided)")
    # Generated code launches on the current GPU.
    with made_current(home), contextlib.nullcontext() if threads is None else torch_threads(threads):
        for in_place in forms_of(captured.program):
            found = _lowered(captured, home, mode, in_place=in_place)
            if isinstance(found, Captured):
                return found
            logger.info("no inductor lowering%s: %s", " that overwrites what the model changes" if in_place else "", found.reason)
        return found


def _lowered(captured: Captured, home: torch.device, mode: Mode, *, in_place: bool) -> Captured | Refused:
    source = captured.program
    placed = {value: tensor.to(home) for value, tensor in captured.constants.items()}
    recording = record(source, placed, home, mode, in_place=in_place)
    if isinstance(recording, Refused):
        return recording
    if why := _other_width(source, placed, recording, home, mode, in_place=in_place):
        return Refused(why)
    program = _with_costs(recording.program)
    pairs = list(zip(source.bindings, program.bindings, strict=True))
    constants = {ours.value: captured.constants[theirs.value] for theirs, ours in pairs}
    if why := _disagreement(source, placed, recording, home, mode):
        return Refused(f"Inductor's launches compute something else than the model's operators: {why}")
    return Captured(program, constants, captured.rewrites, captured.structure)


def _other_width(
    source: Program, constants: Mapping[int, torch.Tensor], recording: Recording, device: torch.device, mode: Mode, *, in_place: bool
) -> str:
    """Why operators could not run on one thread as well, or an empty string.

    Lanes are threads of their own, so what was written for all threads must come in the same launches for one. What is compiled here is
    found in Inductor's cache by the process that measures. What was chosen by timing for all threads is taken for one as well.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return ""
    with torch_threads(1):
        narrow = record(source, constants, device, dataclasses.replace(mode, choices=recording.program.choices), in_place=in_place)
    if isinstance(narrow, Refused):
        return f"on one thread: {narrow.reason}"
    difference = first_difference(recording.program, narrow.program)
    return f"Inductor launches other kernels for {threads} threads than for one: {difference}" if difference else ""


def _disagreement(source: Program, constants: Mapping[int, torch.Tensor], recording: Recording, device: torch.device, mode: Mode) -> str:
    program = recording.program
    inputs = random_inputs(source, _SEED, device)
    by_calls, by_launches = bind(source, constants, device), bound_of(recording, source, constants, device)
    # Weights may be folded in one and not in the other, and then round to other numbers.
    rounding = rounded_as(device.type)
    with full_float32() if rounding is not None else contextlib.nullcontext():
        wanted = [item.clone() for item in by_calls.run(inputs)]
        got = dict(zip(program.graph.outputs, by_launches.run(inputs), strict=True))
    # Two outputs of the source may be one tensor here.
    leaves = zip(source.output_leaves, program.output_leaves, strict=True)
    order = {theirs.value: ours.value for theirs, ours in leaves if isinstance(theirs, Ref) and isinstance(ours, Ref)}
    places = [(place, order[value]) for place, value in enumerate(source.graph.outputs) if value in order]
    # Templates of convolutions and products keep the rounding that they were compiled with.
    rounded = rounding if mode.autotuned and program.choices else None
    # By what the launches tell, not the source: loading has no more to go by.
    known = dict(zip(program.graph.outputs, coarsest_of(program.graph), strict=True))
    coarsest = [known[value] for _, value in places]
    agreement = compare([got[value] for _, value in places], [wanted[place] for place, _ in places], rounded=rounded, coarsest=coarsest)
    return "" if agreement.within_tolerance else agreement.reason


def _with_costs(program: Program) -> Program:
    graph = program.graph
    operators = tuple(dataclasses.replace(item, flops=estimated_flops(item, graph.values)) for item in graph.operators)
    graph = OpGraph(operators, graph.values, graph.inputs, graph.outputs)
    return dataclasses.replace(program, graph=dataclasses.replace(graph, operators=counted_in_place(graph, program.writes)))


def estimated_flops(operator: Operator, values: Sequence[Value]) -> int:
    """Floating point operations of a launch, from the shapes it reads and writes: exact for plain convolutions and products, one for each
    element made otherwise. A product of views of larger buffers is estimated too high.
    """
    if any(is_copy(call) for call in operator.calls):
        return 0
    made = [values[value].spec for value in (*operator.writes, *operator.mutates)]
    read = [values[value].spec for value in operator.reads]
    elements = max((spec.elements for spec in made), default=0)
    title = operator.name
    if operator.mutates and title.startswith(_FUSED):
        # A place of a large buffer may be all that it fills.
        most = max((spec.elements for spec in read), default=elements)
        return sum(min(spec.elements, most) for spec in made)
    if elements == 0 or title.startswith(_FUSED):
        return sum(spec.elements for spec in made)
    if title.startswith("_mkl_linear") and len(read) >= 3:
        # (input, packed weight, weight): the shape of a packed weight is that of its memory.
        return 2 * elements * read[2].shape[-1]
    shaped = sorted((spec for spec in read if len(spec.shape) >= 2 and spec.elements), key=lambda spec: -spec.elements)
    if "conv" in title:
        weight = next((spec for spec in read[1:] if len(spec.shape) >= 3), None)
        return 2 * elements * weight.elements // weight.shape[0] if weight is not None else elements
    if "attention" in title and len(shaped) >= 3:
        # Two products: with the keys, and of what comes of that with the values.
        keys = shaped[1].shape[-2]
        return 4 * elements * keys
    if any(word in title for word in ("mm", "linear", "tem_fused")) and len(shaped) >= 2:
        batch = made[0].shape[0] if "bmm" in title else 1
        inner = math.sqrt(shaped[0].elements * shaped[1].elements / elements / max(batch, 1))
        return int(2 * elements * inner)
    return sum(spec.elements for spec in made)
