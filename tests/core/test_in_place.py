"""Which write-backs a program alone allows to be done in place, and which it forbids."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.in_place import (
    Chain,
    Manner,
    chains_in,
    chains_of,
    copy_target,
    in_graph_order,
    manner_of,
    others_using,
    outputs_overwritten,
    overwriting,
)
from autosched.core.program import Call, Many, Program, Ref, WriteBack
from autosched.core.schedule import make_schedule, sequential
from autosched.runtime.in_place import granted
from autosched.runtime.plan import make_plan
from tests.conformance.graphs import Recorder
from tests.conformance.stateful_programs import random_stateful_program


class Cache:
    """A program in the making: a cache ``[4, 6]`` that is changed, an input, and an index."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.cache = self.recorder.input(torch.zeros(4, 6))
        self.x = self.recorder.input(torch.ones(1, 6))
        self.place = self.recorder.constant("place", torch.tensor([2]))

    def placed(self, state: Ref) -> Ref:
        made: Ref = self.recorder.run("aten::index_copy.default", state, 0, self.place, self.x)
        return made

    def chains(self, final: Ref, *outputs: Ref) -> tuple[Chain, ...]:
        return chains_of(self.program(final, *outputs))

    def program(self, final: Ref, *outputs: Ref) -> Program:
        program = self.recorder.build([final, *outputs])
        return dataclasses.replace(program, writes=(WriteBack(self.cache.value, final.value),))


def test_a_cache_that_is_filled_at_one_place_is_a_chain_of_one_call() -> None:
    cache = Cache()
    final = cache.placed(cache.cache)
    answer = cache.recorder.run("aten::sum.default", final)
    (chain,) = cache.chains(final, answer)
    assert [(link.operator, link.call, link.before, link.after) for link in chain.links] == [(0, 0, cache.cache.value, final.value)]
    assert chain.repeatable


def test_two_writes_to_one_buffer_are_one_chain() -> None:
    cache = Cache()
    between = cache.placed(cache.cache)
    final = cache.recorder.run("aten::mul.Tensor", between, 2.0)
    (chain,) = cache.chains(final)
    assert [link.before for link in chain.links] == [cache.cache.value, between.value]
    # A second run would find what the first one has doubled.
    assert not chain.repeatable


def test_what_reads_the_old_contents_forbids_nothing_but_a_second_run() -> None:
    cache = Cache()
    old = cache.recorder.run("aten::sum.default", cache.cache)
    final = cache.placed(cache.cache)
    (chain,) = cache.chains(final, old)
    assert not chain.repeatable
    assert in_graph_order(cache.program(final, old).graph, chain)


def test_a_reader_behind_the_write_in_the_graphs_order_is_for_a_plan_to_judge() -> None:
    cache = Cache()
    final = cache.placed(cache.cache)
    old = cache.recorder.run("aten::sum.default", cache.cache)
    (chain,) = cache.chains(final, old)
    assert not in_graph_order(cache.program(final, old).graph, chain)


def test_the_form_of_what_was_there_may_be_read_before_a_second_run() -> None:
    cache = Cache()
    part = cache.recorder.run("aten::slice.Tensor", cache.cache, 0, 1, 2)
    filled = cache.recorder.run("aten::copy.default", part, cache.x)
    final = cache.recorder.run("aten::slice_scatter.default", cache.cache, filled, 0, 1, 2)
    (chain,) = cache.chains(final)
    assert chain.repeatable


