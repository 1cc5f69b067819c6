"""Random inputs on which a model answers with numbers, so that there is something to compare.

A mask drawn at random may hide all there is from some query. What softmax makes of nothing is NaN in some of PyTorch's kernels and zero in
others (``nn.MultiheadAttention``'s fast path and ``scaled_dot_product_attention``), and no user of the model would ask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from autosched.core.from_outside import let_through
from autosched.core.program import InputSpec, Program
from autosched.runtime.kernels import random_inputs
from autosched.runtime.trees import output_tensors

T = TypeVar("T")


def telling_inputs(
    program: Program, seed: int, device: torch.device | str, answer: Callable[[list[torch.Tensor]], T]
) -> tuple[list[torch.Tensor], T]:
    """``random_inputs``, and what ``answer`` returns for them.

    Where that has a NaN, inputs of zeros and ones are tried with ones alone, then with zeros alone (some masks say what to keep, others
    what to hide); if none does better, it is the first after all.

    Args:
        answer: the model's; its tensors, in any nesting, are looked at.

    Raises:
        Exception: whatever ``answer`` raises for the inputs that are drawn first.
    """
    drawn = random_inputs(program, seed, device)
    first = answer(drawn)
    if _has_nan(first):
        for held in _with_masks_held(program):
            others = random_inputs(held, seed, device)
            try:
                other = answer(others)
            except Exception as error:
                let_through(error)
                continue  # the model's own affair: it was asked with masks that it was not written for
            if not _has_nan(other):
                return others, other
    return drawn, first


def _has_nan(answer: object) -> bool:
    # Four bits have no NaN, and other narrow formats cannot be asked in their own dtype.
    tensors = (item for item in output_tensors(answer) if item.dtype is not torch.float4_e2m1fn_x2)
    floating = (item for item in tensors if item.is_floating_point() or item.is_complex())
    return any(bool(torch.isnan(item if item.element_size() > 1 else item.to(torch.float32)).any()) for item in floating)


def _with_masks_held(program: Program) -> Iterator[Program]:
    if any(_is_mask(item) for item in program.inputs):
        for value in (1, 0):
            held = (dataclasses.replace(item, low=value, high=value) if _is_mask(item) else item for item in program.inputs)
            yield dataclasses.replace(program, inputs=tuple(held))


def _is_mask(item: InputSpec) -> bool:
    """Whether an input is drawn from zeros and ones; the range of one that is not of integers means nothing."""
    return (item.low, item.high) == (0, 1)
