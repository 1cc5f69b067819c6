"""Variants in a tuning job: the fastest alone stands for its width, others get their chance in the schedule. Times are made up."""

from __future__ import annotations

import dataclasses
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.errors import UsageError
from autosched.core.progress import Silent
from autosched.core.records import Contamination, DeviceKey, Engine, Failure, FailureKind, PairRecord, Samples, SoftwareKey, SoloRecord
from autosched.core.report import LoweringOutcome
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.core.variants import Lowering, Variant, lowering_named, variant_signature
from autosched.costmodel.table import OTHER, make_cost_table
from autosched.datasets.choices import PairChoice
from autosched.datasets.facts import device_facts
from autosched.datasets.journal import Journal, Scope
from autosched.device.timing import summarize
from autosched.device.variants import NO_TIME
from autosched.pipeline import granularity, variants
from autosched.pipeline.compiling import _refusal_notes, compile_variants
from autosched.pipeline.granularity import Considered, considered
from autosched.pipeline.left_out import left_out_sentence
from autosched.pipeline.measuring import Ledger, _with_other_variants
from autosched.pipeline.variants import VariantTimes, _chosen, try_variants
from autosched.search import fluid, simulate
from autosched.search.problem import Problem
from autosched.search.strategy import STRATEGIES, SearchContext
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches

KILLED = Failure(FailureKind.CRASH, "the measuring process was killed by SIGSEGV")


