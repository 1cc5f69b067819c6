"""A plan whose operators overwrite what the program changes, where the plan itself shows that nobody can see the difference.

The graph stays as it is: a pure function. Here it is decided, for one plan, which of its write-backs run in place (``core.in_place`` says
which may): every operator that reads the old contents must have finished, by the order that the plan enforces, before the operator that
overwrites them starts. Whoever reads the new contents waits for that operator already, since it makes the value that they read. Where
this does not hold the write-back is copied as ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch

from autosched.core.errors import UnsupportedGraph
from autosched.core.in_place import Chain, Link, chains_of, is_copy, others_using, overwriting
from autosched.core.program import Call, Program, Ref
from autosched.runtime.calls import Kernel, Slots, compile_call
from autosched.runtime.instructions import Same, carrying, carrying_all
from autosched.runtime.kernels import Begun, BoundProgram, compile_operator
from autosched.runtime.plan import Plan

# These fill a part of a tensor: the part as a view is copied to.
_PARTS = {
    "aten::diagonal_scatter.default": "aten::diagonal.default",
    "aten::select_scatter.default": "aten::select.int",
    "aten::slice_scatter.default": "aten::slice.Tensor",
}


def granted(program: Program, plan: Plan, barred: Collection[int] = ()) -> tuple[Chain, ...]:
    """The write-backs that ``plan`` may do in place.

    Args:
        plan: of the program's graph.
        barred: of ``program.writes``, by place: those where the model itself puts another tensor in the place of the old one, which
            somebody may hold.
    """
    found = [chain for chain in chains_of(program) if chain.write not in barred]
    if not found:
        return ()
    before = finished_before(plan)
    variants = {step.operator: step.variant for step in plan.steps}
    graph = program.graph

    def fits(chain: Chain) -> bool:
        for link in chain.links:
            # What a compiler made of an operator's calls makes a tensor of its own.
            if variants[link.operator] or in_place_form(graph.operators[link.operator].calls[link.call]) is None:
                return False
            needed = sum(1 << other for other in others_using(graph, link))
            if any(needed & ~before[writer] for writer in overwriting(graph, link)):
                return False
        return True

    return tuple(chain for chain in found if fits(chain))


def finished_before(plan: Plan) -> dict[int, int]:
    """For each operator, a bit mask of those that have finished when it starts: by the order of its lane and by waits, nothing else."""
    known: dict[int, int] = {}
    of_lane: dict[int, int] = {}
    for step in plan.steps:
        mask = of_lane.get(step.lane, 0)
        for producer in step.waits:
            mask |= known[producer] | 1 << producer
        known[step.operator] = mask
        of_lane[step.lane] = mask | 1 << step.operator
    return known


def in_place_form(call: Call) -> tuple[Call, ...] | None:
    """The calls, one or a view and a copy into it, that do in place what ``call`` does; None where this PyTorch has none.

    None at all for a copy that others overwrite: they overwrite what it would have copied.
    """
    if is_copy(call):
        return ()
    name, _, overload = call.target.rpartition(".")
    if (part := _PARTS.get(call.target)) is not None:
        if len(call.args) < 2 or not isinstance(call.args[1], Ref):
            return None
        view = Call(part, (call.args[0], *call.args[2:]), call.kwargs, call.outputs)
        return view, Call("aten::copy_.default", (Ref(call.outputs[0]), call.args[1]), (), call.outputs)
    packet = getattr(torch.ops.aten, f"{name.partition('::')[2]}_", None)
    if packet is None or overload not in packet.overloads():
        return None
    return (Call(f"{name}_.{overload}", call.args, call.kwargs, call.outputs),)


def first_of_lanes(plan: Plan, chains: Sequence[Chain]) -> frozenset[int]:
    """Of each lane, the operator that is the first to overwrite something."""
    links = {link.operator for chain in chains for link in chain.links}
    first: dict[int, int] = {}
    for step in plan.steps:
        if step.operator in links:
            first.setdefault(step.lane, step.operator)
    return frozenset(first.values())


def in_place(
    bound: BoundProgram,
    chains: Sequence[Chain],
    begun: Begun | None = None,
    marking: Collection[int] = (),
    adapt: Callable[[BoundProgram], BoundProgram] = lambda made: made,
) -> BoundProgram:
    """``bound`` with ``chains`` done in place: a run then changes the inputs that they begin with.

    Args:
        chains: granted to the plan that it is run under.
        begun: kept with the program.
        marking: operators that set it before they overwrite anything.
        adapt: what is done to every bound program; only of the operators that are made anew here.
    """
    if not chains:
        return bound
    graph, constants = bound.program.graph, bound.constants
    forms: dict[int, dict[int, Link]] = {}
    for chain in chains:
        for link in chain.links:
            forms.setdefault(link.operator, {})[link.call] = link
    kernels = list(bound.kernels)
    for index, links in forms.items():
        calls = graph.operators[index].calls
        instead = {place: _kernel(calls[place], bound.device) for place in links}
        kernels[index] = compile_operator(graph.operators[index], bound.program, bound.device, instead)
        if begun is not None and index in marking:
            # Until the operator has made its value, that slot is free.
            slot = links[min(links)].after
            constants = [begun.flag if value == slot else item for value, item in enumerate(constants)]
            mark = compile_call(Call("aten::fill_.Scalar", (Ref(slot), True), (), (-1,)), bound.device)
            kernels[index] = _together([mark, kernels[index]])
    made = dataclasses.replace(bound, kernels=tuple(kernels), constants=constants, in_place=tuple(chains), begun=begun, otherwise=bound)
    adapted = adapt(made).kernels
    chosen = tuple(adapted[index] if index in forms else kernel for index, kernel in enumerate(bound.kernels))
    return dataclasses.replace(made, kernels=chosen)


def homes_of(chains: Sequence[Chain]) -> frozenset[int]:
    """The storages whose contents lie in an input's memory when ``chains`` are done in place."""
    return frozenset(link.after for chain in chains for link in chain.links)


def _kernel(call: Call, device: torch.device) -> Kernel:
    form = in_place_form(call)
    if form is None:
        raise UnsupportedGraph(f"operator {call.target!r} has no in-place form in torch {torch.__version__}; tune again with this version.")
    steps = [compile_call(item, device) for item in form]
    first = call.args[0]
    assert isinstance(first, Ref)
    before, after = first.value, call.outputs[0]
    if len(steps) == 1:
        return steps[0]

    def whole(slots: Slots) -> None:
        # Until now it held the part.
        slots[after] = slots[before]

    return _together([*steps, carrying(whole, [Same(after, before)])])


def _together(steps: Sequence[Kernel]) -> Kernel:
    def run(slots: Slots) -> None:
        for step in steps:
            step(slots)

    return carrying_all(run, steps)
