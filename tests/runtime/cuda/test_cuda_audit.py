"""Mutations: with a wait removed, or memory freed when its last reader is merely launched, audit *and* delays must notice."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.core.graph import OpGraph, ValueRole
from autosched.core.in_place import Link
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.device.cuda.measure import CudaMeasurer
from autosched.device.cuda.stress import DelaySet, StressOutcome, stress_plan
from autosched.runtime.cuda.audit import AuditReport, audit_graph, node_counts
from autosched.runtime.cuda.captured import CapturedGraph, GraphNode, NodeKind, Span, StorageSpan
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.lanes import CaptureOptions
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.plan import FreeRule, Plan, make_plan
from autosched.verify.race_stress import StressReport, judge_outcomes, plan_delays, stress
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_graphs import GraphBuilder, diamond, random_graph, random_schedule
from tests.conformance.fake_program import FakeProgram


def examine(graph: OpGraph, schedule: Schedule, plan: Plan) -> tuple[AuditReport, StressReport]:
    """Audit a plan's graph against the correct plan, and stress it."""
    cuda = FakeCuda()
    program = FakeProgram(cuda, graph)
    capturer = GraphCapturer(cuda, reader=cuda)
    measurer = CudaMeasurer(capturer, program, graph, program.inputs(1))
    runner = capturer.capture(program, plan, measurer.static, graph=graph, options=CaptureOptions(observe=True))
    assert isinstance(runner, GraphRunner)
    assert runner.captured is not None
    audit = audit_graph(graph, make_plan(graph, schedule), runner.captured)
    delays = [DelaySet(()), *plan_delays(graph, schedule, len(graph) * cuda.duration_us, random.Random(1))]
    outcomes = list(stress_plan(measurer, plan, delays, [program.inputs(2), program.inputs(3)], replays=2, seed=0))
    report = judge_outcomes(graph, delays, outcomes)
    assert isinstance(report, StressReport)
    return audit, report


def without_wait(plan: Plan, position: int, producer: int) -> Plan:
    steps = list(plan.steps)
    steps[position] = replace(steps[position], waits=tuple(item for item in steps[position].waits if item != producer))
    return replace(plan, steps=tuple(steps))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(0, 10_000))
def test_correct_plans_pass_both(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(4, 24))
    schedule = random_schedule(rng, graph, rng.randint(1, 4), priorities=True, extra=2)
    audit, report = examine(graph, schedule, make_plan(graph, schedule))
    assert audit.problems == ()
    assert audit.orderings_checked >= len(graph.edges)
    assert report.problems == ()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(0, 10_000))
def test_a_removed_wait_is_caught_by_both(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(6, 24))
    schedule = random_schedule(rng, graph, 3)
    plan = make_plan(graph, schedule)
    # A wait for an operator that launches nothing may be no edge of the graph: then nothing is lost with it.
    waits = [(place, before) for place, step in enumerate(plan.steps) for before in step.waits if graph.operators[before].bytes_written]
    if not waits:
        return
    audit, report = examine(graph, schedule, without_wait(plan, *rng.choice(waits)))
    # A wait for a view also orders what its lane did before; losing that is no race, only another schedule.
    assert report.sound == all(line.startswith("planned") for line in audit.problems)


def test_a_removed_wait_is_caught_in_a_plain_case() -> None:
    graph = diamond(2, 2)
    schedule = make_schedule(graph, range(len(graph)), [0, 0, 0, 1, 1, 0])
    plan = make_plan(graph, schedule)
    position = next(place for place, step in enumerate(plan.steps) if step.operator == 5)
    audit, report = examine(graph, schedule, without_wait(plan, position, 4))
    assert any("data order" in line and "op4" in line and "op5" in line for line in audit.problems)
    assert not report.sound


def shared_memory_case() -> tuple[OpGraph, Schedule]:
    """op0 and op2 on lane 0, op1 (which reads op0's value) on lane 1: op2 must not get op0's memory while op1 may still read it."""
    builder = GraphBuilder()
    first = builder.add([builder.inputs[0]])
    read = builder.add([first])
    second = builder.add([builder.inputs[0]])
    builder.add([read, second])
    graph = builder.build()
    return graph, make_schedule(graph, range(4), [0, 1, 0, 0])


