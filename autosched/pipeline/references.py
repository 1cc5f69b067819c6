"""What the original model answers on a few input sets: the yardstick of every numerical check."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched.core.program import Program, Ref
from autosched.runtime.telling_inputs import telling_inputs
from autosched.runtime.trees import flatten_inputs, output_tensors, unflatten_inputs

_log = logging.getLogger(__name__)

INPUT_SETS = 3


@dataclass(frozen=True)
class References:
    """``inputs[i]`` are flattened as ``program.graph.inputs``; ``outputs[i]`` are the tensors of the model's answer."""

    inputs: tuple[tuple[torch.Tensor, ...], ...]
    outputs: tuple[tuple[torch.Tensor, ...], ...]


class Yardstick:
    """The references of one model. Programs that take the same inputs share them, so that the model runs once for all its lowerings."""

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
            self._taken[form] = take_references(self._model, program, self._args, self._kwargs, self._seed)
        return self._taken[form]


def take_references(
    model: torch.nn.Module, program: Program, args: Sequence[Any], kwargs: Mapping[str, Any] | None, seed: int
) -> References:
    """Run the model as it came on the example and on random inputs like it.

    A model that refuses random inputs (ids that must be sorted, say) is judged on the example alone.
    """
    example = flatten_inputs(program, args, kwargs)
    inputs = [tuple(tensor.detach().clone() for tensor in example)]
    outputs = [_answer(model, program, inputs[0])]
    for index in range(1, INPUT_SETS):
        home = example[0].device if example else "cpu"
        try:
            drawn, answer = telling_inputs(program, seed * 1009 + index, home, lambda tensors: _answer(model, program, tensors))
        except Exception as error:  # whatever the user's model raises on inputs of ours is its own affair
            _log.warning("the model does not accept random inputs (%s); it is checked on the example inputs only", error)
            break
        inputs.append(tuple(drawn))
        outputs.append(answer)
    return References(tuple(inputs), tuple(outputs))


def _form(program: Program) -> tuple[object, ...]:
    """All that decides what inputs a program gets, and in which order: equal for programs whose references are the same."""
    place = {value: position for position, value in enumerate(program.graph.inputs)}
    leaves = tuple(place[leaf.value] if isinstance(leaf, Ref) else repr(leaf) for leaf in program.input_leaves)
    drawn = tuple((program.graph.values[item.value].spec, item.low, item.high, item.mean, item.std) for item in program.inputs)
    return program.input_tree, leaves, tuple(place[item.value] for item in program.inputs), drawn


def _answer(model: torch.nn.Module, program: Program, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    args, kwargs = unflatten_inputs(program, [tensor.clone() for tensor in tensors])
    with torch.inference_mode():
        return tuple(tensor.detach().clone() for tensor in output_tensors(model(*args, **kwargs)))