def forbidden() -> dict[str, tuple[Cache, Ref, tuple[Ref, ...]]]:
    found: dict[str, tuple[Cache, Ref, tuple[Ref, ...]]] = {}
    cache = Cache()
    found["the old contents leave the model"] = (cache, cache.placed(cache.cache), (cache.cache,))
    cache = Cache()
    view = cache.recorder.run("aten::slice.Tensor", cache.cache, 0, 0, 2)
    found["a view of the old contents leaves the model"] = (cache, cache.placed(cache.cache), (view,))
    cache = Cache()
    between = cache.placed(cache.cache)
    found["what was between leaves the model"] = (cache, cache.recorder.run("aten::mul.Tensor", between, 2.0), (between,))
    cache = Cache()
    found["it is made of something else"] = (cache, cache.recorder.run("aten::mm.default", cache.recorder.run(
        "aten::mm.default", cache.cache, cache.recorder.run("aten::t.default", cache.cache)), cache.cache), ())  # fmt: skip
    cache = Cache()
    found["it reads what it would overwrite"] = (cache, cache.recorder.run("aten::add.Tensor", cache.cache, cache.cache), ())
    cache = Cache()
    rows = cache.recorder.run("aten::slice.Tensor", cache.cache, 0, 0, 1)
    found["it reads a view of what it would overwrite"] = (
        cache, cache.recorder.run("aten::index_copy.default", cache.cache, 0, cache.place, rows), (),
    )  # fmt: skip
    cache = Cache()
    turned = cache.recorder.run("aten::t.default", cache.recorder.run("aten::mul.Tensor", cache.cache, 2.0))
    found["it is a view of what was made"] = (
        cache, cache.recorder.run("aten::t.default", turned), (),
    )  # fmt: skip
    cache = Cache()
    between = cache.placed(cache.cache)
    found["its second call reads what it would overwrite"] = (cache, cache.recorder.run("aten::add.Tensor", between, between), ())
    cache = Cache()
    between = cache.recorder.run("aten::add.Tensor", cache.cache, cache.cache)
    found["its first call reads what it would overwrite"] = (cache, cache.placed(between), ())
    cache = Cache()
    between = cache.placed(cache.cache)
    cache.recorder.run("aten::relu_.default", between)
    found["what was between is changed by another"] = (cache, cache.placed(between), ())
    cache = Cache()
    made = cache.placed(cache.cache)
    cache.recorder.run("aten::relu_.default", made)
    found["what was made is changed by another"] = (cache, made, ())
    cache = Cache()
    strided = cache.recorder.run("aten::as_strided.default", cache.x, Many((6,)), Many((1,)), 0)
    found["something addresses memory from its start"] = (cache, cache.placed(cache.cache), (strided,))
    return found


@pytest.mark.parametrize("why", forbidden())
def test_it_is_not_done_in_place_where(why: str) -> None:
    cache, final, outputs = forbidden()[why]
    assert cache.chains(final, *outputs) == ()


def test_a_value_that_two_targets_are_given_is_copied_to_both() -> None:
    cache = Cache()
    other = cache.recorder.input(torch.zeros(4, 6))
    final = cache.placed(cache.cache)
    program = cache.program(final)
    writes = (*program.writes, WriteBack(other.value, final.value))
    assert chains_in(program.graph, program.writes)
    assert chains_in(program.graph, writes) == ()


def test_a_later_call_of_the_same_operator_that_reads_the_old_contents_forbids_it() -> None:
    recorder = Recorder()
    cache = recorder.input(torch.zeros(4, 6))
    doubled = recorder.run("aten::mul.Scalar", cache, 2.0)
    summed = recorder.run("aten::add.Tensor", doubled, cache)
    program = dataclasses.replace(recorder.build([doubled, summed]), writes=(WriteBack(cache.value, doubled.value),))
    first, second = program.graph.operators
    merged = dataclasses.replace(first, calls=first.calls + second.calls, writes=(doubled.value, summed.value))
    graph: OpGraph = dataclasses.replace(program.graph, operators=(merged,))
    graph.validate()
    assert chains_of(program) != ()
    assert chains_in(graph, program.writes) == ()


