"""Write-backs done in place: equal, to the bit, to those that are copied, in every order that a plan allows; refused where not."""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autosched.core.errors import HalfWritten, UnsupportedGraph
from autosched.core.graph import OpGraph
from autosched.core.in_place import chains_of
from autosched.core.program import Call, Many, Program, Ref, WriteBack
from autosched.core.records import Engine
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.core.variants import Lowering
from autosched.export.bundle import encode_bundle
from autosched.runtime import lanes
from autosched.runtime.guard import FallbackWarning
from autosched.runtime.in_place import finished_before, first_of_lanes, granted, homes_of, in_place, in_place_form
from autosched.runtime.kernels import Begun, bind, random_inputs
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.lateness import Lateness, Walkers
from autosched.runtime.load import load
from autosched.runtime.native.lanes import Deserted, NativeProgram
from autosched.runtime.numerics import compare
from autosched.runtime.plan import Plan, make_plan
from autosched.runtime.workspace import peak_live_bytes
from tests.conformance.graphs import Recorder, random_placement
from tests.conformance.stateful import (
    SIZE,
    KeyValueCache,
    LongCache,
    ReadBeforeAndAfter,
    Stateful,
    assert_like_eager,
    bundle_bytes,
    bundled,
    example,
    made,
)
from tests.conformance.stateful_programs import random_run_order, random_stateful_program, run_in


def same(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return compare(mine, theirs).bitwise


def clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


R, F = Ref, 0.3
CALLS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("copy.default", (R(0), R(1))),
    ("copy.default", (R(0), R(8))),
    ("zero.default", (R(0),)),
    ("fill.Scalar", (R(0), F)),
    ("fill.Tensor", (R(0), R(6))),
    ("index_copy.default", (R(0), 0, R(3), R(2))),
    ("index_fill.int_Scalar", (R(0), 1, R(3), F)),
    ("index_fill.int_Tensor", (R(0), 1, R(3), R(6))),
    ("index_put.default", (R(0), Many((None, R(3))), R(7))),
    ("index_put.default", (R(0), Many((R(3),)), R(2), True)),
    ("masked_fill.Scalar", (R(0), R(4), F)),
    ("masked_fill.Tensor", (R(0), R(4), R(6))),
    ("masked_scatter.default", (R(0), R(4), R(1))),
    ("scatter.src", (R(0), 0, R(5), R(1))),
    ("scatter.value", (R(0), 0, R(5), F)),
    ("scatter_add.default", (R(0), 0, R(5), R(1))),
    ("scatter_reduce.two", (R(0), 0, R(5), R(1), "amax")),
    ("slice_scatter.default", (R(0), R(2), 0, 1, 3)),
    ("select_scatter.default", (R(0), R(8), 0, 2)),
    ("diagonal_scatter.default", (R(0), R(9), 1)),
    ("index_add.default", (R(0), 0, R(3), R(2))),
    ("add.Tensor", (R(0), R(1))),
    ("add.Tensor", (R(0), 2)),
    ("add.Scalar", (R(0), F)),
    ("sub.Tensor", (R(0), R(1))),
    ("sub.Scalar", (R(0), F)),
    ("mul.Tensor", (R(0), R(8))),
    ("mul.Scalar", (R(0), F)),
    ("div.Tensor", (R(0), R(1))),
    ("div.Scalar", (R(0), F)),
    ("lerp.Scalar", (R(0), R(1), F)),
    ("lerp.Tensor", (R(0), R(1), R(1))),
    ("addcmul.default", (R(0), R(1), R(1))),
    ("addcdiv.default", (R(0), R(1), R(1))),
    ("clamp.default", (R(0), -0.1, 0.2)),
    ("clamp_min.default", (R(0), 0.1)),
    ("clamp_max.default", (R(0), 0.1)),
    ("relu.default", (R(0),)),
    ("neg.default", (R(0),)),
    ("exp.default", (R(0),)),
    ("sqrt.default", (R(0),)),
    ("sigmoid.default", (R(0),)),
    ("tanh.default", (R(0),)),
)


def arguments() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    mask = normal(4, 6) > 0
    index = torch.argsort(normal(4, 6), dim=0)
    return [
        normal(4, 6),
        normal(4, 6),
        normal(2, 6),
        torch.tensor([2, 0]),
        mask,
        index,
        torch.tensor(0.7),
        normal(4, 2),
        normal(6),
        normal(4),
    ]


