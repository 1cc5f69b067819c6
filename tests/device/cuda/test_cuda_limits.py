"""The device's costs between operators, on the double of streams with a launch and a cross-lane latency of its own."""

from __future__ import annotations

import pytest

from autosched.device.cuda.limits import measure_costs
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda.graph import GraphCapturer
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_cuda_values import FakeCapture, FakeNode, FakeStream
from tests.conformance.fake_graphs import diamond
from tests.conformance.fake_program import FakeProgram

FIRST_US, EACH_US, MEETING_US = 40.0, 2.0, 0.7


class SlowLaunches(FakeCuda):
    """The first graph after the host has waited is launched late; every one costs the device a little."""

    idle = True

    def synchronize(self) -> None:
        super().synchronize()
        self.idle = True

    def replay(self, graph: FakeCapture) -> None:
        self._current.clock_us += (FIRST_US if self.idle else 0.0) + EACH_US
        self.idle = False
        super().replay(graph)


def test_what_a_launch_adds_is_what_it_adds_among_others() -> None:
    cuda = SlowLaunches()
    graph = diamond()
    program = FakeProgram(cuda, graph)
    measurer = CudaMeasurer(GraphCapturer(cuda), program, graph, program.inputs(1))
    costs = measure_costs(measurer)
    assert costs.fixed_us == pytest.approx(EACH_US)
    assert (costs.launch_gap_us, costs.cross_lane_us) == (0.0, 0.0)


class SlowMeetings(FakeCuda):
    """What depends on more than one other node, once the edges that say nothing new are gone, starts a little later."""

    def _add(self, stream: FakeStream, node: FakeNode) -> None:
        super()._add(stream, node)
        if len(node.dependencies) > 1:
            node.duration_us += MEETING_US


def test_a_dependency_across_lanes_costs_what_edges_that_order_something_cost() -> None:
    cuda = SlowMeetings()
    graph = diamond()
    program = FakeProgram(cuda, graph)
    measurer = CudaMeasurer(GraphCapturer(cuda), program, graph, program.inputs(1))
    assert measure_costs(measurer).cross_lane_us == pytest.approx(MEETING_US)
