"""Integers that a model refuses when they are drawn at random, and takes when all are one number: the corners of a box, in their order.

Whatever is measured or compared later runs on random inputs within the range of the example's (``core.program.InputSpec``). Layout models
look up the width of each box, one corner less the other, and numbers in any order make indices that no table has.
"""

from __future__ import annotations

import itertools
import logging

import torch

from autosched.capture.build import integer_range
from autosched.capture.draft import Draft
from autosched.core.from_outside import let_through

_log = logging.getLogger(__name__)

_SEED = 20_260
# The offsets of its bags are drawn in their order, by ``runtime.bag_offsets``.
_ORDERED = "embedding_bag"


def hold_inputs(draft: Draft) -> None:
    """Note in an observed draft the inputs that are to be held at one number (``Draft.held``), the fewest that will do.

    Only of a model on a CPU: on a GPU an index that does not exist costs the process its device.
    """
    drawn = _drawn(draft)
    if not drawn or draft.device.type != "cpu" or any(_ORDERED in node.kind for node in draft.nodes) or _takes(draft, drawn):
        return
    several = [(value,) for value in drawn] + ([tuple(drawn)] if len(drawn) > 1 else [])
    for values, last in itertools.product(several, (False, True)):
        held = {value: integer_range(draft.examples[value])[last] for value in values}
        if _takes(draft, drawn | {value: torch.full_like(drawn[value], number) for value, number in held.items()}):
            _log.info("%d of the inputs are drawn as one number each: the model refuses numbers in any order", len(held))
            draft.held = held
            return


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