def one_call(target: str, args: tuple[Any, ...]) -> tuple[Program, list[torch.Tensor]]:
    """The program of one call on the first of :func:`arguments`, which it changes."""
    recorder, tensors = Recorder(), arguments()
    for tensor in tensors:
        recorder.input(tensor)
    final = recorder.run(f"aten::{target}", *args)
    return dataclasses.replace(recorder.build([final]), writes=(WriteBack(0, final.value),)), tensors


@pytest.mark.parametrize(("target", "args"), CALLS)
def test_a_call_in_place_makes_the_bits_of_the_call(target: str, args: tuple[Any, ...]) -> None:
    program, tensors = one_call(target, args)
    plan = make_plan(program.graph, sequential(program.graph))
    chains = granted(program, plan)
    assert len(chains) == 1
    bound = bind(program, {})
    expected = bound.run(clones(tensors))
    given = clones(tensors)
    (changed,) = in_place(bound, chains).run(given)
    assert changed is given[0]
    assert same([changed], expected)
    assert same(given[1:], tensors[1:])
    if chains[0].repeatable:
        assert same(in_place(bound, chains).run(given), expected)


def test_every_call_with_an_in_place_form_is_tried_here() -> None:
    from autosched.core import in_place as tables

    tried = {f"aten::{target}" for target, _ in CALLS}
    assert tried == tables._PLACES | tables._UPDATES


@pytest.mark.parametrize("target", ["aten::no_such_operator.default", "aten::index_copy.no_such_overload"])
def test_what_this_torch_has_no_in_place_form_of_is_copied(target: str) -> None:
    assert in_place_form(Call(target, (Ref(0), Ref(1)), (), (2,))) is None


@pytest.mark.parametrize(("args", "kwargs"), [((R(0),), (("src", R(1)),)), ((R(0), 1.5), ())])
def test_a_part_that_is_not_filled_from_a_second_tensor_is_copied(args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> None:
    program, _ = one_call("slice_scatter.default", (R(0), R(1)))
    assert granted(program, make_plan(program.graph, sequential(program.graph)))
    (operator,) = program.graph.operators
    call = dataclasses.replace(operator.calls[0], args=args, kwargs=kwargs)
    graph = dataclasses.replace(program.graph, operators=(dataclasses.replace(operator, calls=(call,)),))
    other = dataclasses.replace(program, graph=graph)
    assert len(chains_of(other)) == 1
    assert granted(other, make_plan(graph, sequential(graph))) == ()
    # As of a bundle that was tuned where there was one.
    bound = dataclasses.replace(bind(program, {}), program=other)
    with pytest.raises(UnsupportedGraph, match=r"slice_scatter.*tune again"):
        in_place(bound, chains_of(other))


def test_in_every_order_that_a_plan_allows_in_place_is_equal_to_the_bit_and_what_is_refused_is_not() -> None:
    """Random programs, placements and orders of finishing: what is granted never shows, what is refused and done all the same does."""
    counts = {"granted": 0, "refused": 0, "seen": 0}
    for seed in range(120):
        rng = random.Random(seed)
        program, constants = random_stateful_program(rng)
        bound, inputs = bind(program, constants), random_inputs(program, seed)
        expected = bound.run(clones(inputs))
        plan = make_plan(program.graph, random_placement(rng, program.graph, rng.randrange(1, 4)))
        chains = granted(program, plan)
        refused = [chain for chain in chains_of(program) if chain not in chains]
        counts["granted"] += len(chains)
        counts["refused"] += len(refused)
        for _ in range(4):
            order = random_run_order(rng, plan)
            given = clones(inputs)
            outputs = run_in(order, in_place(bound, chains), given)
            assert same(outputs, expected), seed
            assert_written(program, given, outputs, [chain.write for chain in chains], inputs)
            for chain in refused:
                counts["seen"] += not same(run_in(order, in_place(bound, [chain]), clones(inputs)), expected)
    assert counts["granted"] > 40
    assert counts["refused"] > 10
    assert counts["seen"] > 10


def assert_written(
    program: Program, given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], written: Sequence[int], before: Sequence[torch.Tensor]
) -> None:
    """Those of ``program.writes`` that are ``written`` lie in the inputs they change; other inputs are as they were."""
    place = {value: index for index, value in enumerate(program.graph.inputs)}
    made = dict(zip(program.graph.outputs, outputs, strict=True))
    changed = {place[program.writes[write].target]: made[program.writes[write].value] for write in written}
    for index, (tensor, old) in enumerate(zip(given, before, strict=True)):
        assert changed.get(index, tensor) is tensor
        assert index in changed or torch.equal(tensor, old)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("engine", "as_team"), [(Engine.PYTHON, False), (Engine.NATIVE, False), (Engine.NATIVE, True)])
