"""The cost table: measured beside predicted, shrinking, failures; and which pairs are chosen for measuring."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import tracemalloc
from collections import Counter
from functools import partial

import numpy as np
import pytest

from autosched.core.errors import NoFeasibleCandidate, UsageError
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Ref
from autosched.core.records import MAX_SLOWDOWN, Contamination, Failure, FailureKind, PairRecord, Samples, SoloRecord
from autosched.costmodel import table
from autosched.costmodel.analytic import AnalyticModel
from autosched.costmodel.meeting import instances, pairs_that_meet
from autosched.costmodel.model import PairQuery, Prediction
from autosched.costmodel.select_pairs import NARROW_WIDE_WORTH, select_pairs
from autosched.costmodel.table import make_cost_table as full_cost_table
from autosched.datasets.choices import independence, independent_masks
from autosched.datasets.facts import DeviceFacts
from autosched.search import synthetic
from autosched.search.problem import Problem

SPEC = TensorSpec((64, 64), "float32", (64, 1))
CPU = DeviceFacts("test", "cpu", units=2)


def fork(signatures: tuple[str, ...]) -> OpGraph:
    """One operator, then one for each signature that reads its result."""
    values = [Value(0, SPEC, ValueRole.INPUT, 0)]
    operators = []
    for index, signature in enumerate(("root", *signatures)):
        values.append(Value(index + 1, SPEC, ValueRole.INTERMEDIATE, index + 1))
        source = 0 if index == 0 else 1
        call = Call("aten::relu.default", (Ref(source),), (), (index + 1,))
        size = SPEC.bytes
        operators.append(Operator(index, f"op{index}", (call,), (source,), (index + 1,), (), 4096, size, size, signature, ""))
    return OpGraph(tuple(operators), tuple(values), (0,), tuple(range(2, len(values))))


def solo(signature: str, width: int, median: float) -> SoloRecord:
    return SoloRecord(signature, width, Samples(median, median, median, median, median, 9), Contamination())


def solos(graph: OpGraph, widths: tuple[int, ...] = (1,), **times: float) -> list[list[SoloRecord | Failure]]:
    return [[solo(op.signature, width, times.get(op.signature, 10.0) / width) for width in widths] for op in graph.operators]


def pair(first: str, last: str, slow_first: float, slow_last: float, *, count: int = 20, load: float = 0.0) -> PairRecord:
    return PairRecord(first, 1, last, 1, 10.0, 10.0, 12.0, slow_first, slow_last, 0.6, 1, 1, count, Contamination(load, 0.0))


make_cost_table = partial(full_cost_table, launch_gap_us=1.0, cross_lane_us=2.0, fixed_us=3.0, max_lanes=2, device=CPU)


def test_the_table_says_what_share_of_the_cores_each_kernel_takes() -> None:
    graph = fork(("a", "b"))
    table = make_cost_table(graph, solos(graph, (1, 2)), [], widths=(1, 2))
    assert table.room is not None
    assert table.room[table.kernel].tolist() == [[0.5, 1.0]] * 3
    with pytest.raises(UsageError, match="room"):
        dataclasses.replace(table, room=table.room + 1.0)


def test_lanes_poll_and_helper_threads_spin_on_a_cpu_and_on_no_gpu() -> None:
    graph = fork(("a", "b"))
    table = make_cost_table(graph, solos(graph), [], widths=(1,))
    assert table.polling_us > 0.0
    assert table.team_spin_us > table.polling_us
    gpu = make_cost_table(graph, solos(graph), [], widths=(1,), device=DeviceFacts("test", "cuda", units=100))
    assert (gpu.polling_us, gpu.team_spin_us) == (0.0, 0.0)
    with pytest.raises(UsageError, match="polling_us"):
        dataclasses.replace(table, polling_us=-1.0)


def test_where_lanes_are_one_team_nothing_spins_and_only_narrow_kernels_meet() -> None:
    graph = fork(("a", "b"))
    apart = make_cost_table(graph, solos(graph, (1, 2)), [], widths=(1, 2))
    team = make_cost_table(graph, solos(graph, (1, 2)), [], widths=(1, 2), one_team=True)
    assert (apart.one_team, team.one_team, team.team_spin_us, team.polling_us) == (False, True, 0.0, 0.0)
    (_, alone), (_, beside) = team.slowdowns(team.kernel.ravel()), apart.slowdowns(apart.kernel.ravel())
    assert (alone[1::2] == 1.0).all()
    assert (alone[:, 1::2] == 1.0).all()
    assert (beside[1::2] > 1.0).any()
    assert (alone[::2, ::2] == beside[::2, ::2]).all()
    meet = pairs_that_meet(graph, team.kernel, len(team.slowdown_first), one_team=True)
    assert {tuple(pair) for pair in np.argwhere(meet)} == {(team.kernel[1, 0], team.kernel[2, 0]), (team.kernel[2, 0], team.kernel[1, 0])}


def test_equal_operators_share_a_row_and_the_analytic_prior_fills_it() -> None:
    graph = fork(("a", "b", "a"))
    table = make_cost_table(graph, solos(graph, (1, 2), a=8.0), [], widths=(1, 2))
    assert table.kernel[1].tolist() == table.kernel[3].tolist()
    assert len(table.solo_us) == 6
    narrow_a, wide_a = table.kernel[1]
    narrow_b, wide_b = table.kernel[2]
    assert table.slowdown_first[narrow_a, narrow_b] < 1.1
    # The wide one holds both cores until it is done.
    assert table.slowdown_first[wide_a, narrow_b] == pytest.approx(1.0, rel=0.05)
    assert table.slowdown_last[narrow_b, wide_a] == MAX_SLOWDOWN
    assert table.slowdown_last[wide_a, wide_b] == MAX_SLOWDOWN
    assert table.measured_pairs == 0.0
    root = table.kernel[0, 0]
    assert table.slowdown_first[root, narrow_a] == 1.0


def test_a_measured_pair_overrides_in_its_own_direction_only() -> None:
    graph = fork(("a", "b"))
    table = make_cost_table(graph, solos(graph), [pair("a", "b", 1.0, 3.0, count=400)], widths=(1,))
    a, b = table.kernel[1, 0], table.kernel[2, 0]
    assert table.slowdown_last[b, a] == pytest.approx(3.0, rel=0.05)
    assert table.slowdown_first[a, b] < 1.1
    assert table.slowdown_first[b, a] < table.slowdown_last[b, a] - 1.0
    assert table.measured_pairs == pytest.approx(1 / 2)  # a before b, of that and b before a


def test_few_or_disturbed_repeats_stay_nearer_the_prior() -> None:
    graph = fork(("a", "b"))

    def answer(record: PairRecord) -> float:
        table = make_cost_table(graph, solos(graph), [record], widths=(1,))
        return float(table.slowdown_first[table.kernel[1, 0], table.kernel[2, 0]])

    many, one = answer(pair("a", "b", 1.8, 1.0, count=50)), answer(pair("a", "b", 1.8, 1.0, count=1))
    disturbed = answer(pair("a", "b", 1.8, 1.0, count=50, load=0.09))
    assert 1.03 < one < many <= 1.8
    assert disturbed < many


def test_pairs_timed_while_others_had_the_cores_are_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    graph = fork(("a", "b"))
    with caplog.at_level(logging.WARNING):
        table = make_cost_table(graph, solos(graph), [pair("a", "b", 1.0, 24.0, load=0.5)] * 3, widths=(1,))
    assert table.measured_pairs == 0.0
    assert table.slowdown_last.max() < 1.1
    assert len(caplog.records) == 1
    assert "3 of 3 measured pairs" in caplog.text


def test_measurements_of_some_pairs_move_the_predictions_of_the_others() -> None:
    graph = fork(("a", "b", "c", "d"))
    records = [pair(x, y, 1.5, 1.5) for x, y in (("a", "b"), ("b", "a"), ("a", "c"), ("c", "a"), ("b", "c"), ("c", "b"))]
    without = make_cost_table(graph, solos(graph), [], widths=(1,))
    table = make_cost_table(graph, solos(graph), records, widths=(1,))
    c, d = table.kernel[3, 0], table.kernel[4, 0]
    assert without.slowdown_first[c, d] < 1.1
    assert 1.1 < table.slowdown_first[c, d] < 1.5


def test_pairs_that_cannot_meet_in_this_graph_move_no_predictions() -> None:
    graph = fork(("a", "b"))
    without = make_cost_table(graph, solos(graph), [], widths=(1,))
    # Of another graph, in which what everything here waits for runs beside it, and kernels beside their like.
    records = [pair("root", "a", 9.0, 9.0), pair("b", "root", 9.0, 9.0), pair("a", "a", 9.0, 9.0)]
    table = make_cost_table(graph, solos(graph), records, widths=(1,))
    assert (table.slowdown_first == without.slowdown_first).all()
    assert (table.slowdown_last == without.slowdown_last).all()
    assert table.measured_pairs == 0.0


def test_a_model_is_asked_for_kernels_by_the_names_they_have_in_the_data_set() -> None:
    asked: list[PairQuery] = []

    class Asked(AnalyticModel):
        def predict(self, query: PairQuery) -> Prediction:
            asked.append(query)
            return super().predict(query)

    graph = fork(("a", "b"))
    times = solos(graph, (1, 2))
    times[1] = [solo("a+compiled", 1, 8.0), Failure(FailureKind.CRASH, "signal 11")]
    table = make_cost_table(
        graph, times, [pair("a+other", "b", 9.0, 9.0, count=400)], widths=(1, 2), model=Asked(), others=[None, solo("a", 1, 9.0), None]
    )
    (query,) = asked
    named = {kernel.signature: (kernel.width, kernel.solo_us) for kernel in query.kernels if kernel.width == 1}
    assert named == {"root": (1, 10.0), "a+compiled": (1, 8.0), "b": (1, 10.0), "a": (1, 9.0)}
    assert [kernel.signature for kernel in query.kernels if kernel.width == 2] == ["root", "a", "b"]
    # Pairs have the names that their caller gave them.
    assert table.other_kernel is not None
    assert table.slowdown_first[table.other_kernel[1], table.kernel[2, 0]] > 5.0


def test_a_failed_width_is_finite_and_unattractive() -> None:
    graph = fork(("a", "b"))
    times = solos(graph, (1, 2))
    times[1][1] = Failure(FailureKind.CRASH, "signal 11")
    table = make_cost_table(graph, times, [], widths=(1, 2))
    assert np.isfinite(table.solo_us).all()
    assert table.operator_us(2)[1] > 100 * table.operator_us(1).sum()


def test_an_operator_that_cannot_run_at_all_is_named() -> None:
    graph = fork(("a", "b"))
    times = solos(graph)
    times[2][0] = Failure(FailureKind.OOM, "tried 4 GiB")
    with pytest.raises(NoFeasibleCandidate, match=r"op2.*oom: tried 4 GiB"):
        make_cost_table(graph, times, [], widths=(1,))


def test_what_kept_all_operators_from_being_timed_is_blamed_on_none_of_them() -> None:
    graph = fork(("a", "b"))
    times = [[Failure(FailureKind.CRASH, "RuntimeError: now and then")] for _ in graph.operators]
    with pytest.raises(NoFeasibleCandidate, match=r"^none of the 3 operators could be .*now and then"):
        make_cost_table(graph, times, [], widths=(1,))


def test_records_that_are_not_numbers_are_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    graph = fork(("a", "b"))
    bad = [dataclasses.replace(pair("a", "b", 1.0, 1.0), slowdown_first=value) for value in (float("nan"), float("inf"), -1.0)]
    with caplog.at_level(logging.WARNING):
        table = make_cost_table(graph, solos(graph), bad, widths=(1,))
    assert table.measured_pairs == 0.0
    assert len(caplog.records) == 1
    assert table.slowdown_first.max() < MAX_SLOWDOWN


def test_solo_times_of_another_graph_are_refused() -> None:
    graph = fork(("a", "b"))
    with pytest.raises(UsageError, match="2 rows; expected 3"):
        make_cost_table(graph, solos(graph)[:2], [], widths=(1,))


def test_a_team_keeps_slowdowns_of_narrow_kernels_only_and_runs_schedules_as_with_all_of_them() -> None:
    graph = fork(tuple("abcdef"))
    other = [None if operator.index % 2 else solo(operator.signature, 1, 12.0) for operator in graph.operators]
    measured = [pair("a", "b", 1.5, 2.5), dataclasses.replace(pair("b", "c", 3.0, 3.0), last_width=4)]
    team = make_cost_table(graph, solos(graph, (1, 2, 4)), measured, widths=(1, 2, 4), one_team=True, others=other, max_lanes=4)
    assert len(team.solo_us) == 3 * 7 + 4
    assert team.slowdown_first.shape == team.slowdown_last.shape == (7 + 4, 7 + 4)
    first, last = team.slowdowns(range(len(team.solo_us)))
    full = dataclasses.replace(team, slowdown_first=first, slowdown_last=last)
    a, b = team.kernel[1, 0], team.kernel[2, 0]
    assert (first[a, b], last[b, a]) == (team.slowdown_first[a, b], team.slowdown_last[b, a]) != (1.0, 1.0)
    small, large = Problem.make(graph, team), Problem.make(graph, full)
    for mine, its in zip(small.arrays, large.arrays, strict=True):
        np.testing.assert_array_equal(mine, its)
    for slowdown in (first, first[:10, :10]):
        with pytest.raises(UsageError, match="slowdown"):
            dataclasses.replace(team, slowdown_first=slowdown)
    with pytest.raises(UsageError, match="slowdown"):
        dataclasses.replace(team, one_team=False)


def test_a_model_is_asked_for_a_part_of_the_pairs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fork(tuple("abcdefghij"))
    asked: list[int] = []

    class Counts(AnalyticModel):
        def predict(self, query: PairQuery) -> Prediction:
            asked.append(len(query))
            return super().predict(query)

    times = solos(graph, (1, 2), a=3.0, b=40.0)
    whole = make_cost_table(graph, times, [], widths=(1, 2), model=Counts())
    pairs = asked.pop()
    monkeypatch.setattr(table, "_BLOCK", 50)
    parts = make_cost_table(graph, times, [], widths=(1, 2), model=Counts())
    assert sum(asked) == pairs
    assert max(asked) <= 50
    np.testing.assert_array_equal(whole.slowdown_first, parts.slowdown_first)
    np.testing.assert_array_equal(whole.slowdown_last, parts.slowdown_last)


def test_which_kernels_meet_is_what_their_operators_say() -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        graph = synthetic.random_problem(seed, 20, shape=("layered", "wide")[seed % 2]).graph
        kernel = rng.integers(0, 6, size=20)[:, None] * 2 + np.arange(2)
        other = np.where(rng.random(20) < 0.5, kernel[:, 0], 12 + np.arange(20)).astype(np.int32)
        for one_team in (True, False):
            expected = np.zeros((32, 32), dtype=np.bool_)
            for a, b in np.argwhere(independence(graph)):
                mine, its = ({*kernel[index, : 1 if one_team else 2].tolist(), int(other[index])} for index in (a, b))
                expected[np.ix_(sorted(mine), sorted(its))] = True
            np.testing.assert_array_equal(pairs_that_meet(graph, kernel, 32, one_team=one_team, other=other), expected)


def test_pairs_of_more_operators_than_are_unpacked_at_a_time_are_counted_as_one_by_one() -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        count = (1, 255, 256, 700)[seed]
        graph = synthetic.random_problem(seed, count, shape=("layered", "wide")[seed % 2]).graph
        firsts, lasts = (np.unique(rng.integers(0, kinds, size=count), return_inverse=True)[1].astype(np.int32) for kinds in (3, 400))
        expected = np.zeros((firsts.max() + 1, lasts.max() + 1), dtype=np.int32)
        pairs = [(a, b) for a in range(count) for b in range(count) if graph.independent(a, b)]
        for a, b in pairs:
            expected[firsts[a], lasts[b]] += 1
        np.testing.assert_array_equal(instances(independent_masks(graph), firsts, lasts), expected)
        assert [(a, b) for a, b in np.argwhere(independence(graph)).tolist()] == pairs


def test_pairs_of_a_graph_of_thousands_of_operators_need_no_table_of_operators() -> None:
    count = 4000
    predecessors = [[index - 4] if index >= 4 else [] for index in range(count)]
    graph = synthetic.make_graph(predecessors, [index % 4 for index in range(count)])
    times = solos(graph)
    kernel = (np.arange(count, dtype=np.int32) % 4)[:, None]
    tracemalloc.start()
    try:
        chosen = select_pairs(graph, times, widths=(1,), max_pairs=100)
        meet = pairs_that_meet(graph, kernel, 4, one_team=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert {(choice.first, choice.last) for choice in chosen} == set(itertools.permutations(range(4), 2))
    assert meet.tolist() == (~np.eye(4, dtype=np.bool_)).tolist()
    assert peak < count * count  # bytes; a table of truth values would be as large


def test_pairs_are_ranked_by_the_time_that_could_be_spent_together() -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        made = synthetic.random_problem(seed, 24, shape=("layered", "wide")[seed % 2]).graph
        named = [dataclasses.replace(item, signature=f"s{rng.integers(9)}") for item in made.operators]
        graph = dataclasses.replace(made, operators=tuple(named))
        times = solos(graph, (1, 2), **{f"s{number}": float(rng.integers(1, 4)) for number in range(9)})
        ranked = _ranked(graph, times, (1, 2))
        chosen = select_pairs(graph, times, widths=(1, 2), max_pairs=10_000)
        names = [graph.operators[index].signature for choice in chosen for index in (choice.first, choice.last)]
        found = zip(
            names[::2], (choice.first_width for choice in chosen), names[1::2], (choice.last_width for choice in chosen), strict=True
        )
        assert list(found) == ranked
        assert select_pairs(graph, times, widths=(1, 2), max_pairs=5) == chosen[:5]
        left = [choice for choice, name in zip(chosen, ranked, strict=True) if name not in ranked[1:40:3]]
        assert select_pairs(graph, times, widths=(1, 2), max_pairs=30, known=set(ranked[1:40:3])) == left[:30]


def _ranked(graph: OpGraph, times: list[list[SoloRecord | Failure]], widths: tuple[int, ...]) -> list[tuple[str, int, str, int]]:
    """What ``select_pairs`` is to choose, one pair of operators after the other."""
    of = {(record.signature, record.width): record.samples.median_us for row in times for record in row if isinstance(record, SoloRecord)}
    copies = Counter(item.signature for item in graph.operators)
    met = Counter((graph.operators[a].signature, graph.operators[b].signature) for a, b in np.argwhere(independence(graph)).tolist())
    found = []
    for (a, b), count in met.items():
        disjoint = copies[a] / 2 if a == b else min(count, copies[a], copies[b])
        for width_a, width_b in itertools.product(widths, widths):
            if a <= b and min(width_a, width_b) == 1 and not (a == b and width_b < width_a):
                share = 1.0 if width_a == width_b == 1 else NARROW_WIDE_WORTH
                found.append((-min(of[a, width_a], of[b, width_b]) * disjoint * share, a, width_a, b, width_b))
    both = [((a, i, b, j), (b, j, a, i)) for _, a, i, b, j in sorted(found)]
    return list(dict.fromkeys(name for orders in both for name in orders))


def test_independence_agrees_with_the_graph() -> None:
    graph = fork(tuple("abcdefghij"))
    free = independence(graph)
    for i in range(len(graph)):
        for j in range(len(graph)):
            assert free[i, j] == graph.independent(i, j)


def test_only_independent_pairs_are_chosen_longest_first_in_both_orders() -> None:
    graph = fork(("short", "long", "longer"))
    chosen = select_pairs(graph, solos(graph, short=1.0, long=50.0, longer=60.0), widths=(1,), max_pairs=100)
    assert all(graph.independent(choice.first, choice.last) for choice in chosen)
    assert [(choice.first, choice.last) for choice in chosen[:2]] == [(2, 3), (3, 2)]
    assert len(chosen) == 6


def test_equal_kernels_are_measured_once_and_known_pairs_not_at_all() -> None:
    graph = fork(("a", "a", "a", "b"))
    chosen = select_pairs(graph, solos(graph), widths=(1,), max_pairs=100)
    keys = [(graph.operators[c.first].signature, graph.operators[c.last].signature) for c in chosen]
    assert sorted(keys) == [("a", "a"), ("a", "b"), ("b", "a")]
    rest = select_pairs(graph, solos(graph), widths=(1,), max_pairs=100, known={("a", 1, "b", 1), ("a", 1, "a", 1)})
    assert [(graph.operators[c.first].signature, graph.operators[c.last].signature) for c in rest] == [("b", "a")]
    assert len(select_pairs(graph, solos(graph), widths=(1,), max_pairs=1)) == 1


def test_wide_operators_and_failed_widths() -> None:
    graph = fork(("a", "b"))
    times = solos(graph, (1, 2))
    times[2][1] = Failure(FailureKind.TIMEOUT, "10 s")
    chosen = select_pairs(graph, times, widths=(1, 2), max_pairs=100)
    assert {(c.first, c.first_width, c.last, c.last_width) for c in chosen} == {(1, 1, 2, 1), (2, 1, 1, 1), (1, 2, 2, 1), (2, 1, 1, 2)}
    assert (chosen[0].first_width, chosen[0].last_width) == (1, 1)
