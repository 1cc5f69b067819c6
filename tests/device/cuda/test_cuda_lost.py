"""A device that is lost while something is measured: whoever was at work is blamed, in whatever words the error comes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autosched.core.schedule import make_schedule, sequential
from autosched.device.cuda import lost
from autosched.device.cuda.measure import CudaMeasurer
from autosched.device.cuda.service import Bench, CudaService
from autosched.device.worker_messages import Answer, OpenRequest, PairedRequest, RegionAnswer, RegionsRequest
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.inductor.common import Refused
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_cuda_values import FakeCapture
from tests.conformance.fake_graphs import diamond
from tests.conformance.fake_program import FakeProgram

ILLEGAL = "CUDA error: an illegal memory access was encountered"


class Ended(BaseException):
    """In the place of the end of a process."""


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the board shows, one after the other."""

    def end(words: str) -> None:
        raise Ended(words)

    monkeypatch.setattr(lost, "end_process", end)
    return []


def opened(cuda: FakeCuda, beats: list[int]) -> tuple[CudaService, CudaMeasurer]:
    graph = diamond(3, 2)
    program = FakeProgram(cuda, graph)
    measurer = CudaMeasurer(GraphCapturer(cuda), program, graph, program.inputs(1), beat=beats.append)
    bench = Bench(measurer, program.inputs(1), lambda tensors: [], program.inputs)
    service = CudaService(lambda request: bench, lambda settings: None, beats.append)
    assert list(service.handle(OpenRequest("", "", 0))) == []
    return service, measurer


def test_a_variant_whose_trial_loses_the_device_is_blamed_and_not_those_that_come_after(beats: list[int]) -> None:
    """Its trial says in words what went wrong, as for a variant that cannot be had here."""
    cuda = FakeCuda()
    service, measurer = opened(cuda, beats)

    class Regions:
        def variants(self, operator: int) -> tuple[int, ...]:
            return (0, 1)

        def kernel(self, operator: int, width: int, variant: int, bound: object = None) -> object:
            if operator == 2:
                cuda.lost = ILLEGAL
            return Refused(f"it does not run: {cuda.lost}") if cuda.lost else SimpleNamespace()

    measurer.variants.regions = Regions()  # type: ignore[assignment]
    answers: list[Answer] = []
    with pytest.raises(Ended, match="illegal memory access"):
        answers.extend(service.handle(RegionsRequest(1, 1, (), None)))
    assert beats[-1] == 2
    assert answers == [RegionAnswer(0, ""), RegionAnswer(1, "")]


class LosingLater(FakeCuda):
    """A graph that was captured with ``at`` others before it runs once, and loses the device when it runs again."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.graphs: list[FakeCapture] = []

    def replay(self, graph: FakeCapture) -> None:
        if graph in self.graphs and self.graphs.index(graph) == self.at:
            self.lost = ILLEGAL
        self.graphs.append(graph)
        super().replay(graph)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_schedule_that_runs_once_and_then_loses_the_device_is_blamed_itself(beats: list[int], at: int) -> None:
    service, measurer = opened(LosingLater(at), beats)
    graph = measurer.graph
    lanes = [[0] * len(graph), [index % 2 for index in range(len(graph))], [index % 3 for index in range(len(graph))]]
    schedules = [sequential(graph), *(make_schedule(graph, range(len(graph)), row) for row in lanes[1:])]
    with pytest.raises(Ended, match="illegal memory access"):
        list(service.handle(PairedRequest(tuple(schedules), 3, 0)))
    assert beats[-1] == at