def test_lanes_that_run_at_the_same_time_write_in_place(engine: Engine, as_team: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "usable_cores", lambda: 2)
    granted_at_all = 0
    for seed in range(60):
        rng = random.Random(1000 + seed)
        program, constants = random_stateful_program(rng, 20)
        bound, inputs = bind(program, constants), random_inputs(program, seed)
        expected = bound.run(clones(inputs))
        plan = make_plan(program.graph, random_placement(rng, program.graph, 2))
        chains = granted(program, plan)
        granted_at_all += len(chains)
        executor = LaneExecutor(in_place(bound, chains), plan, engine=engine, as_team=as_team)
        # No operator in place is one that only Python could run.
        assert (executor.engine, executor.one_team) == (engine, as_team)
        for _ in range(3):
            assert same(executor.run(clones(inputs)), expected)
    assert granted_at_all >= 5


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("midway", [False, True])
def test_a_run_that_its_team_left_midway_is_not_done_once_more(midway: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "usable_cores", lambda: 2)
    program, graph = reader_and_writer()
    plan, inputs = plan_of(graph, [0, 1], edges=[(0, 1)]), random_inputs(program, 0)
    bound = bind(program, {})
    expected = bound.run(clones(inputs))
    executor = LaneExecutor(in_place(bound, granted(program, plan)), plan)
    assert executor.one_team

    def left(*given: object) -> None:
        raise Deserted(midway=midway)

    monkeypatch.setattr(NativeProgram, "_here", left)
    if midway:
        with pytest.raises(Deserted):
            executor.run(inputs)
    # It is not asked again.
    assert same(executor.run(inputs), expected)
    assert not executor.one_team


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("begun", [False, True])
def test_a_caller_hears_of_a_team_that_left_what_he_hears_of_an_operator_that_failed(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "usable_cores", lambda: 2)
    # However late it comes here.
    monkeypatch.setattr(Lateness, "walkers", lambda lateness: Walkers.TEAM)
    model = made(KeyValueCache)
    loaded = load(two_lanes(model), model)
    prepared = loaded._table.slots[0].prepared  # type: ignore[union-attr]
    assert prepared is not None
    assert prepared.overwriting is not None
    marks = prepared.overwriting.begun
    real = NativeProgram._here

    def left(program: NativeProgram, *given: Any) -> Any:
        if program._lanes == 1:
            return real(program, *given)
        marks.set(begun)
        raise Deserted(midway=True)

    monkeypatch.setattr(NativeProgram, "_here", left)
    eager = copy.deepcopy(model)
    with torch.no_grad():
        x = example()
        if begun:
            with pytest.raises(HalfWritten, match="OpenMP gave fewer threads"):
                loaded(x)
        else:
            with pytest.warns(FallbackWarning, match="OpenMP gave fewer threads"):
                torch.testing.assert_close(loaded(x), eager(x))
            assert torch.equal(model.keys, eager.keys)


def two_lanes(model: Stateful) -> bytes:
    """A bundle whose operators are on two lanes in turn, each waiting for the one before, so that all may write in place."""
    _, bundle = bundled(model, (example(),))
    count = len(bundle.program.graph)
    order = tuple(range(count))
    schedule = make_schedule(bundle.program.graph, order, [place % 2 for place in order], extra_edges=[(i, i + 1) for i in order[:-1]])
    return encode_bundle(dataclasses.replace(bundle, schedule=schedule))


