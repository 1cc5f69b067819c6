"""A driver whose answers about captured graphs are wrong is not believed: schedules are then tuned and served without the static audit."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from autosched.core.records import Failure, FailureKind
from autosched.runtime.cuda import load as cuda_load
from autosched.runtime.cuda.captured import NodeKind
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.lanes import CaptureOptions
from autosched.runtime.cuda.load import prepare_runner, unaudited
from autosched.runtime.plan import make_plan
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_graphs import diamond, random_schedule
from tests.conformance.fake_program import FakeProgram

Change = Callable[..., Any]


class Reader:
    """The double's answers, some of them changed: ``changes["read"](answer, graph)`` is given instead of what ``read(graph)`` answers."""

    def __init__(self, cuda: FakeCuda, changes: dict[str, Change]) -> None:
        self._cuda = cuda
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self._cuda, name)
        if name not in self._changes:
            return ask
        return lambda *arguments: self._changes[name](ask(*arguments), *arguments)


def refuse(*_: Any) -> Any:
    raise RuntimeError("CUDA error: the query returned 918")


# What is launched is 0, then 1 beside 2, then 3.
FLAWS: dict[str, tuple[dict[str, Change], str]] = {
    "edges are refused": ({"read": refuse}, "does not tell a graph's nodes and edges .*918"),
    "what edges carry is refused": ({"early_edges": refuse}, "does not tell a graph's nodes and edges"),
    "a query during capture is refused": ({"dependencies": refuse}, "does not tell what a capturing stream waits for .*918"),
    "nothing is launched last": ({"frontier": lambda ends, _: ()}, "tells 0 nodes"),
    "everything is launched last": ({"frontier": lambda ends, _: (*ends, 9)}, "tells 2 nodes"),
    "the same is launched last for ever": ({"frontier": lambda ends, _: (0,)}, "an earlier one"),
    "nothing waits for anything": ({"dependencies": lambda before, _: ()}, "other edges of a graph than while"),
    "an edge is missing": ({"read": lambda answer, _: (answer[0], answer[1][:-1])}, "other edges of a graph than while"),
    "edges are turned round": ({"read": lambda answer, _: (answer[0], tuple((b, a) for a, b in answer[1]))}, "other edges"),
    "a chain": (
        {"read": lambda answer, _: (answer[0], ((0, 1), (1, 2), (2, 3))), "dependencies": lambda _, node: (node - 1,) if node else ()},
        "another order",
    ),
    "no join": (
        {
            "read": lambda answer, _: (answer[0], ((0, 1), (0, 2), (2, 3))),
            "dependencies": lambda _, node: {1: (0,), 2: (0,), 3: (2,)}.get(node, ()),
        },
        "another order",
    ),
    "nodes are missing": ({"read": lambda answer, _: (answer[0][1:], answer[1])}, "not among the nodes"),
    "kernels are copies": ({"read": lambda answer, _: (tuple((node, NodeKind.MEMCPY) for node, _ in answer[0]), answer[1])}, "not among"),
}


def warmed_up(changes: dict[str, Change]) -> tuple[GraphCapturer, FakeProgram]:
    cuda = FakeCuda()
    program = FakeProgram(cuda, diamond(2, 2))
    capturer = GraphCapturer(cuda, reader=Reader(cuda, changes))  # type: ignore[arg-type]
    assert capturer.warm_up(program, program.inputs(0)) is None
    assert cuda.live_graphs == 0
    assert not capturer.tainted
    return capturer, program


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_found_before_anything_is_audited(flaw: str) -> None:
    changes, words = FLAWS[flaw]
    capturer, program = warmed_up(changes)
    assert not capturer.can_observe
    assert re.search(words, capturer.unread)
    plan = make_plan(program.graph, random_schedule(random.Random(3), program.graph, 2))
    made = capturer.capture(program, plan, program.inputs(0), graph=program.graph, options=CaptureOptions(observe=True))
    assert isinstance(made, Failure)
    assert made.kind is FailureKind.UNAVAILABLE  # an audit passes over it, and says so
    assert capturer.unread in made.detail


def test_a_reader_without_a_flaw_is_kept_and_tried_once() -> None:
    asked: list[object] = []
    capturer, program = warmed_up({"read": lambda answer, graph: asked.append(graph) or answer})
    assert capturer.can_observe
    assert capturer.warm_up(program, program.inputs(0)) is None
    assert len(asked) == 1


def test_a_capture_that_fails_says_nothing_about_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    program = FakeProgram(cuda, diamond(2, 2))
    capturer = GraphCapturer(cuda, reader=cuda)

    def broken(pool: object) -> object:
        raise RuntimeError("no capture today")

    monkeypatch.setattr(cuda, "begin_capture", broken)
    assert capturer.warm_up(program, program.inputs(0)) is None
    assert capturer.can_observe


def test_what_is_served_under_such_a_driver_answers_and_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, graph = FakeCuda(), diamond(2, 2)
    program = FakeProgram(cuda, graph)
    capturer = GraphCapturer(cuda, reader=Reader(cuda, {"read": refuse}))  # type: ignore[arg-type]
    monkeypatch.setattr(cuda_load, "_capturers", {0: capturer})
    monkeypatch.setattr(cuda_load, "_said", set())
    assert unaudited() == ""
    with caplog.at_level(logging.WARNING, logger=cuda_load.__name__):
        runner = prepare_runner(capturer, program, graph, make_plan(graph, random_schedule(random.Random(3), graph, 2)), program.inputs(0))
    inputs = program.inputs(1)
    assert [cuda.number(tensor) for tensor in runner(inputs)] == program.answer(inputs)
    assert "not audited here: the driver does not tell" in unaudited()
    assert [record.message for record in caplog.records] == [unaudited()]
