"""Code that Inductor writes for a model that changes memory: it overwrites what it is given, on a copy or, where nobody sees, in place."""

from __future__ import annotations

import copy
import dataclasses
import random
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from autosched.capture.export import Captured, capture
from autosched.core.in_place import Chain, chains_of, is_copy
from autosched.core.program import Program
from autosched.core.schedule import make_schedule, sequential
from autosched.core.variants import Lowering
from autosched.pipeline import inductor_capture
from autosched.pipeline.inductor_capture import lower_inductor
from autosched.runtime.in_place import granted, in_place
from autosched.runtime.inductor import bind as inductor_bind
from autosched.runtime.inductor.bind import Recording, bind_recorded, bound_of, forms_of, record
from autosched.runtime.inductor.common import Refused
from autosched.runtime.inductor.source import Unrecognised, read_module
from autosched.runtime.inductor.units import Overwritten, make_units
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.load import load
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from tests.conformance.compiling import compiling
from tests.conformance.graphs import random_placement
from tests.conformance.stateful import (
    ChangesItsInput,
    KeyValueCache,
    LongCache,
    ReadBeforeAndAfter,
    ReturnsItsMemory,
    Stateful,
    assert_like_eager,
    bundle_bytes,
    example,
    made,
)
from tests.conformance.stateful_programs import random_run_order, random_stateful_program, run_in

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one test has compiled another finds."""
    with compiling(tmp_path_factory.mktemp("cache"), 1):
        yield


def copies_in(program: Program) -> int:
    return sum(is_copy(call) for operator in program.graph.operators for call in operator.calls)


def same(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return compare(mine, theirs).bitwise


# -- loaded models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ReadBeforeAndAfter, KeyValueCache, ReturnsItsMemory, ChangesItsInput])
def test_calls_in_a_row_are_those_of_the_model_in_place_and_on_copies(kind: type[Stateful]) -> None:
    model = made(kind)
    data = bundle_bytes(model, (example(),), Lowering.INDUCTOR)
    copied = []
    for written_in_place in (True, False):
        model = made(kind)
        loaded = load(data, model, strict=True, in_place=written_in_place)
        assert_like_eager(loaded, model, [(example(),) for _ in range(5)])
        report = loaded.report()
        assert report.calls == 5
        copied.append(report.shapes[0].copied_back_bytes)
    assert copied[0] == 0 < copied[1]


def test_a_cache_is_neither_made_anew_nor_copied_and_costs_what_is_put_there() -> None:
    model = made(LongCache)
    captured = lower_inductor(capture(model, (example(),), lowering=Lowering.ATEN), CPU)
    assert isinstance(captured, Captured)
    graph = captured.program.graph
    chains = chains_of(captured.program)
    # The place in the cache is counted by the model: that is no second run like the first.
    assert [chain.repeatable for chain in chains].count(True) == 2
    for chain in chains:
        copied = graph.operators[chain.links[0].operator]
        moved = copied.bytes_read, copied.bytes_written
        whole = graph.values[chain.links[0].before].spec.bytes
        assert moved == ((0, 0) if chain.repeatable else (whole, whole))
        assert copied.signature.endswith("+in_place") is chain.repeatable
        assert copied.flops == 0
        writer = next(operator for operator in graph.operators if chain.links[0].after in operator.mutates)
        assert writer.bytes_written < whole or not chain.repeatable


# -- programs ---------------------------------------------------------------------------------------------------------


def test_in_every_order_that_a_plan_allows_in_place_is_equal_to_the_bit() -> None:
    """Random programs, compiled; what is granted never shows."""
    counts = {"granted": 0, "lanes": 0}
    for seed in (3, 8, 17, 23):
        rng = random.Random(seed)
        program, constants = random_stateful_program(rng)
        found = record(program, constants, CPU)
        assert isinstance(found, Recording), found.reason
        chains = chains_of(program)
        assert copies_in(found.program) == len(chains_of(found.program)) == len(chains)
        bound, inputs = bound_of(found, program, constants, CPU), random_inputs(program, seed)
        wanted = bind(program, constants, CPU).run([tensor.clone() for tensor in inputs])
        expected = bound.run([tensor.clone() for tensor in inputs])
        by_value = dict(zip(found.program.graph.outputs, expected, strict=True))
        for theirs, ours in zip(program.writes, found.program.writes, strict=True):
            torch.testing.assert_close(by_value[ours.value], wanted[program.graph.outputs.index(theirs.value)])
        graph = found.program.graph
        for _ in range(6):
            plan = make_plan(graph, random_placement(rng, graph, rng.randrange(1, 4)))
            allowed = granted(found.program, plan)
            counts["granted"] += len(allowed)
            counts["lanes"] += len({step.lane for step in plan.steps}) > 1
            given = [tensor.clone() for tensor in inputs]
            assert same(run_in(random_run_order(rng, plan), in_place(bound, allowed), given), expected), seed
            changed = {graph.inputs.index(chain.links[0].before) for chain in allowed}
            assert all(place in changed or torch.equal(given[place], inputs[place]) for place in range(len(inputs)))
    assert counts["granted"] > 0 < counts["lanes"]


class ReadsOldContents(Stateful):
    """A product with what was there, which is a launch of its own, before it is changed, and one with what is there then."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        old = x @ self.memory.t()
        self.memory.mul_(0.5).add_(x)
        return old, x @ self.memory.t()


