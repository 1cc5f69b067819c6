"""The device's costs between operators, on the double of streams with a launch and a cross-lane latency of its own."""

from __future__ import annotations

import pytest

from autosched.device.cuda.limits import measure_costs
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda.graph import GraphCapturer
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_cuda_values import FakeCapture
from tests.conformance.fake_graphs import diamond
from tests.conformance.fake_program import FakeProgram

FIRST_US, EACH_US = 40.0, 2.0


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
