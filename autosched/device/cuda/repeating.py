"""Operators that give other bits each time they run on the same inputs: comparing proves nothing of a schedule with one of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autosched.core.graph import Operator
from autosched.core.records import Failure, FailureKind
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda.streams import Tensor
from autosched.runtime.plan import Plan

# Sums in an order that changes give the same bits now and then.
_TURNS = 4


def unrepeatable(measurer: CudaMeasurer, inputs: Sequence[Tensor], plan: Plan) -> Operator | None:
    """The first operator, in the variants of ``plan``, whose results differ when it is run again alone on one stream.

    Operators that change a tensor they are given are run once, and not judged.
    """
    backend, program = measurer.backend, measurer.variants.pure(plan)
    slots = program.new_slots(inputs)
    with torch.inference_mode(), backend.on(measurer.capturer.streams.named("warm-up")):
        for operator, kernel in zip(measurer.graph.operators, program.kernels, strict=True):
            measurer.beat(operator.index)
            given = slots.copy()
            kernel(slots)
            made = [value for value in operator.writes if slots[value] is not None]
            for _ in range(0 if operator.mutates else _TURNS):
                again = given.copy()
                kernel(again)
                if not backend.same([slots[value] for value in made], [again[value] for value in made]):
                    return operator
    return None


def not_repeatable(operator: Operator) -> Failure:
    """What to say of a schedule with :func:`unrepeatable` ``operator``."""
    return Failure(
        FailureKind.MISMATCH,
        f"operator {operator.name} ({operator.kind}) gives other bits each time it is run on the same inputs, so that a race would not "
        "show; set torch.backends.cudnn.deterministic = True or torch.use_deterministic_algorithms(True), and tune again",
    )
