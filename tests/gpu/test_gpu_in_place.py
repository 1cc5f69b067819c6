"""Random graphs of real operators that overwrite their inputs, captured: one stream's bits, whoever is late, and a sound audit."""

from __future__ import annotations

import random

import pytest

from autosched.runtime.in_place import granted
from autosched.runtime.plan import make_plan
from tests.conformance.graphs import random_placement
from tests.conformance.stateful_programs import random_stateful_program
from tests.gpu.gpu_rig import Rig, rehearsing

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("block", range(3))
def test_random_graphs_that_overwrite_their_inputs(block: int) -> None:
    """In place, in every capture, what the same operators make that overwrite nothing; held back by lane, so that a race would show."""
    overwritten = 0
    for seed in range(20 * block, 20 * block + (9 if rehearsing() else 20)):
        rng = random.Random(seed)
        program, constants = random_stateful_program(rng, rng.randint(6, 24))
        rig = Rig(program, constants)
        schedule = random_placement(rng, program.graph, 1 + seed % 3)
        plan = make_plan(program.graph, schedule)
        chains = granted(program, plan)
        overwritten += len(chains)
        rig.assert_sound_in_place(plan, chains, seed)
        rig.close()
    assert overwritten > 0
    rig.backend.release_cached()