def reads_old_contents() -> tuple[Program, Any, Chain, int]:
    """Its program, bound; the write-back; and the launch that reads what was there."""
    captured = lower_inductor(capture(made(ReadsOldContents), (example(),), lowering=Lowering.ATEN), CPU)
    assert isinstance(captured, Captured)
    (chain,) = chains_of(captured.program)
    readers = [operator.index for operator in captured.program.graph.operators if chain.links[0].before in operator.reads]
    (reader,) = [index for index in readers if index != chain.links[0].operator]
    return captured.program, bind(captured.program, captured.constants, CPU), chain, reader


def test_a_reader_of_the_old_contents_on_another_lane_must_be_waited_for() -> None:
    program, bound, chain, reader = reads_old_contents()
    graph = program.graph
    inputs = random_inputs(program, 5)
    expected = bound.run([tensor.clone() for tensor in inputs])
    order = range(len(graph))
    apart = make_plan(graph, make_schedule(graph, order, [int(index == reader) for index in order]))
    assert granted(program, make_plan(graph, sequential(graph))) == (chain,)
    assert granted(program, apart) == ()
    # And rightly: the reader may be last.
    late = sorted(order, key=lambda index: (index == reader, index))
    assert not same(run_in(late, in_place(bound, [chain]), [tensor.clone() for tensor in inputs]), expected)
    assert same(run_in(late, bound, [tensor.clone() for tensor in inputs]), expected)


def test_a_program_that_was_compiled_without_overwriting_is_compiled_so_again() -> None:
    captured = capture(made(ReadBeforeAndAfter), (example(),), lowering=Lowering.ATEN)
    assert forms_of(captured.program) == (True, False)
    for asked in (True, False):
        found = record(captured.program, captured.constants, CPU, in_place=asked)
        assert isinstance(found, Recording), found.reason
        assert copies_in(found.program) == (2 if asked else 0)
        pairs = zip(captured.program.bindings, found.program.bindings, strict=True)
        constants = {ours.value: captured.constants[theirs.value] for theirs, ours in pairs}
        assert bind_recorded(found.program, constants, CPU).program == found.program


def test_what_cannot_be_done_overwriting_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(made(KeyValueCache), (example(),), lowering=Lowering.ATEN)
    real = inductor_bind.make_units

    def refusing(module: Any, constants: Any, overwritten: Any, owning: Any) -> Any:
        if overwritten:
            raise Unrecognised("no")
        return real(module, constants, overwritten, owning)

    monkeypatch.setattr(inductor_bind, "make_units", refusing)
    found = lower_inductor(captured, CPU)
    assert isinstance(found, Captured)
    assert copies_in(found.program) == 0
    assert len(found.program.writes) == 3


def test_a_model_that_changes_nothing_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval(), (torch.randn(2, 4),), lowering=Lowering.ATEN)
    asked: list[bool] = []

    def refused(*given: object, in_place: bool) -> Refused:
        asked.append(in_place)
        return Refused("no")

    monkeypatch.setattr(inductor_capture, "record", refused)
    assert isinstance(lower_inductor(captured, CPU), Refused)
    assert asked == [False]


# -- generated code ---------------------------------------------------------------------------------------------------


_CODE = """
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''x''')
def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    buf0 = empty_strided_cpu((4, ), (1, ), torch.float32)
    cpp_fused_0(reinterpret_tensor(arg0_1, (4, ), (1, ), 4), buf0)
{body}
    return (buf0, {returned})
"""