def test_memory_freed_at_the_last_launch_is_caught_by_both() -> None:
    """Trap 2."""
    graph, _ = shared_memory_case()
    # With one more operator on the lane whose turn frees it, the wrong rule hands the block over at once.
    schedule = make_schedule(graph, range(4), [0, 0, 1, 0])
    assert examine(graph, schedule, make_plan(graph, schedule, FreeRule.LAST_LAUNCH))[0].sound
    caught = reused = 0
    for seed in range(40):
        rng = random.Random(seed)
        wide = random_graph(rng, 24)
        chosen = random_schedule(rng, wide, 3)
        audit, report = examine(wide, chosen, make_plan(wide, chosen, FreeRule.LAST_LAUNCH))
        assert audit.sound == report.sound
        caught += not audit.sound
        reused += audit.reuses_checked
        assert audit.sound or any("used again too early" in line for line in audit.problems)
    assert caught > 15
    assert reused > caught


def test_without_delays_or_poison_the_same_races_pass_unseen() -> None:
    """Why the stress is needed: replaying alone shows fewer of them."""
    missed = 0
    for seed in range(40):
        rng = random.Random(seed)
        graph = random_graph(rng, 24)
        schedule = random_schedule(rng, graph, 3)
        plan = make_plan(graph, schedule, FreeRule.LAST_LAUNCH)
        audit, _ = examine(graph, schedule, plan)
        cuda = FakeCuda()
        program = FakeProgram(cuda, graph)
        runner = GraphCapturer(cuda).capture(program, plan, program.inputs(1), graph=graph)
        assert isinstance(runner, GraphRunner)
        inputs = program.inputs(2)
        wanted = program.answer(inputs)
        same = [[cuda.number(tensor) for tensor in runner(inputs)] for _ in range(3)][-1] == wanted
        missed += same and not audit.sound
    assert missed > 0


def test_an_extra_edge_that_is_missing_is_a_lost_wait() -> None:
    graph = diamond(2, 2)
    schedule = make_schedule(graph, [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 0], extra_edges=[(2, 3)])
    bare = make_schedule(graph, [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 0])
    audit, report = examine(graph, schedule, make_plan(graph, bare))
    assert any("planned order" in line for line in audit.problems)
    assert report.sound  # a lost extra edge computes the right thing, later or sooner


def hand_made(**changes: object) -> CapturedGraph:
    """op0 -> op1 as two nodes, each value in its own memory."""
    fields: dict[str, object] = {
        "nodes": (GraphNode(NodeKind.KERNEL, 0), GraphNode(NodeKind.KERNEL, 1)),
        "edges": ((0, 1),),
        "spans": (StorageSpan(1, Span(4096, 512)), StorageSpan(2, Span(8192, 512))),
        "pool": (Span(4096, 8192),),
        "stray_launches": 0,
    }
    return CapturedGraph(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edges": ()}, "may still run"),
        ({"edges": ((1, 0),)}, "may still run"),
        ({"spans": (StorageSpan(1, Span(4096, 512)), StorageSpan(2, Span(4200, 512)))}, "used again too early"),
        ({"pool": (Span(8192, 4096),)}, "outside the graph's private pool"),
        ({"stray_launches": 1}, "missing from the graph"),
        (
            {"nodes": (GraphNode(NodeKind.KERNEL, 0), GraphNode(NodeKind.KERNEL, 1), GraphNode(NodeKind.KERNEL, -1))},
            "belong to no operator",
        ),
        ({"nodes": (GraphNode(NodeKind.KERNEL, 0),), "edges": ()}, "op1 has 0 nodes; expected 1"),
    ],
)
def test_each_fault_has_its_words(changes: dict[str, object], words: str) -> None:
    builder = GraphBuilder()
    builder.add([builder.add([builder.inputs[0]])])
    graph = builder.build()
    plan = make_plan(graph, sequential(graph))
    assert audit_graph(graph, plan, hand_made(), expected_nodes=(1, 1)).sound
    found = audit_graph(graph, plan, hand_made(**changes), expected_nodes=(1, 1)).problems
    assert any(words in line for line in found), found