def test_calls_of_one_operator_may_be_a_chain() -> None:
    recorder = Recorder()
    cache, x = recorder.input(torch.zeros(4, 6)), recorder.input(torch.ones(4, 6))
    final = recorder.region(("aten::mul.Scalar", [cache, 0.5]), ("aten::add.Tensor", [None, x]))
    program = dataclasses.replace(recorder.build([final]), writes=(WriteBack(cache.value, final.value),))
    (chain,) = chains_of(program)
    assert [(link.operator, link.call) for link in chain.links] == [(0, 0), (0, 1)]
    assert in_graph_order(program.graph, chain)


def test_a_later_call_of_the_same_operator_that_reads_nothing_but_the_old_contents_forbids_it() -> None:
    recorder = Recorder()
    cache = recorder.input(torch.zeros(4, 6))
    doubled = recorder.run("aten::mul.Scalar", cache, 2.0)
    summed = recorder.run("aten::sum.default", cache)
    program = dataclasses.replace(recorder.build([doubled, summed]), writes=(WriteBack(cache.value, doubled.value),))
    first, second = program.graph.operators
    for calls, allowed in ((first.calls + second.calls, 0), (second.calls + first.calls, 1)):
        merged = dataclasses.replace(first, calls=calls, writes=(doubled.value, summed.value))
        graph = dataclasses.replace(program.graph, operators=(merged,))
        graph.validate()
        assert len(chains_in(graph, program.writes)) == allowed


def copied_and_changed(manner: Manner, *outputs: int) -> Program:
    """A compiled program: its second launch copies a cache, the third reads the cache, the fourth changes the copy, the last reads it."""
    spec = TensorSpec((4, 6), (6, 1), "float32")
    roles = [ValueRole.INPUT, ValueRole.INPUT, *[ValueRole.INTERMEDIATE] * 4]
    values = tuple(Value(index, spec, role, index) for index, role in enumerate(roles))
    launches = [
        ("inductor::first", (1,), (2,), ()), (copy_target(manner), (0,), (3,), ()), ("inductor::old", (0, 2), (4,), ()),
        ("inductor::change", (2,), (), (3,)), ("inductor::new", (3,), (5,), ()),
    ]  # fmt: skip
    operators = tuple(
        Operator(
            index=index, name=f"launch{index}", calls=(Call(target, tuple(map(Ref, (*reads, *mutates))), (), made),),
            reads=reads, writes=made, mutates=mutates, flops=0, bytes_read=96, bytes_written=96, signature=target, source="",
        )
        for index, (target, reads, made, mutates) in enumerate(launches)
    )  # fmt: skip
    graph = OpGraph(operators, values, (0, 1), (3, *(outputs or (4, 5))))
    graph.validate()
    cache = Cache()
    plain = cache.program(cache.placed(cache.cache))
    return dataclasses.replace(plain, graph=graph, writes=(WriteBack(0, 3),), source="{}", bindings=(), inputs=())


@pytest.mark.parametrize("manner", list(Manner))
def test_launches_overwrite_the_copy_that_a_compiled_program_makes(manner: Manner) -> None:
    program = copied_and_changed(manner)
    (chain,) = chains_of(program)
    (link,) = chain.links
    assert (link.operator, link.before, link.after) == (1, 0, 3)
    assert others_using(program.graph, link) == (2,)
    assert overwriting(program.graph, link) == (3,)
    # What reads the old contents comes after the copy, which in place is none, and before the launch that changes it.
    assert in_graph_order(program.graph, chain)
    # Something reads what a second run would not find again.
    assert not chain.repeatable


