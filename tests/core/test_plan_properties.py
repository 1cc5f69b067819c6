"""Plans of random graphs: ordered, minimal, and never dropping memory too early - by an oracle of our own and by PyTorch's.

The second oracle is ``torch.cuda._sanitizer``, PyTorch's race detector for streams, fed with the plan's launches, waits and
addresses as an allocator would hand them out. It needs no device.
"""

from __future__ import annotations

import dataclasses
import random
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.cuda import _sanitizer

from autosched.core.errors import IllegalSchedule
from autosched.core.graph import OpGraph, ValueRole
from autosched.core.schedule import Schedule, make_schedule
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.numerics import compare
from autosched.runtime.plan import FreeRule, Plan, Step, make_plan
from autosched.search.synthetic import make_graph
from autosched.verify.legality import plan_violations
from tests.conformance.graphs import op_graphs, placements, random_placement, random_program

_SETTINGS = settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def _no_stack_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    # The sanitizer keeps a stack for each access, which under hypothesis is all it would spend its time on.
    monkeypatch.setattr(traceback.StackSummary, "extract", lambda *args, **kwargs: traceback.StackSummary())


@st.composite
def planned(draw: st.DrawFn) -> tuple[OpGraph, Schedule]:
    graph = draw(op_graphs())
    return graph, draw(placements(graph))


def races(graph: OpGraph, plan: Plan) -> int:
    """Unordered accesses that PyTorch's detector finds when memory is handed out lane by lane as the plan frees it."""
    handler = _sanitizer.EventHandler()
    for lane in range(plan.lanes):
        handler._handle_stream_creation(lane + 1)
    address: dict[int, int] = {value.storage: value.storage + 1 for value in graph.values if _permanent(graph, value.storage)}
    fresh = iter(range(10_000, 10_000_000))
    home: dict[int, int] = {}
    free: dict[int, list[int]] = {}
    found = 0
    for step in plan.steps:
        operator = graph.operators[step.operator]
        for producer in step.waits:
            handler._handle_event_wait(producer, step.lane + 1)
        changed = {graph.values[value].storage for value in operator.mutates}
        for storage in {graph.values[value].storage for value in operator.writes}:
            if storage not in address:
                # Last in, first out, as PyTorch's allocator does for equal sizes: the most dangerous choice.
                address[storage] = free[step.lane].pop() if free.get(step.lane) else next(fresh)
                home[storage] = step.lane
                changed.add(storage)
        seen = {graph.values[value].storage for value in (*operator.reads, *operator.writes)} - changed
        reads, writes = {address[storage] for storage in seen}, {address[storage] for storage in changed}
        names: dict[int, list[str]] = {pointer: [] for pointer in reads | writes}
        found += len(handler._handle_kernel_launch(step.lane + 1, reads - writes, writes, set(), operator.name, names))
        if step.records:
            handler._handle_event_record(step.operator, step.lane + 1)
        for storage in {graph.values[value].storage for value in step.frees}:
            free.setdefault(home[storage], []).append(address.pop(storage))
    return found


def _permanent(graph: OpGraph, storage: int) -> bool:
    return graph.values[storage].role in (ValueRole.INPUT, ValueRole.CONSTANT)


def without_one_wait(plan: Plan) -> Iterator[tuple[Step, int, Plan]]:
    for position, step in enumerate(plan.steps):
        for producer in step.waits:
            cut = dataclasses.replace(step, waits=tuple(item for item in step.waits if item != producer))
            yield step, producer, dataclasses.replace(plan, steps=(*plan.steps[:position], cut, *plan.steps[position + 1 :]))


def conflict(graph: OpGraph, first: int, second: int) -> bool:
    """Whether both operators touch one storage and one of them writes it."""

    def touched(index: int) -> tuple[set[int], set[int]]:
        operator = graph.operators[index]
        written = {graph.values[value].storage for value in operator.mutates}
        made = {graph.values[value].storage for value in operator.writes}
        written |= {storage for storage in made if not _permanent(graph, storage) and graph.storage_uses[storage][0] == index}
        return {graph.values[value].storage for value in (*operator.reads, *operator.writes)} | written, written

    (all_first, written_first), (all_second, written_second) = touched(first), touched(second)
    return bool(written_first & all_second or all_first & written_second)


