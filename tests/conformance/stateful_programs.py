"""Random programs that change some of their inputs: chains of calls with in-place forms, and readers of every state between them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch

from autosched.core.graph import OpGraph
from autosched.core.program import Many, Program, Ref, WriteBack
from autosched.runtime.in_place import finished_before
from autosched.runtime.plan import Plan
from tests.conformance.graphs import Recorder, normals


def random_stateful_program(rng: random.Random, operators: int = 14) -> tuple[Program, dict[int, torch.Tensor]]:
    """An executable program on ``[4, 6]`` float32 tensors whose first two inputs are changed.

    Returns:
        The program, and the tensor of each of its constants by value index.
    """
    recorder = Recorder()
    normal = normals(rng)
    targets = [recorder.input(normal(4, 6)) for _ in range(2)]
    states = list(targets)
    rows = recorder.constant("rows", torch.tensor([2, 0]))
    pool = [*targets, recorder.input(normal(4, 6)), recorder.constant("weight", normal(4, 6))]
    while len(recorder.operators) < operators:
        pick, other = rng.choice(pool[-6:]), rng.choice(pool[-6:])
        which = rng.randrange(2)
        draw = rng.randrange(9)
        if draw == 0:
            part = recorder.run("aten::slice.Tensor", pick, 0, 1, 3)
            states[which] = recorder.run("aten::index_copy.default", states[which], 0, rows, part)
        elif draw == 1:
            part = recorder.run("aten::slice.Tensor", pick, 1, 2, 5)
            states[which] = recorder.run("aten::slice_scatter.default", states[which], part, 1, 2, 5)
        elif draw == 2:
            row = recorder.run("aten::select.int", pick, 0, rng.randrange(4))
            states[which] = recorder.run("aten::select_scatter.default", states[which], row, 0, rng.randrange(4))
        elif draw == 3:
            states[which] = recorder.run("aten::mul.Tensor", states[which], pick)
        elif draw == 4:
            states[which] = recorder.region(("aten::mul.Scalar", [states[which], 0.5]), ("aten::add.Tensor", [None, other]))
        elif draw == 5:
            # Of what is there now, whole or as a view.
            pool.append(recorder.run("aten::view.default", recorder.run("aten::view.default", states[which], Many((24,))), Many((4, 6))))
        elif draw == 6:
            pool.append(recorder.run("aten::add.Tensor", states[which], other))
        else:
            pool.append(recorder.run("aten::add.Tensor", pick, other))
        if rng.random() < 0.2:
            pool.append(states[which])
    changed = [place for place in range(2) if states[place] != targets[place]]
    outputs = [states[place] for place in changed] + [item for item in pool[-2:] if item.value not in recorder.inputs]
    unique = list(dict.fromkeys(item.value for item in outputs)) or [recorder.run("aten::add.Tensor", pool[0], pool[1]).value]
    program = recorder.build([Ref(value) for value in unique])
    writes = tuple(WriteBack(targets[place].value, states[place].value) for place in changed)
    return dataclasses.replace(program, writes=writes), recorder.constants()


def random_run_order(rng: random.Random, plan: Plan) -> list[int]:
    """An order in which the lanes of ``plan`` may come to finish their operators: theirs, and that of their waits, nothing else."""
    before = finished_before(plan)
    left = [step.operator for step in plan.steps]
    done = 0
    order: list[int] = []
    while left:
        ready = [operator for operator in left if not before[operator] & ~done]
        chosen = rng.choice(ready)
        left.remove(chosen)
        done |= 1 << chosen
        order.append(chosen)
    return order


def run_in(order: Sequence[int], bound: object, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a bound program whose operators run one after another in ``order``."""
    slots = bound.new_slots(inputs)  # type: ignore[attr-defined]
    with torch.inference_mode():
        for operator in order:
            bound.kernels[operator](slots)  # type: ignore[attr-defined]
    outputs: list[torch.Tensor] = bound.outputs(slots)  # type: ignore[attr-defined]
    return outputs


def readers(graph: OpGraph, value: int) -> list[int]:
    """The operators that read ``value`` itself."""
    return [operator.index for operator in graph.operators if value in operator.reads]