def reader_and_writer() -> tuple[Program, OpGraph]:
    """Operator 0 reads what operator 1 overwrites; nothing in the graph orders them."""
    recorder = Recorder()
    cache, x = recorder.input(torch.zeros(4, 6)), recorder.input(torch.ones(4, 6))
    old = recorder.run("aten::add.Tensor", cache, x)
    final = recorder.run("aten::mul.Tensor", cache, x)
    program = dataclasses.replace(recorder.build([final, old]), writes=(WriteBack(cache.value, final.value),))
    return program, program.graph


def plan_of(graph: OpGraph, lanes: Sequence[int], order: Sequence[int] = (0, 1), edges: Sequence[tuple[int, int]] = ()) -> Plan:
    schedule: Schedule = make_schedule(graph, order, lanes, extra_edges=edges)
    return make_plan(graph, schedule)


def test_a_reader_on_another_lane_must_be_waited_for() -> None:
    program, graph = reader_and_writer()
    assert len(granted(program, plan_of(graph, [0, 0]))) == 1
    assert granted(program, plan_of(graph, [0, 0], order=[1, 0])) == ()
    assert granted(program, plan_of(graph, [0, 1])) == ()
    assert len(granted(program, plan_of(graph, [0, 1], edges=[(0, 1)]))) == 1


def test_a_plan_that_lost_the_wait_is_refused() -> None:
    program, graph = reader_and_writer()
    sound = plan_of(graph, [0, 1], edges=[(0, 1)])
    broken = dataclasses.replace(sound, steps=tuple(dataclasses.replace(step, waits=()) for step in sound.steps))
    assert finished_before(sound) == {0: 0, 1: 1}
    assert granted(program, broken) == ()


def test_an_operator_that_runs_as_compiled_code_is_not_done_in_place() -> None:
    program, graph = reader_and_writer()
    plan = plan_of(graph, [0, 0])
    assert granted(program, dataclasses.replace(plan, steps=(plan.steps[0], dataclasses.replace(plan.steps[1], variant=1)))) == ()


def test_what_the_model_puts_another_tensor_in_the_place_of_is_left_alone() -> None:
    program, graph = reader_and_writer()
    assert granted(program, plan_of(graph, [0, 0]), barred=[0]) == ()


def test_memory_of_inputs_is_no_workspace() -> None:
    program, graph = reader_and_writer()
    plan = plan_of(graph, [0, 0])
    chains = granted(program, plan)
    assert peak_live_bytes(graph, plan) == 2 * 4 * 6 * 4
    assert peak_live_bytes(graph, plan, homes_of(chains)) == 4 * 6 * 4


def test_it_is_told_when_a_run_begins_to_change_memory() -> None:
    program, graph = reader_and_writer()
    begun, plan = Begun(), plan_of(graph, [0, 0])
    chains = granted(program, plan)
    bound = in_place(bind(program, {}), chains, begun, first_of_lanes(plan, chains))
    slots = bound.new_slots(clones(random_inputs(program, 0)))
    bound.kernels[0](slots)
    assert not begun.yes
    bound.kernels[1](slots)
    assert begun.yes


# -- loaded models ----------------------------------------------------------------------------------------------------


class Writes(Stateful):
    """Two writes to one buffer, one of them to a part; the old value is read before, and what is between in the middle."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        old = self.memory.sum() + x
        self.memory[1:3] = x[:2]
        between = self.layer(self.memory)
        self.memory[:, 2] = x[0, 0]
        self.count += 1
        return old, between, self.memory * self.count


class ReturnsItsCache(Stateful):
    """Returns the cache itself, a view of it, and a copy."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.memory.index_copy_(0, self.count.reshape(1) % 4, x[:1])
        self.count += 1
        return self.memory, self.memory[1:], self.memory.clone(), self.memory.t() * 2