def units_of(body: str, returned: str = "reinterpret_tensor(arg0_1, (2, ), (1, ), 2)") -> Any:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    asked = Overwritten("inductor::copy.places", "empty_strided_cpu((8, ), (1, ), torch.float32)")
    return make_units(read_module(_CODE.format(body=lines, returned=returned)), (), {"arg0_1": asked})


def test_an_argument_stands_for_its_copy_from_where_it_is_overwritten() -> None:
    found = units_of("buf1 = reinterpret_tensor(arg0_1, (4, ), (1, ), 0)\ncpp_fused_0(arg1_1, buf1)\ncpp_fused_0(buf1, buf0)")
    assert found.copies == {"arg0_1": "arg0_1_copy"}
    assert [unit.name for unit in found.units] == ["cpp_fused_0", "copy", "cpp_fused_0.1", "cpp_fused_0.2", "view"]
    before, copied, changing, after, view = found.units
    assert "arg0_1" in before.reads
    assert (list(copied.reads), list(copied.makes)) == (["arg0_1"], ["arg0_1_copy"])
    assert list(changing.changes) == ["arg0_1_copy"]
    assert "arg0_1_copy" in after.reads
    assert "slots['arg0_1_copy']" in view.makes[found.returned[1]]
    assert found.owner[found.returned[1]] == "arg0_1_copy"
    assert all("slots['arg0_1']" not in line for unit in (changing, after, view) for line in unit.lines)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("pass", "no launch overwrites arg0_1"),
        ("buf1 = torch.ops.aten.select.int(arg0_1, 0, 1)\ncpp_fused_0(arg1_1, buf1)", "buf1 lies in arg0_1, which is overwritten"),
        ("buf1 = torch.ops.aten.select.int(arg0_1, 0, 1)\ncpp_fused_0(arg1_1, arg0_1)\ncpp_fused_0(buf1, buf0)", "buf1 lies in arg0_1"),
    ],
)
def test_code_that_overwrites_otherwise_is_a_reason(body: str, why: str) -> None:
    with pytest.raises(Unrecognised, match=why):
        units_of(body.replace("pass", "cpp_fused_0(arg1_1, buf0)"))


_OVERWRITES = "cpp_fused_0(arg1_1, arg0_1)\nbuf1 = empty_strided_cpu((4, ), (1, ), torch.float32)\n"


def test_a_kernel_may_read_memory_that_nobody_has_written() -> None:
    reading, *_ = reversed(units_of(_OVERWRITES + "cpp_fused_0(buf1, buf0)", "buf0").units)
    assert reading.lines[0] == "buf1 = empty_strided_cpu((4,), (1,), torch.float32)"
    assert "buf1" not in {*reading.reads, *reading.makes}


def test_of_anything_but_a_kernel_that_is_a_sign_of_having_misread_the_code() -> None:
    with pytest.raises(Unrecognised, match="buf1 is read before it is written"):
        units_of(_OVERWRITES + "buf2 = torch.ops.aten.clone.default(buf1)", "buf2")


def test_two_models_are_not_taken_for_one_by_what_is_kept() -> None:
    """One that may overwrite, one that may not: the code differs, and what is kept of one is not found for the other."""
    captured = capture(made(ChangesItsInput), (example(),), lowering=Lowering.ATEN)
    programs = []
    for asked in (True, False, True):
        found = record(captured.program, captured.constants, CPU, in_place=asked)
        assert isinstance(found, Recording), found.reason
        programs.append(dataclasses.replace(copy.deepcopy(found.program), source=""))
    assert programs[0] == programs[2] != programs[1]


def test_copies_of_random_placements_are_launches_like_others() -> None:
    program, bound, chain, _ = reads_old_contents()
    rng = random.Random(4)
    inputs = random_inputs(program, 6)
    expected = bound.run([tensor.clone() for tensor in inputs])
    granted_in = 0
    for _ in range(20):
        plan = make_plan(program.graph, random_placement(rng, program.graph, 3))
        allowed = granted(program, plan)
        granted_in += allowed == (chain,)
        given = [tensor.clone() for tensor in inputs]
        assert same(run_in(random_run_order(rng, plan), in_place(bound, allowed), given), expected)
    assert 0 < granted_in < 20
