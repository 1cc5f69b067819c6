"""What the original model answers on a few input sets: the yardstick of every numerical check."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched.core.errors import UnsupportedGraph
from autosched.core.program import Program, Ref
from autosched.runtime.attribute_tensors import AttributeTensors
from autosched.runtime.float32 import full_float32
from autosched.runtime.state import OtherBuffers, ask, copies_of, state_of
from autosched.runtime.telling_inputs import telling_inputs
from autosched.runtime.trees import flatten_inputs, output_tensors, unflatten_inputs

_log = logging.getLogger(__name__)

INPUT_SETS = 3


@dataclass(frozen=True)
class References:
    """The model's answers.

    Args:
        inputs: for each set, in the order of ``program.graph.inputs``.
        outputs: for each set, what the model makes of it, in the order of ``program.graph.outputs``.
        answer: the tensors of the model's answer to the first set, flattened.
    """

    inputs: tuple[tuple[torch.Tensor, ...], ...]
    outputs: tuple[tuple[torch.Tensor, ...], ...]
    answer: tuple[torch.Tensor, ...] = ()


class Yardstick:
    """The references of one model, in full float32. Programs that take the same inputs share them: it runs once for all lowerings."""

    def __init__(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, seed: int) -> None:
        self._model = model
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        self._seed = seed
        self._taken: dict[tuple[object, ...], References] = {}

    def of(self, program: Program) -> References:
        """The references for ``program``, a capture of the model; taken when first asked for."""
        form = _form(program)
        if form not in self._taken:
            with full_float32():
                self._taken[form] = take_references(self._model, program, self._args, self._kwargs, self._seed)
        return self._taken[form]


def take_references(
    model: torch.nn.Module, program: Program, args: Sequence[Any], kwargs: Mapping[str, Any] | None, seed: int
) -> References:
    """Run the model as it came on the example and on random inputs like it.

    A model that refuses random inputs (ids that must be sorted, say) is judged on the example alone.

    Raises:
        UnsupportedGraph: if it changes what the program says nothing of.
    """
    example = [*flatten_inputs(program, args, kwargs), *state_of(program, model)]
    inputs = [tuple(copies_of([tensor.detach() for tensor in example]))]
    others, attributes = OtherBuffers(program, model), AttributeTensors(model)
    first = answer_of(model, program, inputs[0])
    if others.changed():
        # Once may be a table that is made at the first call; twice is a state.
        first = answer_of(model, program, inputs[0])
        if name := others.changed():
            raise UnsupportedGraph(
                f"the model changes its buffer {name!r} at each call, which torch.export does not see; expected buffers that hold a tensor "
                "before the first call, and that forward() changes by PyTorch's operators."
            )
    attributes.note()
    outputs = [in_order(program, first)]
    for index in range(1, INPUT_SETS):
        home = example[0].device if example else "cpu"
        try:
            drawn, answer = telling_inputs(program, seed * 1009 + index, home, lambda tensors: answer_of(model, program, tensors))
        except Exception as error:  # whatever the user's model raises on inputs of ours is its own affair
            _log.warning("the model does not accept random inputs (%s); it is checked on the example inputs only", error)
            break
        inputs.append(tuple(drawn))
        outputs.append(in_order(program, answer))
        if named := attributes.state():
            raise UnsupportedGraph(
                f"each call leaves another tensor in the model's {named}, where another form of call may read it; expected "
                "buffers and outputs. Keep in a buffer what another call reads, or delete it at the end of forward() if none does."
            )
    returned = sum(isinstance(leaf, Ref) for leaf in program.output_leaves)
    return References(tuple(inputs), tuple(outputs), first[:returned])


def _form(program: Program) -> tuple[object, ...]:
    """All that decides what inputs a program gets, and in which order: equal for programs whose references are the same."""
    place = {value: position for position, value in enumerate(program.graph.inputs)}
    leaves = tuple(place[leaf.value] if isinstance(leaf, Ref) else repr(leaf) for leaf in program.input_leaves)
    drawn = tuple((program.graph.values[item.value].spec, item.low, item.high, item.mean, item.std) for item in program.inputs)
    state = tuple(binding.name for binding in program.state)
    made = {value: position for position, value in enumerate(program.graph.outputs)}
    order = tuple(made[value] for value in _made(program))
    return program.input_tree, leaves, tuple(place[item.value] for item in program.inputs), drawn, state, order


def _made(program: Program) -> list[int]:
    """Which output of the graph each tensor of :func:`answer_of` is."""
    returned = [leaf.value for leaf in program.output_leaves if isinstance(leaf, Ref)]
    return [*returned, *(item.value for item in program.writes)]


def in_order(program: Program, answer: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """An answer as the graph gives it: what the model returns twice, the graph returns once."""
    made = _made(program)
    if len(made) != len(answer):
        return tuple(answer)
    known = dict(zip(made, answer, strict=True))
    return tuple(known[value] for value in program.graph.outputs)


def answer_of(model: torch.nn.Module, program: Program, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors of the model's answer to ``tensors`` (of ``graph.inputs``), and then those that it has written back."""
    if program.writes:
        answer, written, _ = ask(program, model, tensors)
        return (*output_tensors(answer), *written)
    args, kwargs = unflatten_inputs(program, copies_of(tensors))
    with torch.inference_mode():
        return tuple(tensor.detach().clone() for tensor in output_tensors(model(*args, **kwargs)))
