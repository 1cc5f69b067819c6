"""Operators in the variants a schedule asks for, each run once before anything captures it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from autosched.core.graph import OpGraph
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import sequential
from autosched.core.variants import Variant
from autosched.runtime.calls import Kernel
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.lanes import Launchable, Slots
from autosched.runtime.in_place import granted, in_place
from autosched.runtime.inductor.common import Refused
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.plan import Plan, make_plan
from autosched.runtime.regions.library import RegionLibrary


class CapturedVariants:
    """The kernels of one program by operator and variant.

    Args:
        regions: ``None`` where every operator runs call by call.
        values: slots with what operators read, for the first call of a variant: kernels are loaded then, which a capture does not
            survive.

    Write-backs are done in place as ``CpuMeasurer`` does them: where a second replay leaves what the first one did.
    """

    def __init__(
        self,
        capturer: GraphCapturer,
        program: Launchable,
        graph: OpGraph,
        regions: RegionLibrary | None,
        values: Callable[[Sequence[int]], Slots],
    ) -> None:
        self.regions = regions
        self._capturer = capturer
        self._program = program
        self._graph = graph
        self._values = values
        self._warm: dict[tuple[int, int], Kernel] = {}
        self._in_order = self._in_place(make_plan(graph, sequential(graph)), program).kernels

    def kernel(self, operator: int, variant: int) -> Kernel | Failure:
        """One operator in one variant, ready to be captured."""
        if variant == Variant.CALLS:
            return self._in_order[operator]
        if self.regions is None or variant not in self.regions.variants(operator):
            return Failure(FailureKind.UNAVAILABLE, f"operator {self._graph.operators[operator].name} has no variant {variant}")
        if (operator, variant) not in self._warm:
            made = self.regions.kernel(operator, 1, variant)
            if isinstance(made, Refused):
                return Failure(FailureKind.UNAVAILABLE, made.reason)
            backend = self._capturer.backend
            slots = self._values([operator])
            with torch.inference_mode(), backend.on(self._capturer.streams.named("warm-up")):
                made(slots)
            backend.synchronize()
            self._warm[operator, variant] = made
        return self._warm[operator, variant]

    def program(self, plan: Plan) -> Launchable:
        """The program with each operator in its variant of ``plan``, call by call where that cannot be had; in place where ``plan`` may."""
        return self._in_place(plan, self.pure(plan))

    def pure(self, plan: Plan) -> Launchable:
        """As :meth:`program`, with nothing done in place: what may run in another order than that of ``plan``."""
        bound = self._program
        variants = {step.operator: step.variant for step in plan.steps}
        if not any(variants.values()) or not isinstance(bound, BoundProgram):
            return bound
        chosen = [
            self.kernel(operator, variants[operator]) if variants.get(operator) else bound.kernels[operator]
            for operator in range(len(bound.kernels))
        ]
        pairs = zip(chosen, bound.kernels, strict=True)
        return dataclasses.replace(bound, kernels=tuple(calls if isinstance(made, Failure) else made for made, calls in pairs))

    @staticmethod
    def _in_place(plan: Plan, program: Launchable) -> Launchable:
        if not isinstance(program, BoundProgram):
            return program
        return in_place(program, [chain for chain in granted(program.program, plan) if chain.repeatable])
