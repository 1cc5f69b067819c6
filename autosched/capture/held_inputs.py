"""Integers that a model refuses when they are drawn at random, and takes when all are one number: the corners of a box, in their order.

Whatever is measured or compared later runs on random inputs within the range of the example's (``core.program.InputSpec``). Layout models
look up the width of each box, one corner less the other, and numbers in any order make indices that no table has.

And floats that a model makes indices of: click-through models take categories and measures as the columns of one matrix.
"""

from __future__ import annotations

import itertools
import logging
import math

import torch

from autosched.capture.build import integer_range
from autosched.capture.draft import Draft, Node
from autosched.core.from_outside import let_through

_log = logging.getLogger(__name__)

_SEED = 20_260
_LARGEST_INDEX = 2**31
# Deviations from the mean: one number in a million of a normal distribution is farther.
_FARTHEST = 5.0
# The offsets of its bags are drawn in their order, by ``runtime.bag_offsets``.
_ORDERED = "embedding_bag"


def hold_inputs(draft: Draft) -> None:
    """Note in an observed draft the fewest inputs that are to be drawn otherwise than like their example (``Draft.held``).

    Only of a model on a CPU: on a GPU an index that does not exist costs the process its device.
    """
    if draft.device.type == "cpu":
        _hold_integers(draft)
        _draw_whole(draft)


def _hold_integers(draft: Draft) -> None:
    drawn = _drawn(draft)
    if not drawn or any(_ORDERED in node.kind for node in draft.nodes) or _takes(draft, drawn):
        return
    several = [(value,) for value in drawn] + ([tuple(drawn)] if len(drawn) > 1 else [])
    for values, last in itertools.product(several, (False, True)):
        held = {value: integer_range(draft.examples[value])[last] for value in values}
        if _takes(draft, drawn | {value: torch.full_like(drawn[value], number) for value, number in held.items()}):
            _log.info("%d of the inputs are drawn as one number each: the model refuses numbers in any order", len(held))
            draft.held |= {value: (number, number) for value, number in held.items()}
            return


def _draw_whole(draft: Draft) -> None:
    """Of the inputs of floats those that the model refuses when they are drawn like the example: as whole numbers that it takes."""
    if not any(_makes_integers(draft, node) for node in draft.nodes):
        return
    generator = torch.Generator().manual_seed(_SEED)
    for value in draft.inputs:
        example = draft.examples[value]
        # What has few bits holds few whole numbers, and is no index.
        if value in draft.state or not example.is_floating_point() or example.element_size() < 2 or example.numel() == 0:
            continue
        deviation, mean = torch.std_mean(example.to(torch.float64), correction=0)
        if not math.isfinite(float(deviation)):
            continue
        drawn = torch.randn(example.shape, generator=generator, dtype=torch.float64, device="cpu") * deviation + mean
        # A few numbers may be indices by chance: then those as far out as any that are drawn.
        trials = (drawn, *(torch.full_like(drawn, float(mean + far * deviation)) for far in (-_FARTHEST, _FARTHEST)))
        if all(_takes(draft, {value: trial.to(example)}) for trial in trials):
            continue
        if (found := _whole_range(draft, value, generator)) is not None:
            _log.info("an input of floats is drawn as whole numbers from %d to %d: the model makes indices of it", *found)
            draft.held[value] = found


def _makes_integers(draft: Draft, node: Node) -> bool:
    """Whether floats become integers there, which may be indices; those of topk and its like are, whatever the floats."""
    read = (draft.specs.get(value) for value in node.reads())
    made = (draft.specs.get(value) for value in node.outputs)
    return (
        node.kind == "aten::_to_copy"
        and any(spec is not None and spec.dtype.startswith("int") for spec in made)
        and any(spec is not None and spec.dtype.startswith(("float", "bfloat")) for spec in read)
    )


def _whole_range(draft: Draft, value: int, generator: torch.Generator) -> tuple[int, int] | None:
    """The widest of some ranges of whole numbers, within the example's, both ends of which the model takes everywhere."""
    example = draft.examples[value].to(torch.float64)
    low, high = math.ceil(float(example.min())), math.floor(float(example.max()))
    while low <= high <= _LARGEST_INDEX:
        trials = (
            torch.full_like(example, low),
            torch.full_like(example, high),
            torch.randint(low, high + 1, example.shape, generator=generator, device="cpu"),
        )
        if all(_takes(draft, {value: trial.to(draft.examples[value])}) for trial in trials):
            return low, high
        if low == high:
            return None
        # One column's table may be smaller than another's.
        high = (low + high) // 2
    return None


def _drawn(draft: Draft) -> dict[int, torch.Tensor]:
    """Random integers for every input of integers that has more than one, within the range of the example's."""
    generator = torch.Generator().manual_seed(_SEED)
    made: dict[int, torch.Tensor] = {}
    for value in draft.inputs:
        example = draft.examples[value]
        # No index is an unsigned integer of more than eight bits.
        if example.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64) or example.numel() == 0:
            continue
        low, high = integer_range(example)
        if low < high:
            made[value] = torch.randint(low, high + 1, example.shape, generator=generator, device="cpu").to(example)
    return made


def _takes(draft: Draft, inputs: dict[int, torch.Tensor]) -> bool:
    """Whether the draft runs on the example, some of its inputs replaced."""
    trial = draft.copy()
    trial.examples |= inputs
    try:
        trial.observe()
    except Exception as error:
        let_through(error)
        return False
    return True
