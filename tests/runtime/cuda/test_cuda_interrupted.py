"""What is no failure of a candidate (an interrupt, the time limit of a request) comes out of the executor, and leaves nothing behind."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autosched.core.from_outside import let_through
from autosched.core.graph import OpGraph
from autosched.core.schedule import sequential
from autosched.runtime.cuda import cudnn_fused
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.plan import make_plan
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_graphs import diamond
from tests.conformance.fake_program import FakeProgram


class Expired(RuntimeError):
    """A request has had its time: of a kind that operators raise, too."""


def expire(number: int, frame: object) -> None:
    raise Expired


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, expire)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    raise KeyboardInterrupt


def time_is_over() -> None:
    signal.raise_signal(signal.SIGUSR1)


def time_is_over_in_a_compiler() -> None:
    try:
        time_is_over()
    except Expired as error:
        raise ValueError("cannot compile") from error


COMES = {
    "interrupt": (interrupt, KeyboardInterrupt),
    "time limit": (time_is_over, Expired),
    "wrapped": (time_is_over_in_a_compiler, Expired),
}
coming = pytest.mark.parametrize(("come", "kind"), COMES.values(), ids=COMES.keys())
Come = Callable[[], None]


class Rig:
    """A double, a program on it, and a capturer that has no graph yet."""

    def __init__(self) -> None:
        self.graph: OpGraph = diamond(3, 2)
        self.cuda = FakeCuda()
        self.program = FakeProgram(self.cuda, self.graph)
        self.capturer = GraphCapturer(self.cuda, reader=self.cuda)
        self.inputs = self.program.inputs(1)

    def at_operator(self, place: int, come: Come) -> None:
        kernel = self.program.kernels[place]

        def then(slots: Any) -> None:
            kernel(slots)
            come()

        self.program.kernels = (*self.program.kernels[:place], then, *self.program.kernels[place + 1 :])

    def capture(self) -> object:
        return self.capturer.capture(self.program, make_plan(self.graph, sequential(self.graph)), self.inputs, graph=self.graph)

    def require_usable(self) -> None:
        """Nothing is captured any more, and the next capture is as good as the first."""
        assert self.cuda.live_graphs == 0
        assert not any(self.cuda.capturing(stream) for ring in self.cuda._rings.values() for stream in ring)
        assert not self.capturer.tainted
        self.program = FakeProgram(self.cuda, self.graph)
        runner = self.capture()
        assert isinstance(runner, GraphRunner)
        runner.close()


@coming
def test_what_comes_in_a_capture_comes_out_of_it_and_the_capture_is_undone(come: Come, kind: type[BaseException]) -> None:
    rig = Rig()
    before = rig.cuda.allocated_bytes()
    rig.at_operator(4, come)
    with pytest.raises(kind) as caught:
        rig.capture()
    # Memory of the pool is not held for as long as somebody looks at the exception.
    assert rig.cuda.allocated_bytes() == before
    if kind is Expired:
        with pytest.raises(Expired):
            let_through(caught.value)  # as whoever tuned or loaded will
    del caught
    gc.collect()
    assert rig.cuda.abandoned == 0  # ended in order
    rig.require_usable()


@coming
def test_what_comes_in_a_capture_when_another_stream_is_current_undoes_it_all_the_same(
    monkeypatch: pytest.MonkeyPatch, come: Come, kind: type[BaseException]
) -> None:
    """A stream is made current for a while, to ask whether it has joined."""
    rig = Rig()

    def capturing(stream: Any) -> bool:
        monkeypatch.undo()
        rig.cuda._current = stream
        come()
        return True

    monkeypatch.setattr(rig.cuda, "capturing", capturing)
    with pytest.raises(kind):
        rig.capture()
    assert rig.cuda.abandoned == 0
    rig.require_usable()


@pytest.mark.parametrize("asked", [False, True])
@coming
def test_what_comes_at_the_end_of_a_capture_leaves_no_stream_in_it(
    monkeypatch: pytest.MonkeyPatch, come: Come, kind: type[BaseException], asked: bool
) -> None:
    """``asked``: it comes when the capture has ended, and no graph of it has been handed out yet."""
    rig = Rig()
    end = rig.cuda.end_capture
    times = 0

    def end_capture(graph: Any) -> None:
        nonlocal times
        times += 1
        if times == 1 and not asked:
            come()
        end(graph)
        if times == 1:
            come()

    monkeypatch.setattr(rig.cuda, "end_capture", end_capture)
    with pytest.raises(kind):
        rig.capture()
    rig.require_usable()


@coming
@pytest.mark.parametrize("step", ["warm-up", "trial of the reader", "answers in that trial", "workspaces", "instantiating", "script"])
def test_what_comes_elsewhere_comes_out_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, come: Come, kind: type[BaseException], step: str
) -> None:
    rig = Rig()

    def then(*_: Any, **__: Any) -> Any:
        come()

    def script() -> None:
        rig.capturer.capture_script([rig.capturer.streams.lane(0)], rig.cuda.touch)

    plan = make_plan(rig.graph, sequential(rig.graph))
    warm_up: Callable[[], object] = lambda: rig.capturer.warm_up(rig.program, rig.inputs)  # noqa: E731
    steps: dict[str, tuple[str, Callable[[], object]]] = {
        "trial of the reader": ("read", warm_up),
        "answers in that trial": ("frontier", warm_up),
        "workspaces": ("multiply", lambda: rig.capturer.hold_workspaces(plan)),
        "instantiating": ("instantiate", rig.capture),
        "script": ("instantiate", script),
    }
    if step == "script":
        rig.capturer.scratch_pool()
    name, work = steps.get(step, ("", warm_up))
    with monkeypatch.context() as patch:
        if name:
            patch.setattr(rig.cuda, name, then)
        else:
            rig.at_operator(2, come)
        with pytest.raises(kind):
            work()
    rig.program = FakeProgram(rig.cuda, rig.graph)
    assert rig.capturer.warm_up(rig.program, rig.inputs) is None
    assert rig.capturer.can_observe


@coming
def test_what_comes_while_workspaces_are_added_leaves_those_that_are_used(
    monkeypatch: pytest.MonkeyPatch, come: Come, kind: type[BaseException]
) -> None:
    rig = Rig()
    plan = make_plan(rig.graph, sequential(rig.graph))
    assert rig.capturer.hold_workspaces(plan) is None
    before, multiply = rig.capturer._workspaces.pool, rig.cuda.multiply

    def then() -> bool:
        made = multiply()
        if rig.cuda.capturing(rig.cuda.current_stream()):
            come()
        return made

    with monkeypatch.context() as patch:
        patch.setattr(rig.cuda, "multiply", then)
        with pytest.raises(kind):
            rig.capturer.hold_workspaces(plan)
    assert rig.cuda.live_graphs == 1
    assert rig.capturer.hold_workspaces(plan) is None
    assert rig.capturer._workspaces.pool not in (None, before)
    rig.capturer.close()
    assert rig.cuda.live_graphs == 0


def test_a_time_limit_says_nothing_of_a_fused_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_fused, "_difference", lambda *_: time_is_over())
    operator: Any = type("Operator", (), {"reads": ()})()
    graph: Any = None
    with pytest.raises(Expired):
        cudnn_fused.difference(operator, graph, torch.device("cpu"))