@_SETTINGS
@given(planned())
def test_plans_are_safe_by_both_oracles(case: tuple[OpGraph, Schedule]) -> None:
    graph, schedule = case
    for rule in (FreeRule.VECTOR_CLOCK, FreeRule.HOLD_ALL):
        plan = make_plan(graph, schedule, rule)
        assert plan_violations(graph, schedule, plan) == []
        assert races(graph, plan) == 0
    assert not any(step.frees for step in plan.steps)


@_SETTINGS
@given(planned())
def test_every_wait_is_needed(case: tuple[OpGraph, Schedule]) -> None:
    graph, schedule = case
    plan = make_plan(graph, schedule)
    for step, producer, cut in without_one_wait(plan):
        assert any("does not wait for" in line or "which does not follow" in line for line in plan_violations(graph, schedule, cut)), (
            f"{producer} -> {step.operator}"
        )
        # An extra edge, or a view made elsewhere, orders without protecting memory: nothing there for a race detector.
        if conflict(graph, producer, step.operator):
            assert races(graph, cut) > 0


@_SETTINGS
@given(planned())
def test_whatever_the_race_detector_finds_our_oracle_finds(case: tuple[OpGraph, Schedule]) -> None:
    graph, schedule = case
    plan = make_plan(graph, schedule, FreeRule.LAST_LAUNCH)
    if races(graph, plan):
        assert plan_violations(graph, schedule, plan)
    for _, _, cut in without_one_wait(make_plan(graph, schedule)):
        if races(graph, cut):
            assert plan_violations(graph, schedule, cut)


def test_dropping_at_the_last_launch_is_caught_on_graphs_that_cross_lanes() -> None:
    caught, raced, crossing = 0, 0, 0
    for seed in range(60):
        rng = random.Random(seed)
        graph = random_program(rng, 20)[0].graph
        schedule = random_placement(rng, graph, 3)
        plan = make_plan(graph, schedule, FreeRule.LAST_LAUNCH)
        crossing += any(step.waits for step in plan.steps)
        caught += bool(plan_violations(graph, schedule, plan))
        raced += races(graph, plan) > 0
        assert races(graph, make_plan(graph, schedule)) == 0
    assert crossing == 60
    assert caught >= 50
    assert raced >= 10


def test_vector_clocks_still_give_memory_back() -> None:
    freed, values = 0, 0
    for seed in range(40):
        rng = random.Random(seed)
        graph = random_program(rng, 20)[0].graph
        plan = make_plan(graph, random_placement(rng, graph, 2))
        freed += sum(len(step.frees) for step in plan.steps)
        values += len(plan.held) + sum(len(step.frees) for step in plan.steps)
    assert freed > values / 3


def frees_of(predecessors: list[list[int]], lanes: list[int]) -> list[tuple[int, ...]]:
    """What is given back after each operator; operator ``i`` makes one value, whose name here is ``i``."""
    graph = make_graph(predecessors)
    plan = make_plan(graph, make_schedule(graph, range(len(lanes)), lanes))
    maker = {value: operator.index for operator in graph.operators for value in operator.writes}
    return [tuple(sorted(maker[value] for value in step.frees)) for step in plan.steps]


def test_memory_is_given_back_as_soon_as_its_lane_has_waited_for_the_last_reader() -> None:
    # 0 and 2 are read on lane 1, by 1 and 3. Lane 0 hears of 1 at 4, of 3 at 6, and gives each back then: no sooner, and no later.
    assert frees_of([[], [0], [], [2], [1], [4], [3, 5], [6]], [0, 1, 0, 1, 0, 0, 0, 0]) == [
        (), (), (), (), (0,), (4,), (2, 5), (6,),
    ]  # fmt: skip
    # To hear of a later operator of a lane is to hear of those before it.
    assert frees_of([[], [0], [], [2], [], [3, 4], [5]], [0, 1, 0, 1, 0, 0, 0]) == [(), (), (), (), (), (0, 2, 4), (5,)]
    # Of the two lanes that read 0 it hears of one.
    assert frees_of([[], [0], [0], [], [3], [4], [5]], [0, 1, 2, 0, 1, 0, 0]) == [(), (), (), (), (), (3,), (5,)]


