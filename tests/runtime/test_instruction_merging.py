"""Shorter instructions do the same: random programs, carried out as they are and merged."""

from __future__ import annotations

import random

import torch

from autosched.core.program import Call, Many, Ref
from autosched.runtime.instruction_merging import merged
from autosched.runtime.instructions import Allocate, CallOperator, Instruction, Release, Same, Window, scratch
from tests.conformance.interpreter import interpret


def random_instructions(rng: random.Random) -> list[Instruction]:
    """As code that hands on some of what it makes: slot 0 is given, 1 to 4 are results, the rest its own; all of it is released."""
    made: list[Instruction] = []
    full = [0]  # slots of a tensor of four elements
    own: list[int] = []
    for number in range(rng.randrange(1, 7)):
        slot = scratch(number)
        of = rng.choice(full)
        made.append(
            rng.choice(
                [
                    CallOperator(Call("aten::add.Scalar", (Ref(of), number), (), (slot,))),
                    CallOperator(Call("aten::cat.default", (Many((Ref(of), Ref(of))),), (("dim", 0),), (slot,))),
                    Window(slot, of, (4,), (1,), 0),
                    Same(slot, of),
                ]
            )
        )
        full.append(slot)
        own.append(slot)
        if rng.random() < 0.3:
            made.append(Release(()))
    results = [result for result in (1, 2, 3, 4) if rng.random() < 0.6]
    for result in results:
        made.append(Same(result, rng.choice(full)))
        if rng.random() < 0.3:
            # A result that is read again where it is.
            made.append(CallOperator(Call("aten::neg.default", (Ref(result),), (), (result,))))
    rng.shuffle(own)
    half = rng.randrange(len(own) + 1)
    return [*made, Release(tuple(own[:half])), Release(tuple(own[half:]))]


def test_merged_instructions_make_the_same_results_and_leave_nothing() -> None:
    saved = 0
    for seed in range(300):
        given = random_instructions(random.Random(seed))
        shorter = merged(given)
        saved += len(given) - len(shorter)
        plain, short = {0: torch.arange(4.0)}, {0: torch.arange(4.0)}
        interpret(given, plain)
        interpret(shorter, short)
        assert plain.keys() == short.keys()
        assert all(torch.equal(plain[slot], short[slot]) for slot in plain)
    assert saved > 300


def test_memory_made_for_one_result_is_made_in_its_place() -> None:
    allocate, call = Allocate(scratch(0), (4,), (1,), "float32"), Call("aten::relu.out", (Ref(0),), (("out", Ref(scratch(0))),), (-1,))
    assert merged([allocate, CallOperator(call), Same(3, scratch(0)), Release((scratch(0), scratch(1)))]) == (
        Allocate(3, (4,), (1,), "float32"),
        CallOperator(Call("aten::relu.out", (Ref(0),), (("out", Ref(3)),), (-1,))),
        Release((scratch(1),)),
    )
