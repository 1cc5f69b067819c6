"""Packed weights, one packing for each width an operator runs at.

oneDNN may choose the layout of a packed weight for the number of threads at the time of packing. Run with another number, the
operator packs again at every call: GoogLeNet takes two to five times as long. Inductor's C++ templates do the same in plain tensors, and
with another number compute nonsense. So the prologue is evaluated once for each width, and a plan gets, for each operator, the packing of
the width it runs that operator at.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from autosched.core.in_place import Chain
from autosched.core.program import Call, Program
from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.in_place import in_place
from autosched.runtime.inductor.common import Refused
from autosched.runtime.kernels import BoundProgram, bind
from autosched.runtime.plan import Plan
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.thread_count import use_threads


def _unchanged(bound: BoundProgram) -> BoundProgram:
    return bound


class WidePrograms:
    """One program, bound for every width that is asked for. Constants that are the same at every width are shared.

    Args:
        program, constants: as for ``kernels.bind``; the constants are kept, because another width may be asked for later.
        adapt: applied to each bound program; tests use it to replace kernels.
        regions: where variants other than the operators' calls come from; without it every operator runs call by call.

    Raises:
        UnsupportedGraph, ArtifactCorrupt: by every method, as ``kernels.bind``.
    """

    def __init__(
        self,
        program: Program,
        constants: Mapping[int, torch.Tensor],
        adapt: Callable[[BoundProgram], BoundProgram] = _unchanged,
        regions: RegionLibrary | None = None,
    ) -> None:
        self.program = program
        self._constants = dict(constants)
        self._adapt = adapt
        self.regions = regions
        self._bound: dict[int, BoundProgram] = {}
        self._differing: set[int] = set()  # plain constants that are not the same at every width

    def at(self, width: int) -> BoundProgram:
        """The program with weights packed for ``width`` threads."""
        if width not in self._bound:
            before = torch.get_num_threads()
            use_threads(width)
            try:
                bound = bind(self.program, self._constants, "cpu")
            finally:
                use_threads(before)
            for other in self._bound.values():
                bound = dataclasses.replace(bound, constants=self._shared(bound.constants, other.constants))
                break
            self._bound[width] = self._adapt(bound)
        return self._bound[width]

    def _shared(self, constants: Slots, others: Slots) -> Slots:
        """Those of ``others`` where they are the same, else those of ``constants``."""
        shared: Slots = []
        for value, (ours, theirs) in enumerate(zip(constants, others, strict=True)):
            plain = _is_plain(ours) and _is_plain(theirs)
            # What a prologue of calls makes does not depend on threads; what a compiler makes may.
            if plain and self.program.source and not _same(ours, theirs):
                self._differing.add(value)
                plain = False
            shared.append(theirs if plain else ours)
        return shared

    def for_plan(self, plan: Plan) -> BoundProgram:
        """The program with every weight packed for the width at which ``plan`` runs the operator that reads it.

        A weight that operators of different widths read is packed for the first of them.
        """
        widths = Counter(step.width for step in plan.steps)
        most_common = widths.most_common(1)[0][0] if widths else 1
        bound = self.at(most_common)
        if len(widths) <= 1:
            return self._with_variants(bound, plan)
        for width in widths:
            # Which constants differ is known once every width is bound.
            self.at(width)
        constants = bound.constants.copy()
        decided: set[int] = set()
        for step in plan.steps:
            for value in self.packed_reads(step.operator, bound.constants):
                if value not in decided:
                    decided.add(value)
                    constants[value] = self.at(step.width).constants[value]
        kernels = bound.kernels
        if self.program.source:
            # Compiled kernels have their number of threads in them.
            width_of = {step.operator: step.width for step in plan.steps}
            kernels = tuple(self.at(width_of.get(index, most_common)).kernels[index] for index in range(len(kernels)))
        return self._with_variants(dataclasses.replace(bound, constants=constants, kernels=kernels), plan)

    def in_place(self, bound: BoundProgram, chains: Sequence[Chain]) -> BoundProgram:
        """As ``in_place.in_place``, of a program that this has bound."""
        return in_place(bound, chains, adapt=self._adapt)

    def kernel(self, operator: int, width: int, variant: int = 0) -> Kernel:
        """One operator at a width in a variant; its calls where that variant cannot be had."""
        made = self.regions.kernel(operator, width, variant, self.at(width)) if variant and self.regions is not None else None
        return self.at(width).kernels[operator] if made is None or isinstance(made, Refused) else made

    def _with_variants(self, bound: BoundProgram, plan: Plan) -> BoundProgram:
        return bound if self.regions is None else self.regions.apply(bound, plan)

    def packed_reads(self, operator: int, constants: Slots) -> tuple[int, ...]:
        """Values that ``operator`` reads and whose tensor in ``constants`` is packed for one width."""
        reads = self.program.graph.operators[operator].reads
        packed = (value for value in reads if isinstance(constants[value], torch.Tensor) and not _is_plain(constants[value]))
        return (*packed, *(value for value in reads if value in self._differing))


def bind_for(plan: Plan, program: Program, constants: Mapping[int, torch.Tensor], regions: RegionLibrary | None = None) -> BoundProgram:
    """``WidePrograms.for_plan``, of one plan and no other: no weight is packed for a width at which the plan does not read it.

    Raises:
        UnsupportedGraph, ArtifactCorrupt: as ``kernels.bind``.
    """
    widths = Counter(step.width for step in plan.steps)
    if program.source or len(widths) <= 1:
        return WidePrograms(program, constants, regions=regions).for_plan(plan)
    most_common = widths.most_common(1)[0][0]
    width_of = _widths_of_values(plan, program)
    before = torch.get_num_threads()
    try:
        bound = bind(program, constants, "cpu", lambda call: use_threads(_width_of(call, width_of, most_common)))
    finally:
        use_threads(before)
    return bound if regions is None else regions.apply(bound, plan)


def _widths_of_values(plan: Plan, program: Program) -> dict[int, int]:
    """The width of the first operator that reads a value, or reads what the prologue makes of it."""
    found: dict[int, int] = {}
    for step in plan.steps:
        for value in program.graph.operators[step.operator].reads:
            found.setdefault(value, step.width)
    for call in reversed(program.prologue):
        if (width := _width_of(call, found, 0)) > 0:
            for value in call.reads():
                found.setdefault(value, width)
    return found


def _width_of(call: Call, width_of: Mapping[int, int], otherwise: int) -> int:
    return next((width_of[value] for value in call.outputs if value in width_of), otherwise)


def _is_plain(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.layout is torch.strided


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if (ours.dtype, ours.shape, ours.stride()) != (theirs.dtype, theirs.shape, theirs.stride()):
        return False
    return ours.data_ptr() == theirs.data_ptr() or torch.equal(ours, theirs)
