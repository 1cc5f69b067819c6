"""Two hundred random graphs of real operators, with views, in-place changes and several outputs: every schedule has one stream's bits."""

from __future__ import annotations

import random

import pytest

from autosched.runtime.cuda.audit import audit_graph
from autosched.runtime.cuda.lanes import CaptureOptions
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.plan import FreeRule, make_plan
from tests.conformance.graphs import random_placement, random_program
from tests.gpu.gpu_rig import Rig, rehearsing

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("block", range(10))
def test_random_graphs(block: int) -> None:
    for seed in range(20 * block, 20 * block + (2 if rehearsing() else 20)):
        rng = random.Random(seed)
        program, constants = random_program(rng, rng.randint(6, 40))
        rig = Rig(program, constants)
        schedule = random_placement(rng, program.graph, rng.randint(2, 5), extra_edges=rng.randint(0, 2))
        # Without frees nothing new can go wrong that a few graphs would not show; the time is for graphs.
        for rule in (FreeRule.VECTOR_CLOCK, FreeRule.HOLD_ALL) if seed % 5 == 0 else (FreeRule.VECTOR_CLOCK,):
            plan = make_plan(program.graph, schedule, rule)
            # Every operator of one lane a little late: a missing edge would show.
            late = rng.randrange(schedule.lane_slots)
            delays = {operator: 30.0 for operator in schedule.order if schedule.lane[operator] == late}
            options = CaptureOptions(observe=rig.reader is not None)
            for chosen in (options, CaptureOptions(delays=delays)):
                runner = rig.capturer.capture(rig.bound, plan, rig.measurer.static, graph=program.graph, options=chosen)
                assert isinstance(runner, GraphRunner), (seed, runner)
                for turn in range(2):
                    inputs = rig.inputs(1000 + turn)
                    assert rig.backend.same(runner(inputs), rig.measurer.reference(inputs)), (seed, rule, chosen)
                if runner.captured is not None:
                    assert audit_graph(program.graph, plan, runner.captured).problems == (), seed
                runner.close()
        rig.close()
    rig.backend.release_cached()