def random_capture(rng: random.Random, graph: OpGraph) -> CapturedGraph:
    """A capture of up to three kernels for each operator, with most of the edges that it should have, in random memory."""
    operators = [operator for operator in range(len(graph)) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
    owners = sorted([*operators, -1], key=lambda _: rng.random())
    nodes = tuple(GraphNode(NodeKind.EVENT if owner < 0 else NodeKind.KERNEL, owner) for owner in owners)
    wanted = [
        (first, last)
        for first, before in enumerate(owners)
        for last, after in enumerate(owners)
        if min(before, after) >= 0 and graph.reachable[before] >> after & 1
    ]
    lost = rng.choice((0.0, 0.0, 0.1, 0.5))
    edges = tuple(edge for edge in wanted if rng.random() >= lost)
    storages = [value.index for value in graph.values if value.storage == value.index and value.role is ValueRole.INTERMEDIATE]
    places = rng.choice((3, 100))
    spans = tuple(StorageSpan(storage, Span(512 * rng.randrange(places), rng.choice((100, 512, 1024)))) for storage in storages)
    return CapturedGraph(nodes, edges, spans, (Span(0, 512 * 102),), 0)


def faults_of(graph: OpGraph, captured: CapturedGraph) -> tuple[bool, bool]:
    """Whether an ordering of the graph is missing, and whether memory is used again too early: pair by pair, node by node."""
    follows = set(captured.edges)
    while more := {(a, d) for a, b in follows for c, d in follows if b == c} - follows:
        follows |= more
    of = [[place for place, node in enumerate(captured.nodes) if node.operator == operator] for operator in range(len(graph))]

    def ordered(first: int, last: int) -> bool:
        return all((a, b) in follows for a in of[first] for b in of[last])

    def all_ordered(first: int, last: int) -> bool:
        users = graph.storage_uses.get(first, ()), graph.storage_uses.get(last, ())
        return all(ordered(a, b) if a != b else not of[a] for a in users[0] for b in users[1])

    pairs = [(a, b) for a in range(len(graph)) for b in range(len(graph)) if graph.reachable[a] >> b & 1]
    overlapping = [
        (one.storage, other.storage)
        for place, one in enumerate(captured.spans)
        for other in captured.spans[place + 1 :]
        if one.span.start < other.span.start + other.span.bytes and other.span.start < one.span.start + one.span.bytes
    ]
    return (
        not all(ordered(a, b) for a, b in pairs),
        not all(all_ordered(a, b) or all_ordered(b, a) for a, b in overlapping),
    )


def test_the_audit_finds_what_a_look_at_every_pair_of_nodes_finds() -> None:
    ends: Counter[tuple[bool, bool]] = Counter()
    for seed in range(150):
        rng = random.Random(seed)
        graph = random_graph(rng, rng.randint(2, 7))
        captured = random_capture(rng, graph)
        problems = audit_graph(graph, make_plan(graph, sequential(graph)), captured).problems
        # The plan's own order, all of it on one lane, is for the other tests.
        missing = any(line.startswith("data order") for line in problems)
        reused = any(line.startswith("memory is used again") for line in problems)
        if len(problems) <= 20:
            assert (missing, reused) == faults_of(graph, captured), seed
            ends[missing, reused] += 1
    assert len(ends) == 4
    assert min(ends.values()) >= 8


def test_an_operator_waits_with_every_node_that_it_has() -> None:
    builder = GraphBuilder()
    builder.add([builder.add([builder.inputs[0]])])
    graph = builder.build()
    plan = make_plan(graph, sequential(graph))
    nodes = (GraphNode(NodeKind.KERNEL, 0), GraphNode(NodeKind.KERNEL, 1), GraphNode(NodeKind.KERNEL, 1), GraphNode(NodeKind.KERNEL, 0))
    whole = {(0, 1), (0, 2), (3, 1), (3, 2)}
    assert audit_graph(graph, plan, hand_made(nodes=nodes, edges=tuple(whole))).sound
    for edge in whole:
        assert not audit_graph(graph, plan, hand_made(nodes=nodes, edges=tuple(whole - {edge}))).sound


def test_what_the_reader_says_of_early_edges_and_of_nodes_of_nobody_is_kept() -> None:
    builder = GraphBuilder()
    builder.add([builder.add([builder.inputs[0]])])
    graph = builder.build()
    plan = make_plan(graph, sequential(graph))
    nodes = (*hand_made().nodes, GraphNode(NodeKind.EVENT, -1), GraphNode(NodeKind.EMPTY, -1))
    captured = hand_made(nodes=nodes, early_edges=3)
    report = audit_graph(graph, plan, captured, expected_nodes=(1, 1))
    assert report.sound
    assert node_counts(graph, captured) == (1, 1)
    assert (report.orderings_checked, report.reuses_checked, report.early_edges) == (2, 0, 3)


def test_memory_outside_the_pool_matters_where_the_pool_is_known_and_memory_was_taken() -> None:
    builder = GraphBuilder()
    builder.add([builder.add([builder.inputs[0]])])
    graph = builder.build()
    plan = make_plan(graph, sequential(graph))
    for pool, size, sound in (((), 512, True), ((Span(0, 64),), 0, True), ((Span(0, 64),), 1, False), ((Span(4096, 512),), 512, True)):
        captured = hand_made(pool=pool, spans=(StorageSpan(1, Span(4096, size)),))
        assert audit_graph(graph, plan, captured).sound is sound


def test_what_was_overwritten_is_counted_with_what_was_checked() -> None:
    builder = GraphBuilder()
    for _ in range(3):
        builder.add([builder.inputs[0]])
    graph = builder.build()
    link = Link(2, 0, builder.inputs[0], graph.operators[2].writes[0])
    nodes = tuple(GraphNode(NodeKind.KERNEL, operator) for operator in range(3))
    captured = CapturedGraph(nodes, ((0, 1), (1, 2)), (), (), 0, overwritten=(link,))
    report = audit_graph(graph, make_plan(graph, sequential(graph)), captured)
    assert report.sound
    assert report.reuses_checked == 2


@pytest.mark.parametrize(("readers", "more"), [(10, []), (11, ["and 2 more"])])
def test_of_many_problems_twenty_are_named_and_the_others_counted(readers: int, more: list[str]) -> None:
    builder = GraphBuilder()
    first = builder.add([builder.inputs[0]])
    for _ in range(readers):
        builder.add([first])
    graph = builder.build()
    # Each is on a lane of its own, and waits for the first by the graph and by the plan; in the capture none does.
    plan = make_plan(graph, make_schedule(graph, range(readers + 1), range(readers + 1)))
    nodes = tuple(GraphNode(NodeKind.KERNEL, operator) for operator in range(readers + 1))
    problems = audit_graph(graph, plan, CapturedGraph(nodes, (), (), (), 0)).problems
    assert sum("may still run" in line for line in problems) == 20
    assert list(problems[20:]) == more


def test_memory_that_is_overwritten_while_somebody_may_read_it_is_found() -> None:
    builder = GraphBuilder()
    builder.add([builder.inputs[0]])
    builder.add([builder.inputs[0]])
    graph = builder.build()
    plan = make_plan(graph, make_schedule(graph, [0, 1], [0, 1]))
    link = Link(1, 0, builder.inputs[0], graph.operators[1].writes[0])
    side_by_side = hand_made(edges=(), spans=(StorageSpan(1, Span(4096, 512)),))
    assert audit_graph(graph, plan, side_by_side).sound
    (problem,) = audit_graph(graph, plan, replace(side_by_side, overwritten=(link,))).problems
    assert problem.startswith("memory is overwritten too early: op1 ")
    assert "op0 may still read" in problem
    assert audit_graph(graph, plan, replace(side_by_side, overwritten=(link,), edges=((0, 1),))).sound


def test_node_counts_are_those_of_one_stream() -> None:
    graph = diamond(2, 2)
    counts = {index: 1 + index % 2 for index in range(len(graph))}
    found = []
    for schedule in (sequential(graph), random_schedule(random.Random(2), graph, 2)):
        cuda = FakeCuda()
        program = FakeProgram(cuda, graph, kernels_of=counts)
        runner = GraphCapturer(cuda, reader=cuda).capture(
            program, make_plan(graph, schedule), program.inputs(0), graph=graph, options=CaptureOptions(observe=True)
        )
        assert isinstance(runner, GraphRunner)
        assert runner.captured is not None
        found.append(node_counts(graph, runner.captured))
    assert found[0] == found[1] == tuple(counts[index] for index in range(len(graph)))


class FakeSession:
    """Answers as asked."""

    def __init__(self, outcome: StressOutcome | Failure, replay_us: float | Failure = 100.0) -> None:
        self.outcome = outcome
        self.undisturbed_us = replay_us
        self.asked: list[tuple[int, int]] = []

    def replay_us(self, schedule: Schedule) -> float | Failure:
        return self.undisturbed_us

    def stressed(self, schedule: Schedule, delay_sets: list[DelaySet], *, replays: int) -> list[StressOutcome | Failure]:
        self.asked.append((len(delay_sets), replays))
        return [self.outcome] * len(delay_sets)


def test_every_operator_is_held_back_for_a_whole_run_and_one_lane_needs_no_delays() -> None:
    graph = diamond(4, 6)
    schedule = random_schedule(random.Random(5), graph, 3)
    sets = plan_delays(graph, schedule, 300.0, random.Random(0))
    assert {operator for item in sets for operator, delay_us in item.delays if delay_us >= 300.0} == set(range(len(graph)))
    assert all(sum(delay_us for _, delay_us in item.delays) <= 12.0 * 300.0 + 1e-6 for item in sets)
    assert plan_delays(graph, sequential(graph), 300.0, random.Random(0)) == []


@pytest.mark.parametrize(("lanes", "width", "groups"), [(2, 6, 4), (3, 50, 16)])
def test_each_lane_is_held_back_and_in_groups_every_operator_once_however_many_there_are(lanes: int, width: int, groups: int) -> None:
    graph = diamond(4, width)
    schedule = random_schedule(random.Random(5), graph, lanes)
    sets = plan_delays(graph, schedule, 3000.0, random.Random(0))
    held = [sorted(operator for operator, _ in item.delays) for item in sets]
    of_lanes = [[operator for operator in range(len(graph)) if schedule.lane[operator] == lane] for lane in range(lanes)]
    assert sorted(held[:lanes]) == sorted(of_lanes)
    assert len(held[lanes:]) == groups
    assert sorted(operator for group in held[lanes:] for operator in group) == list(range(len(graph)))
    for item in sets:
        # A whole run each, until a replay would take too long.
        assert sum(delay_us for _, delay_us in item.delays) == pytest.approx(min(len(item.delays), 12) * 3000.0)


def test_what_was_replayed_is_counted_and_a_difference_names_what_was_held_back() -> None:
    graph = diamond(4, 6)
    schedule = random_schedule(random.Random(5), graph, 3)
    session = FakeSession(StressOutcome(100, 0))
    report = stress(session, graph, schedule, rng=random.Random(0))
    captures = 1 + len(plan_delays(graph, schedule, 100.0, random.Random(0)))
    assert report == StressReport(captures, 100 * captures, ())
    assert session.asked == [(1, 100), (captures - 1, 2)]
    bad = stress(FakeSession(StressOutcome(100, 3)), graph, schedule, rng=random.Random(0))
    assert isinstance(bad, StressReport)
    assert not bad.sound
    assert bad.problems[0] == "3 of 100 replays differ from one stream, with nothing held back"
    names = [operator.name for operator in graph.operators]
    held = plan_delays(graph, schedule, 100.0, random.Random(0))[0]
    first = ", ".join(names[operator] for operator, _ in held.delays[:4])
    assert bad.problems[1] == f"3 of 100 replays differ from one stream, with {first} held back"
    alone = FakeSession(StressOutcome(100, 0))
    assert stress(alone, graph, sequential(graph), rng=random.Random(0)) == StressReport(1, 100, ())
    assert alone.asked == [(1, 100)]


def test_a_capture_that_cannot_be_made_is_a_failure_of_its_kind() -> None:
    graph = diamond(4, 6)
    schedule = random_schedule(random.Random(5), graph, 3)
    none = Failure(FailureKind.OOM, "no memory")
    session = FakeSession(StressOutcome(100, 0), replay_us=none)
    assert stress(session, graph, schedule, rng=random.Random(0)) == none
    assert not session.asked
    gone = stress(FakeSession(none), graph, schedule, rng=random.Random(0))
    assert gone == Failure(FailureKind.OOM, "race stress could not run: no memory")
