"""What is compiled first, where there may be no time for all of it. Nothing is compiled here."""

from __future__ import annotations

import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.graph import OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Ref
from autosched.core.variants import Lowering, Variant
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.regions.order import Wanted, gain_bytes, most_gain_first
from autosched.runtime.regions.pieces import Piece, pieces_of


class Uneven(nn.Module):
    """A small region, a large one, and one as large twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = torch.relu(torch.tanh(x[:8]) * 2.0).cumsum(0)
        large = torch.relu(torch.tanh(x) * 3.0).cumsum(0)
        first = torch.exp(torch.sin(large) + 1.0).cumsum(0)
        second = torch.exp(torch.sin(first) + 1.0).cumsum(0)
        return small.sum() + second.sum()


def asked(key: str, gain: int, *, width: int = 2, operator: int = 0, variant: int = 1) -> Wanted:
    return Wanted(key, operator, 0, width, variant, gain)


def test_what_gains_most_comes_first_and_what_serves_several_operators_counts_for_each() -> None:
    wanted = [asked("a", 5, operator=0), asked("b", 9, operator=1), asked("c", 6, operator=2), asked("c", 6, operator=3)]
    assert [(item.key, item.operator) for item in most_gain_first(wanted)] == [("c", 2), ("b", 1), ("a", 0)]
    assert most_gain_first([]) == []


def test_code_for_fewer_threads_waits_for_what_gains_half_of_it() -> None:
    wanted = [asked(f"{key}{width}", gain, width=width) for width in (1, 2) for key, gain in (("a", 9), ("b", 10), ("c", 4))]
    assert [item.key for item in most_gain_first(wanted)] == ["b2", "a2", "b1", "a1", "c2", "c1"]


def test_one_variant_comes_after_the_other_and_equals_as_they_are() -> None:
    wanted = [asked("a", 1, variant=1), asked("b", 2, variant=1), asked("d", 7, variant=3), asked("e", 7, variant=3)]
    assert [item.key for item in most_gain_first(wanted)] == ["b", "a", "d", "e"]


def test_the_regions_of_a_program_are_asked_for_by_what_they_save() -> None:
    program = capture(Uneven().eval(), (torch.randn(900, 64),), lowering=Lowering.FUSED).program
    graph = program.graph
    library = RegionLibrary(program, torch.device("cpu"), "scope")
    several = [place for place in range(len(graph)) if Variant.COMPILED in library.variants(place)]
    jobs = list(library._jobs([(operator, width, Variant.COMPILED) for width in (1, 2) for operator in several]).values())
    assert [job.number for job in jobs] == list(range(len(jobs)))

    def name(operator: int) -> str:
        return " ".join(call.target for call in graph.operators[operator].calls)

    def saved(operator: int) -> int:
        return sum(gain_bytes(piece, graph) for piece in pieces_of(graph.operators[operator], graph) if piece.compiled)

    sines = [place for place in several if "sin" in name(place)]
    assert len(sines) > len({job.operator for job in jobs} & set(sines)) == 1
    small, large = sorted((place for place in several if "tanh" in name(place)), key=saved)
    places = {(job.operator, job.width): place for place, job in enumerate(jobs)}
    assert places[large, 2] < places[small, 2] < places[small, 1]
    assert places[large, 1] < places[small, 2]
    assert places[sines[0], 2] < places[large, 2]


def test_a_region_saves_what_its_calls_move_between_them() -> None:
    graph = capture(Uneven().eval(), (torch.randn(900, 64),), lowering=Lowering.FUSED).program.graph
    operator = next(item for item in graph.operators if any("tanh" in call.target for call in item.calls) and item.bytes_read > 100_000)
    (piece,) = [piece for piece in pieces_of(operator, graph) if piece.compiled]
    calls = sum("tanh" in call.target or "mul" in call.target or "relu" in call.target for call in piece.calls)
    # Each value between two calls is written once and read once.
    between = 2 * (calls - 1) * 900 * 64 * 4
    assert gain_bytes(piece, graph) >= between


def gain_of(rows: int, *calls: Call) -> int:
    """Of a piece that reads value 0 and writes value 2: floats, ``[rows, 64]``, as value 1 is; value 3 is a matrix of as many columns."""
    shapes = [(rows, 64)] * 3 + [(64, 64)]
    specs = [TensorSpec(shape, "float32", (64, 1)) for shape in shapes]
    roles = [ValueRole.INPUT, ValueRole.INTERNAL, ValueRole.INTERMEDIATE, ValueRole.CONSTANT]
    values = tuple(Value(index, *each, index) for index, each in enumerate(zip(specs, roles, strict=True)))
    reads = tuple(value for value in (0, 3) if any(value in call.reads() for call in calls))
    return gain_bytes(Piece(calls, reads, (2,), compiled=True), OpGraph((), values, (0,), (2,)))


def test_what_is_saved_is_what_is_between_and_what_calls_take() -> None:
    one, two = Call("aten::tanh.default", (Ref(0),), (), (1,)), Call("aten::sort.default", (Ref(1),), (), (2, -1))
    alone = Call("aten::tanh.default", (Ref(0),), (), (2,))
    # Written and read.
    assert gain_of(20, one, two) - gain_of(10, one, two) == 2 * 10 * 64 * 4
    # Nothing, of a single call; nor do results count that nobody reads, or what is read twice.
    assert gain_of(10, alone) == 0
    assert gain_of(20, one, Call("aten::mul.Tensor", (Ref(1), Ref(1)), (), (2,))) == gain_of(20, one, two)
    # A matrix is read as it is kept where a few rows are multiplied with it.
    product = Call("aten::linear.default", (Ref(1), Ref(3)), (), (2,))
    assert gain_of(1, one, product) - gain_of(1, one, two) == 64 * 4 + 64 * 64 * 4