def test_a_schedule_that_is_not_legal_has_no_plan() -> None:
    graph = make_graph([[], [0]])
    schedule = make_schedule(graph, [0, 1], [0, 0])
    with pytest.raises(IllegalSchedule):
        make_plan(graph, dataclasses.replace(schedule, order=(1, 0)))
    with pytest.raises(IllegalSchedule):
        make_plan(make_graph([[], []]), schedule)


def test_plans_compute_the_same_in_any_order_they_allow() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        program, constants = random_program(rng)
        bound = bind(program, constants)
        inputs = random_inputs(program, seed)
        expected = bound.run([tensor.clone() for tensor in inputs])
        plan = make_plan(program.graph, random_placement(rng, program.graph, 3, extra_edges=2))
        with torch.inference_mode():
            assert compare(_run_adversarially(rng, bound, plan, inputs), expected).bitwise


def _run_adversarially(rng: random.Random, bound: BoundProgram, plan: Plan, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Let a random lane go first again and again, as far as its waits allow; frees happen as in the lanes' own threads."""
    slots = bound.new_slots(inputs)
    queues = [list(plan.of_lane(lane)) for lane in range(plan.lanes)]
    finished: set[int] = set()
    while any(queues):
        ready = [queue for queue in queues if queue and set(queue[0].waits) <= finished]
        step = rng.choice(ready).pop(0)
        bound.kernels[step.operator](slots)
        for value in step.frees:
            slots[value] = None
        finished.add(step.operator)
    return bound.outputs(slots)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda plan: dataclasses.replace(plan, graph_hash="0"), "planned for graph"),
        (lambda plan: dataclasses.replace(plan, steps=plan.steps[::-1]), "not the operators in launch order"),
        (lambda plan: _edit_step(plan, 0, lane=1), "lane, width, priority, variant"),
        (lambda plan: _edit_step(plan, 0, waits=(plan.steps[-1].operator,)), "launched later"),
        (lambda plan: _edit_step(plan, len(plan.steps) - 1, waits=(plan.steps[-2].operator,)), "own lane|records no event"),
        (lambda plan: _edit_step(plan, len(plan.steps) - 1, frees=(0,)), "not the plan's to give back"),
        (lambda plan: dataclasses.replace(plan, held=()), "neither dropped once nor held"),
    ],
)
def test_the_oracle_names_what_is_wrong(edit: object, words: str) -> None:
    graph = random_program(random.Random(1))[0].graph
    schedule = random_placement(random.Random(1), graph, 1)
    plan = make_plan(graph, schedule)
    assert plan_violations(graph, schedule, plan) == []
    found = plan_violations(graph, schedule, edit(plan))  # type: ignore[operator]
    assert any(re.search(words, line) for line in found), found


def _edit_step(plan: Plan, position: int, **changes: object) -> Plan:
    steps = list(plan.steps)
    steps[position] = dataclasses.replace(steps[position], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(plan, steps=tuple(steps))


def test_a_plan_takes_work_in_proportion_to_its_operators_where_a_lane_never_waits() -> None:
    """A lane whose values are all read on another one, which it never waits for: nothing of it can be dropped before the end."""
    calls = []
    for rungs in (200, 400):
        predecessors = [
            item for rung in range(rungs) for item in ([2 * rung - 2] if rung else [], [2 * rung, *([2 * rung - 1] if rung else [])])
        ]
        graph = make_graph(predecessors)
        schedule = make_schedule(graph, range(2 * rungs), [0, 1] * rungs)
        counter = Counter[str]()
        sys.setprofile(lambda frame, event, argument, counter=counter: counter.update([event]))
        try:
            plan = make_plan(graph, schedule)
        finally:
            sys.setprofile(None)
        assert not plan_violations(graph, schedule, plan)
        assert not any(step.frees for step in plan.steps if step.lane == 0)
        calls.append(counter["call"])
    assert calls[1] < 2.5 * calls[0]