def _with_launch(program: Program, index: int, **changes: object) -> Program:
    operators = list(program.graph.operators)
    operators[index] = dataclasses.replace(operators[index], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(program, graph=dataclasses.replace(program.graph, operators=tuple(operators)))


def test_a_launch_that_changes_the_copy_by_what_it_reads_of_the_old_comes_too_late() -> None:
    program = _with_launch(copied_and_changed(Manner.PLACES), 3, reads=(0, 2))
    (chain,) = chains_of(program)
    assert others_using(program.graph, chain.links[0]) == (2, 3)
    assert overwriting(program.graph, chain.links[0]) == (3,)
    assert not in_graph_order(program.graph, chain)
    assert granted(program, make_plan(program.graph, sequential(program.graph))) == ()


def test_every_launch_that_changes_the_copy_comes_after_what_reads_the_old_contents() -> None:
    program = _with_launch(copied_and_changed(Manner.PLACES), 4, mutates=(3,))
    graph = program.graph
    (chain,) = chains_of(program)
    assert overwriting(graph, chain.links[0]) == (3, 4)
    for order, count in (([0, 1, 2, 3, 4], 1), ([0, 1, 3, 2, 4], 0)):
        assert len(granted(program, make_plan(graph, make_schedule(graph, order, [0] * 5)))) == count


def test_a_launch_that_changes_other_memory_does_not_overwrite_the_copy() -> None:
    plain = copied_and_changed(Manner.PLACES)
    program = _with_launch(plain, 2, mutates=(2,), reads=(0,))
    (chain,) = chains_of(program)
    assert overwriting(program.graph, chain.links[0]) == (3,)
    assert [item.write for item in granted(program, make_plan(program.graph, sequential(program.graph)))] == [0]


def test_a_second_run_of_launches_is_as_good_as_they_say() -> None:
    found = []
    for manner in Manner:
        program = copied_and_changed(manner)
        # Nothing else reads the cache.
        reader = dataclasses.replace(program.graph.operators[2], reads=(2,), calls=(Call("inductor::old", (Ref(2),), (), (4,)),))
        operators = (*program.graph.operators[:2], reader, *program.graph.operators[3:])
        (chain,) = chains_of(dataclasses.replace(program, graph=dataclasses.replace(program.graph, operators=operators)))
        found.append(chain.repeatable)
    assert found == [manner is Manner.PLACES for manner in Manner]


def test_launches_whose_old_contents_leave_the_model_overwrite_nothing() -> None:
    assert chains_of(copied_and_changed(Manner.PLACES, 0)) == ()


def test_other_launches_of_a_compiler_are_left_alone() -> None:
    program = copied_and_changed(Manner.PLACES)
    operators = list(program.graph.operators)
    operators[1] = dataclasses.replace(operators[1], calls=(Call("inductor::else", (Ref(0),), (), (3,)),))
    assert chains_of(dataclasses.replace(program, graph=dataclasses.replace(program.graph, operators=tuple(operators)))) == ()


@pytest.mark.parametrize(
    ("call", "manner"),
    [
        (Call("aten::index_put.default", (Ref(0), Many((Ref(1),)), Ref(2)), (), (3,)), Manner.PLACES),
        (Call("aten::index_put.default", (Ref(0), Many((Ref(1),)), Ref(2), True), (), (3,)), Manner.UPDATES),
        (Call("aten::index_put.default", (Ref(0), Many((Ref(1),)), Ref(2)), (("accumulate", True),), (3,)), Manner.UPDATES),
        (Call("aten::index_add.default", (Ref(0), 0, Ref(1), Ref(2)), (), (3,)), Manner.UPDATES),
        (Call("aten::cat.default", (Many((Ref(0),)),), (), (3,)), None),
    ],
)
def test_what_a_second_run_would_do_depends_on_the_arguments(call: Call, manner: Manner | None) -> None:
    assert manner_of(call) is manner


def test_outputs_that_are_an_inputs_memory_are_told_from_views_of_it() -> None:
    cache = Cache()
    final = cache.placed(cache.cache)
    view = cache.recorder.run("aten::t.default", final)
    program = cache.program(final, view)
    assert outputs_overwritten(program.graph, chains_of(program)) == {0: 0}


def test_random_programs_have_chains_of_every_kind() -> None:
    programs = [random_stateful_program(random.Random(seed))[0] for seed in range(60)]
    chains = [chain for program in programs for chain in chains_of(program)]
    assert any(len(chain.links) > 2 for chain in chains)
    assert any(chain.repeatable for chain in chains)
    assert sum(len(program.writes) for program in programs) > len(chains)