class Pair(nn.Module):
    """Two regions with a compiled variant that may run at the same time."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = torch.relu(torch.tanh(x) * 2.0).cumsum(0)
        return (left @ (torch.exp(y) - 1.0).cumsum(0)).sum()


@pytest.fixture(scope="module")
def graph():  # type: ignore[no-untyped-def]
    return capture(Pair().eval(), (torch.randn(8, 8), torch.randn(8, 16).t()[:8, :8]), lowering=Lowering.FUSED).program.graph


def record(signature: str, width: int, time_us: float) -> SoloRecord:
    samples: Samples = summarize([time_us] * 5)
    return SoloRecord(signature, width, samples, Contamination())


def times(graph, table: dict[int, tuple[float, float]]) -> VariantTimes:  # type: ignore[no-untyped-def]
    """Solo times of the calls and of the compiled code; operators that are not in ``table`` have but their calls, at 10 us."""
    columns = [(1, 0), (1, 1)]
    unavailable = Failure(FailureKind.UNAVAILABLE, "no such variant")
    rows: list[list[SoloRecord | Failure]] = []
    for operator in graph.operators:
        calls, compiled = table.get(operator.index, (10.0, 0.0))
        second = record(variant_signature(operator.signature, 1), 1, compiled) if compiled else unavailable
        rows.append([record(operator.signature, 1, calls), second])
    return _chosen(graph, (1,), columns, rows)


def test_the_fastest_variant_stands_for_a_width_and_close_ones_stay_in_play(graph) -> None:  # type: ignore[no-untyped-def]
    found = times(graph, {0: (10.0, 8.0), 1: (10.0, 30.0)})
    assert [int(item) for item in found.best[:, 0]][:2] == [1, 0]
    assert found.of(0, 1) == Variant.COMPILED
    assert found.solo[0][0].samples.median_us == 8.0
    assert [variant for variant, _ in found.others[0, 0]] == [0]
    assert found.others[1, 0] == ()


def test_pairs_of_variants_that_are_not_in_play_are_left_out_and_the_rest_named_after_their_operators(graph) -> None:  # type: ignore[no-untyped-def]
    found = times(graph, {0: (10.0, 8.0)})
    a, b = graph.operators[0].signature, graph.operators[1].signature

    def pair(first: str, last: str) -> PairRecord:
        return PairRecord(first, 1, last, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1, 1, 5, Contamination())

    kept = found.to_operators(graph, [pair(variant_signature(a, 1), b), pair(a, b), pair("other", b)])
    assert [(item.first, item.last) for item in kept] == [(a, b), (a + OTHER, b)]
    far = times(graph, {0: (20.0, 8.0)})
    assert far.other(0) is None
    assert [(item.first, item.last) for item in far.to_operators(graph, [pair(variant_signature(a, 1), b), pair(a, b)])] == [(a, b)]


def test_the_search_chooses_the_variant_that_is_slower_alone_and_the_better_neighbour(graph) -> None:  # type: ignore[no-untyped-def]
    found = times(graph, {1: (10.0, 8.0), 2: (10.0, 9.0)})
    assert found.other(1) == Variant.CALLS
    a, b = (graph.operators[index].signature for index in (1, 2))

    def pair(first: str, last: str, slowdown: float) -> PairRecord:
        return PairRecord(first, 1, last, 1, 8.0, 9.0, 16.0, slowdown, slowdown, 1.0, 1, 1, 99, Contamination())

    def chosen(pairs: list[PairRecord]) -> tuple[int, ...]:
        device = device_facts(DeviceKey("cuda", "made up", ()))
        table = make_cost_table(
            graph, found.solo, pairs, widths=(1,), launch_gap_us=1.0, cross_lane_us=1.0, fixed_us=0.0, max_lanes=2, device=device,
            others=found.other_solo,
        )  # fmt: skip
        problem = Problem.make(graph, found.in_table(table))
        schedule = STRATEGIES.get("portfolio").propose(problem, SearchContext(np.random.default_rng(0), max_evaluations=2000))[0]
        assert simulate.simulate(problem, schedule) == fluid.simulate(problem, schedule)
        return schedule.variant[1:3]

    good = [pair(a + OTHER, b, 1.0), pair(b, a + OTHER, 1.0)]
    bad = [pair(first, last, 4.0) for first, last in ((a, b), (b, a), (a, b + OTHER), (b + OTHER, a), (a + OTHER, b + OTHER))]
    assert chosen([*good, *bad]) == (0, 1)
    assert chosen([dataclasses.replace(item, slowdown_first=1.0, slowdown_last=1.0) for item in bad]) == (1, 1)


def test_pairs_with_another_variant_are_measured_once(graph) -> None:  # type: ignore[no-untyped-def]
    found = times(graph, {1: (10.0, 8.0), 2: (30.0, 9.0)})
    a, b = (graph.operators[index].signature for index in (1, 2))
    likely = [PairChoice(1, 2, 1, 1), PairChoice(2, 1, 1, 1)]
    asked = _with_other_variants(graph, likely, found, known=())
    assert [(item.choice.first, item.first_variant, item.last_variant) for item in asked] == [(1, 0, 1), (2, 1, 0)]
    assert _with_other_variants(graph, likely, found, known={(a + OTHER, 1, b, 1), (b, 1, a + OTHER, 1)}) == []


def test_another_variant_is_one_that_the_same_engine_runs(graph) -> None:  # type: ignore[no-untyped-def]
    first, second = record("a", 1, 8.0), record("b", 1, 9.0)
    python = dataclasses.replace(second, engine=Engine.PYTHON)
    native = dataclasses.replace(first, engine=Engine.NATIVE)
    assert variants._next([(0, second), (1, first)], first, [0]) == (0, second)
    assert variants._next([(0, python), (1, native)], native, [0]) is None


class Bench:
    """Answers what a function says of a schedule."""

    def __init__(self, time_us) -> None:  # type: ignore[no-untyped-def]
        self.time_us = time_us
        self.asked: list[Schedule] = []

    def measure(self, schedules, rounds):  # type: ignore[no-untyped-def]
        self.asked += schedules
        return [[self.time_us(schedule)] * rounds for schedule in schedules]

    def trace(self, schedules):  # type: ignore[no-untyped-def]
        return [Failure(FailureKind.UNAVAILABLE, "") for _ in schedules]


def test_a_variant_that_is_slower_alone_is_kept_where_it_is_the_better_neighbour(graph) -> None:  # type: ignore[no-untyped-def]
    found = times(graph, {0: (10.0, 8.0), 1: (10.0, 9.0)})
    start = dataclasses.replace(sequential(graph), variant=tuple(int(item) for item in found.best[:, 0]))
    bench = Bench(lambda schedule: 100.0 + 10.0 * schedule.variant[0])
    assert try_variants(bench, start, graph, found).variant[:2] == (0, 1)
    assert len(bench.asked) <= 6 + 1 + 3


def test_noise_and_failures_leave_the_schedule_as_it_is(graph) -> None:  # type: ignore[no-untyped-def]
    found = times(graph, {0: (10.0, 8.0)})
    start = dataclasses.replace(sequential(graph), variant=tuple(int(item) for item in found.best[:, 0]))
    assert try_variants(Bench(lambda schedule: 100.0 - 0.1 * (1 - schedule.variant[0])), start, graph, found) is start

    class Broken(Bench):
        def measure(self, schedules, rounds):  # type: ignore[no-untyped-def]
            return [[100.0], *(Failure(FailureKind.CRASH, "") for _ in schedules[1:])]

    assert try_variants(Broken(None), start, graph, found) is start
    assert try_variants(bench := Bench(lambda schedule: 1.0), start, graph, times(graph, {})) is start
    assert bench.asked == []


def test_schedules_made_from_a_table_run_the_variants_its_times_are_of(graph) -> None:  # type: ignore[no-untyped-def]
    from autosched.core.costs import CostTable

    count = len(graph)
    kernel = np.arange(2 * count, dtype=np.int32).reshape(count, 2)
    ones = np.ones((2 * count, 2 * count))
    variant = np.zeros((count, 2), dtype=np.int32)
    variant[0] = (0, 1)
    costs = CostTable((1, 2), kernel, np.full(2 * count, 5.0), ones, ones, 1.0, 1.0, 1.0, 2, variant=variant)
    problem = Problem.make(graph, costs)
    order, lane = range(count), [0] * count
    assert problem.schedule(order, lane).variant == (0,) * count
    assert problem.schedule(order, lane, width_index=[1] * count).variant == (1,) + (0,) * (count - 1)
    with pytest.raises(UsageError, match="variant has shape"):
        dataclasses.replace(costs, variant=variant[:1])
    other = dataclasses.replace(costs, other_kernel=kernel[:, 1].copy(), other_variant=np.full(count, 3, dtype=np.int32))
    problem = Problem.make(graph, other)
    changed = problem.schedule(order, lane, width_index=[2, *[0] * (count - 1)])
    assert (changed.width[0], changed.variant[0]) == (1, 3)
    assert problem.width_indices(changed).tolist() == [2, *[0] * (count - 1)]
    with pytest.raises(UsageError, match="other_variant has shape None"):
        dataclasses.replace(other, other_variant=None)
    assert make_schedule(graph, order, lane, variant=[1] * count).variant == (1,) * count


def test_lowerings_by_name_by_device_and_by_the_older_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granularity, "missing_compiler", lambda kind: "")
    for asked in (None, "auto"):
        assert considered(asked, rewrite=True, kind="cpu").lowerings == (Lowering.REWRITTEN, Lowering.FUSED, Lowering.INDUCTOR)
        assert considered(asked, rewrite=True, kind="cuda").lowerings == (Lowering.FUSED, Lowering.INDUCTOR, Lowering.REWRITTEN)
        # A recording holds the operators of one lowering.
        assert considered(asked, rewrite=True, kind="replay") == Considered((Lowering.REWRITTEN,), (), chosen=False)
        assert considered(asked, rewrite=True, kind="toychip") == Considered((Lowering.REWRITTEN,), (), chosen=False)
    with pytest.raises(UsageError, match="rewritten or aten"):
        considered("fused", rewrite=True, kind="toychip")
    assert considered(None, rewrite=False, kind="cuda") == Considered((Lowering.ATEN,), (), chosen=False)
    assert considered("inductor", rewrite=True, kind="cpu") == Considered((Lowering.INDUCTOR,), (), chosen=False)
    with pytest.raises(UsageError, match="expected one of aten, rewritten, fused, inductor, max_autotune, max_autotune_combo, auto"):
        considered("coarse", rewrite=True, kind="cpu")
    assert considered("aten", rewrite=False, kind="cpu") == Considered((Lowering.ATEN,), (), chosen=False)
    with pytest.raises(UsageError, match="lowering aten, and --lowering for fused"):
        considered("fused", rewrite=False, kind="cpu")
    assert lowering_named("aten") is Lowering.ATEN
    monkeypatch.setattr(granularity, "missing_compiler", lambda kind: "Triton is not installed")
    choice = considered(None, rewrite=True, kind="cuda")
    assert choice.lowerings == (Lowering.REWRITTEN,)
    assert [(row.lowering, row.outcome, row.why) for row in choice.skipped] == [
        ("fused", LoweringOutcome.SKIPPED, "Triton is not installed"),
        ("inductor", LoweringOutcome.SKIPPED, "Triton is not installed"),
    ]


def test_a_report_beaten_by_a_compiler_points_to_compiled_lowerings() -> None:
    report = two_branches_bundle(TwoBranches()).evidence.report
    beaten = dataclasses.replace(report, best_baseline="torch_compile", lowering="rewritten")
    assert "--lowering auto" in granularity.coarser_note(beaten)
    assert granularity.coarser_note(dataclasses.replace(beaten, lowering="fused")) == ""
    assert granularity.coarser_note(dataclasses.replace(beaten, best_baseline="sequential")) == ""


@pytest.mark.parametrize(
    ("failed", "failure", "known"),
    [
        ((2, Variant.CALLS), KILLED, True),
        # The compiled code stands for it.
        ((1, Variant.CALLS), KILLED, True),
        ((1, Variant.COMPILED), KILLED, True),
        ((2, Variant.CALLS), Failure(FailureKind.OOM, "out of memory"), False),
        ((1, None), KILLED, False),
    ],
)
def test_what_ended_a_process_in_an_earlier_job_is_known_where_there_is_another_way(  # type: ignore[no-untyped-def]
    failed: tuple[int, int | None], failure: Failure, known: bool, graph, tmp_path: Path
) -> None:
    key = DeviceKey("cpu", "double", ())
    offered = [(Variant.CALLS, Variant.COMPILED)] * len(graph)
    columns = [(width, int(variant)) for variant in offered[0] for width in (1, 2)]
    with Journal.open(tmp_path / "j", Scope(key, SoftwareKey(()))) as journal:
        for (width, variant), operator in product(columns, graph.operators):
            name = variant_signature(operator.signature, variant)
            broken = operator.index == 0 and width == failed[0] and failed[1] in (variant, None)
            journal.add_solo(name, width, failure if broken else record(name, width, 10.0))
        found = variants._known(journal, graph, device_facts(key), offered, columns, 5, lambda *_: False, again=False)
    assert (found is not None) is known
    if found is not None:
        assert [item for row in found for item in row if isinstance(item, Failure)] == [failure]


def test_what_cannot_be_had_is_told_from_what_runs_call_by_call(graph) -> None:  # type: ignore[no-untyped-def]
    offered = [(Variant.CALLS, Variant.COMPILED, Variant.TEMPLATES)] * len(graph)
    names = [operator.name for operator in graph.operators]
    templates, compiled = int(Variant.TEMPLATES), int(Variant.COMPILED)
    said = _refusal_notes(graph, offered, {(0, templates): "no template", (1, compiled): "too odd", (1, templates): "no template"})
    assert said == [f"not compiled, runs call by call: {names[1]}: too odd", f"cannot be had as templates: {names[0]}: no template"]
    assert _refusal_notes(graph, offered, {(-1, compiled): "there is no Triton"}) == [
        "not compiled, runs call by call: every region: there is no Triton"
    ]


@pytest.mark.parametrize(("compiled", "told"), [(2, True), (1, False), (0, False)])
def test_a_few_operators_do_not_tell_how_long_the_others_take_to_compile(compiled: int, told: bool) -> None:
    class Compiler:
        """Has time for the first ``compiled`` of eight operators."""

        limits = SimpleNamespace(widths=(1,))

        def offered(self) -> tuple[tuple[int, ...], ...]:
            return ((Variant.CALLS, Variant.COMPILED),) * 8

        def prepare_variants(self, columns: object, limit_s: float | None = None) -> tuple[int, int]:
            return compiled, 1

        def compile_variant(self, width: int, variant: int, limit_s: float | None = None) -> dict[int, str]:
            return {operator: "" if operator < compiled else NO_TIME for operator in range(8)}

        def solo_variants(self, columns: object, *, repeats: int) -> list[list[SoloRecord | Failure]]:
            raise AssertionError("nothing is timed here")

    operators = tuple(SimpleNamespace(index=place, name=f"op{place}") for place in range(8))
    program = SimpleNamespace(graph=SimpleNamespace(operators=operators), lowering=Lowering.FUSED)
    ledger = Ledger()
    compile_variants(Compiler(), program, ledger, Silent(), limit_s=10.0)  # type: ignore[arg-type]
    (item,) = ledger.left_out
    assert (item.what, item.told) == (f"compiling {8 - compiled} of 8 operators of fused", told)
    sentence = left_out_sentence(ledger.left_out, 60.0)
    assert ("--budget 90s should include all of it" in sentence) is told
    assert ("--budget above 60s, and this run cannot tell" in sentence) is not told


def test_what_no_limit_ends_is_made_ready_while_the_compilers_are_at_work_and_they_have_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    asked: list[tuple[object, float | None]] = []

    class Compiler:
        """Kernels of our own take two seconds a column, compilers what they get."""

        limits = SimpleNamespace(widths=(1, 2))

        def offered(self) -> tuple[tuple[int, ...], ...]:
            return ((Variant.CALLS, Variant.COMPILED), (Variant.CALLS, Variant.OWN_PRODUCT))

        def begin_variants(self, columns: object, limit_s: float | None = None) -> None:
            asked.append((columns, limit_s))

        def prepare_variants(self, columns: object, limit_s: float | None = None) -> tuple[int, int]:
            asked.append((columns, limit_s))
            now_s[0] += limit_s or 0.0
            return 1, 2

        def compile_variant(self, width: int, variant: int, limit_s: float | None = None) -> dict[int, str]:
            asked.append(((width, variant), limit_s))
            now_s[0] += 2.0 if variant == Variant.OWN_PRODUCT else 0.0
            return {0: ""}

        def solo_variants(self, columns: object, *, repeats: int) -> list[list[SoloRecord | Failure]]:
            raise AssertionError("nothing is timed here")

    program = SimpleNamespace(graph=SimpleNamespace(operators=()), lowering=Lowering.FUSED)
    compile_variants(Compiler(), program, Ledger(), Silent(), limit_s=10.0)  # type: ignore[arg-type]
    own, compiled = int(Variant.OWN_PRODUCT), int(Variant.COMPILED)
    both = [(1, compiled), (2, compiled)]
    assert asked == [(both, 10.0), ((1, own), 10.0), ((2, own), 8.0), (both, 6.0), (both[0], 0.0), (both[1], 0.0)]