class ReturnsOldAndNew(Stateful):
    """Returns what was there, so that nothing can be overwritten."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        old = self.memory.clone()
        self.memory.mul_(0.5).add_(x)
        return old, self.memory


class CacheGiven(Stateful):
    """Changes a cache that it is given, at a place that it is given, as transformers' static cache does."""

    def forward(self, x: torch.Tensor, cache: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache.index_copy_(0, place, self.layer(x[:1]))
        return torch.softmax(x @ cache.t(), 1) @ cache, cache


KINDS: tuple[type[Stateful], ...] = (Writes, ReturnsItsCache, ReturnsOldAndNew)


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_in_a_row_are_those_of_the_model(kind: type[Stateful], lowering: Lowering) -> None:
    model = made(kind)
    loaded = load(bundle_bytes(model, (example(),), lowering), model, strict=True)
    assert_like_eager(loaded, model, [(example(),) for _ in range(5)])
    assert loaded.report().calls == 5


@pytest.mark.parametrize("kind", [*KINDS, KeyValueCache, ReadBeforeAndAfter])
def test_in_place_and_copied_are_equal_to_the_bit(kind: type[Stateful]) -> None:
    model = made(kind)
    twin = copy.deepcopy(model)
    data = bundle_bytes(model, (example(),))
    mine, theirs = load(data, model, strict=True), load(data, twin, strict=True, in_place=False)
    with torch.no_grad():
        for _ in range(4):
            x = example()
            answers = [torch.utils._pytree.tree_leaves(run(x)) for run in (mine, theirs)]
            assert same(*answers)
            assert same(list(model.buffers()), list(twin.buffers()))
    assert mine.report().shapes[0].copied_back_bytes <= theirs.report().shapes[0].copied_back_bytes


def test_a_cache_is_neither_made_anew_nor_copied() -> None:
    model = made(KeyValueCache)
    data = bundle_bytes(model, (example(),))
    mine = load(data, model, strict=True)
    assert mine.report().shapes[0].copied_back_bytes == 0
    prepared = mine._table.slots[0].prepared  # type: ignore[union-attr]
    assert prepared is not None
    theirs = load(data, copy.deepcopy(model), strict=True, in_place=False).report().shapes[0]
    assert theirs.copied_back_bytes == sum(item.numel() * item.element_size() for item in (model.keys, model.values, model.count))
    assert mine.report().shapes[0].workspace_bytes < theirs.workspace_bytes
    versions = [buffer._version for buffer in (model.keys, model.values, model.count)]
    with torch.no_grad():
        mine(example())
    # Autograd's guard against changed tensors sees it.
    assert all(buffer._version > before for buffer, before in zip((model.keys, model.values, model.count), versions, strict=True))


def test_a_buffer_that_is_replaced_between_calls_is_the_one_that_is_written() -> None:
    model = made(KeyValueCache)
    loaded = load(bundle_bytes(model, (example(),)), model, strict=True)
    held = model.keys

    def replaced(changed: Stateful, number: int) -> None:
        if number == 2:
            changed.keys = torch.ones(16, SIZE)  # type: ignore[assignment]

    assert_like_eager(loaded, model, [(example(),) for _ in range(4)], replaced)
    assert model.keys is not held
    assert loaded.report().calls == 4


def test_a_cache_that_is_given_is_changed_where_it_lies() -> None:
    model = made(CacheGiven)
    data = bundle_bytes(model, (example(), torch.zeros(16, SIZE), torch.tensor([3])))
    loaded, eager = load(data, model, strict=True), copy.deepcopy(model)
    caches = [torch.zeros(16, SIZE) for _ in range(4)]
    with torch.no_grad():
        for number in range(6):
            x, place = example(), torch.tensor([number])
            # Two caches in turn; the model's own answer to each.
            mine, theirs = caches[number % 2], caches[2 + number % 2]
            answer, expected = loaded(x, mine, place), eager(x, theirs, place)
            assert answer[1] is mine
            torch.testing.assert_close(answer[0], expected[0])
            torch.testing.assert_close(mine, theirs)
    assert loaded.report().shapes[0].copied_back_bytes == 0


def test_two_caches_that_share_memory_run_the_model() -> None:
    class TwoCaches(Stateful):
        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            one.mul_(2)
            other.add_(1)
            return one + other

    model = made(TwoCaches)
    loaded = load(bundle_bytes(model, (torch.randn(3), torch.randn(3))), model)
    shared = torch.arange(4.0)
    with torch.no_grad(), pytest.warns(FallbackWarning, match="shares memory"):
        loaded(shared[:3], shared[1:])
    assert shared.tolist() == [0.0, 3.0, 5.0, 4.0]


def test_many_threads_write_one_cache() -> None:
    data = bundle_bytes(made(LongCache), (example(),))
    model = made(LongCache)
    loaded = load(data, model, strict=True)

    def serve() -> None:
        with torch.no_grad():
            for _ in range(40):
                loaded(torch.ones(4, SIZE))

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(model.count) == 160
    assert torch.equal(model.values[:160], torch.ones(160, SIZE))
    assert not model.values[160:].any()


# -- failures ---------------------------------------------------------------------------------------------------------


class Looks(Stateful):
    """Changes its memory, and then looks something up by an index that may be out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, SIZE)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.memory.add_(x)
        self.count += 1
        return self.table(at) + self.memory.sum()


class LooksFirst(Looks):
    """The same the other way round."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        found = self.table(at)
        self.memory.add_(x + found.sum())
        self.count += 1
        return found * 2


GOOD, BAD = torch.tensor([1]), torch.tensor([7])


def test_a_failure_before_anything_was_changed_is_the_models_own() -> None:
    model = made(LooksFirst)
    loaded = load(bundle_bytes(model, (example(), GOOD)), model, strict=True)
    with torch.no_grad():
        with pytest.raises(IndexError):
            loaded(example(), BAD)
        assert int(model.count) == 0
        loaded(example(), GOOD)
    assert int(model.count) == 1
    assert loaded.report().calls == 1


def test_a_failure_half_way_is_said_and_the_model_is_not_run_on_what_was_changed() -> None:
    model = made(Looks)
    loaded = load(bundle_bytes(model, (example(), GOOD)), model)
    prepared = loaded._table.slots[0].prepared  # type: ignore[union-attr]
    assert prepared is not None
    x = example()
    with torch.no_grad():
        with pytest.raises(HalfWritten, match=r"part of the model's state was changed .*IndexError"):
            loaded(x, BAD)
        # Once, not twice.
        assert torch.equal(model.memory, x)
        # From then on nothing is changed before all has succeeded, until a call has.
        before = int(model.count)
        with pytest.raises(IndexError):
            loaded(x, BAD)
        # The model itself has failed half way, as it does in eager mode.
        assert torch.equal(model.memory, x + x)
        model.memory.zero_()
        model.count.fill_(before)
        loaded(x, GOOD)
        assert torch.equal(model.memory, x)
        with pytest.raises(HalfWritten):
            loaded(x, BAD)
    assert loaded.report().calls == 1
    assert not loaded.report().stepped_aside


def test_a_failure_half_way_is_said_also_where_no_memory_is_left_for_the_next_run() -> None:
    model = made(Looks)
    loaded = load(bundle_bytes(model, (example(), GOOD)), model)
    prepared = loaded._table.slots[0].prepared  # type: ignore[union-attr]
    assert prepared is not None
    assert prepared.overwriting is not None

    def none_is_left() -> Any:
        raise MemoryError

    real, prepared.overwriting = prepared.overwriting, dataclasses.replace(prepared.overwriting, otherwise=none_is_left)
    x = example()
    with torch.no_grad():
        with pytest.raises(HalfWritten):
            loaded(x, BAD)
        assert torch.equal(model.memory, x)
        prepared.overwriting = real
        with pytest.raises(IndexError):
            loaded(x, BAD)
        # By the model alone.
        assert torch.equal(model.memory, x + x)


class AnswersApart(Stateful):
    """Answers with what it puts into its memory, and not with that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.memory.mul(0.5)
        self.memory.copy_(new)
        return new


def test_an_answer_for_which_no_memory_is_left_is_a_failure_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(AnswersApart)
    loaded = load(bundle_bytes(model, (example(),)), model)
    prepared = loaded._table.slots[0].prepared  # type: ignore[union-attr]
    assert prepared is not None
    assert prepared.copied_back_bytes == 0
    model.memory.fill_(8.0)

    def none_is_left(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 128 bytes.")

    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", none_is_left)
            with pytest.raises(HalfWritten, match="can't allocate memory"):
                loaded(example())
        # Once, not twice.
        assert torch.equal(model.memory, torch.full((4, SIZE), 4.0))
        assert torch.equal(loaded(example()), torch.full((4, SIZE), 2.0))


def test_with_copies_a_failure_has_changed_nothing_before_the_model_runs() -> None:
    model = made(Looks)
    loaded = load(bundle_bytes(model, (example(), GOOD)), model, in_place=False)
    eager = copy.deepcopy(model)
    x = example()
    with torch.no_grad():
        for run in (loaded, eager):
            with pytest.raises(IndexError):
                run(x, BAD)
    assert torch.equal(model.memory, eager.memory)
