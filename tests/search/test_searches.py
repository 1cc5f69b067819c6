from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from autosched.core.costs import CostTable
from autosched.search import synthetic
from autosched.search.anneal import Annealer, MoveWeights
from autosched.search.beam import Beam
from autosched.search.dp import IOS, _Solver, blocks
from autosched.search.optuna_search import OptunaSearch, open_study
from autosched.search.policies import Candidate, Decoder, Policy, best_policies, mean_excess, portfolio
from autosched.search.problem import Problem, one_wide_lane
from autosched.search.simulate import makespan_us
from autosched.search.strategy import STRATEGIES, SearchContext
from tests.conformance.strategy_suite import flat_costs
from tests.search.test_fluid_twins import with_variants

NO_MOVES = MoveWeights(lane=0.0, order=0.0, lane_and_order=0.0, width=0.0, width_run=0.0, wait=0.0, exchange=0.0, tails=0.0)


def context(evaluations: int = 5000, seed: int = 0, **limits: object) -> SearchContext:
    return SearchContext(np.random.default_rng(seed), max_evaluations=evaluations, **limits)  # type: ignore[arg-type]


def test_the_portfolio_has_24_policies_and_more_where_there_are_widths() -> None:
    assert len(portfolio(np.array([0], dtype=np.int32))) == 24
    assert len(set(portfolio(np.array([0, 1], dtype=np.int32)))) == 96


@pytest.mark.parametrize("name", ["anneal", "portfolio"])
def test_where_waits_cost_more_than_operators_take_a_search_begins_on_one_lane(name: str) -> None:
    problem = synthetic.random_problem(7, 30, shape="series_parallel", max_lanes=3)
    costs = dataclasses.replace(problem.costs, solo_us=problem.costs.solo_us * 0.02, cross_lane_us=20.0)
    problem = Problem.make(problem.graph, costs)
    alone = makespan_us(problem, problem.schedule(range(30), [0] * 30))
    policies = best_policies(problem, context(), Decoder(problem, 3, np.array([0], dtype=np.int32)))
    assert policies[0][0].makespan_us > 2.0 * alone
    assert makespan_us(problem, STRATEGIES.get(name).propose(problem, context())[0]) <= alone * (1 + 1e-9)


@pytest.mark.parametrize("name", ["beam", "pilot_beam"])
def test_a_beam_completes_few_prefixes_once_its_time_is_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = synthetic.random_problem(3, 60, shape="wide")
    completed: list[bool] = []
    complete = Decoder.complete

    def counted(self: Decoder, *state: object) -> float:
        completed.append(late.expired())
        return complete(self, *state)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "complete", counted)
    monkeypatch.setattr(SearchContext, "expired", lambda _: len(completed) > 45)
    late = context()
    assert STRATEGIES.get(name).propose(problem, late)
    assert sum(completed) <= 4


def test_a_gate_holds_back_and_the_wait_becomes_an_edge() -> None:
    # 1 and 2 harm each other by far more than they gain; 2 is ready at once on a free lane and must be held back by an edge.
    problem = Problem.from_arrays([[], []], flat_costs([4.0, 4.0], slowdown=10.0))
    held = Decoder(problem, 2, np.array([0], dtype=np.int32)).decode(Policy(gate=1.0)).schedule(problem)
    assert makespan_us(problem, held) == 8.0
    assert held.lane_slots == 1 or held.extra_edges


def test_wide_operators_are_chosen_where_nothing_else_is_ready() -> None:
    problem = Problem.from_arrays([[], [0], [0], [1, 2]], flat_costs([4.0] * 4, widths=(1, 2)))
    decoder = Decoder(problem, 2, np.array([0, 1], dtype=np.int32))
    found = decoder.decode(Policy(wide_below=0.0)).schedule(problem)
    assert found.width == (2, 1, 1, 2)
    assert makespan_us(problem, found) == 8.0


def test_mixing_widths_beats_every_pure_form() -> None:
    # Two lanes; a wide operator beside anything doubles both. Chain operators gain from width, the middle pair from lanes.
    solo = np.array([8.0, 3.0, 3.0, 8.0, 4.0, 2.9, 2.9, 4.0])  # four kernels narrow, the same four wide
    slow = np.ones((8, 8))
    slow[4:, :] = slow[:, 4:] = 2.0
    kernel = np.array([[0, 4], [1, 5], [2, 6], [3, 7]], dtype=np.int32)
    problem = Problem.from_arrays([[], [0], [0], [1, 2]], CostTable((1, 2), kernel, solo, slow, slow, 0.0, 0.0, 0.0, 2))
    best = STRATEGIES.get("portfolio").propose(problem, context())[0]
    assert best.width == (2, 1, 1, 2)
    assert makespan_us(problem, best) == 11.0  # 4 + 3 + 4; all narrow 19, all wide 13.8


def test_annealing_improves_on_its_start_and_its_value_is_true() -> None:
    problem = synthetic.random_problem(3, 60)
    lanes, widths = 4, np.array([0], dtype=np.int32)
    start = Decoder(problem, lanes, widths).decode(Policy())
    found, spent = Annealer(problem, lanes, widths).run(start, context(20_000), "test")
    assert 0 < spent <= 20_000
    assert found[0].makespan_us < start.makespan_us * 0.99
    assert makespan_us(problem, found[0].schedule(problem)) == pytest.approx(found[0].makespan_us, rel=1e-12)


def test_annealing_is_cold_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = synthetic.random_problem(3, 60)
    widths = np.array([0], dtype=np.int32)
    start = best_policies(problem, context(), Decoder(problem, 4, widths))[0][0]
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    found, spent = Annealer(problem, 4, widths).run(start, context(10**9, deadline_s=40.0), "test")
    assert 0 < spent < 100_000
    unhurried, _ = Annealer(problem, 4, widths).run(start, context(spent), "test")
    gain_us, possible_us = (start.makespan_us - end[0].makespan_us for end in (found, unhurried))
    assert gain_us > 0.5 * possible_us > 0.0


def test_move_weights_switch_moves_off() -> None:
    problem = synthetic.random_problem(3, 40, widths=(1, 2))
    lanes, widths = 4, np.array([0, 1], dtype=np.int32)
    start = Decoder(problem, lanes, widths).decode(Policy())
    only_order = dataclasses.replace(NO_MOVES, order=1.0)
    found, _ = Annealer(problem, lanes, widths, moves=only_order).run(start, context(4000), "test")
    assert (found[0].lane == start.lane).all()
    assert (found[0].width_index == start.width_index).all()
    assert (found[0].order != start.order).any()
    only_waits = dataclasses.replace(NO_MOVES, wait=1.0)
    found, _ = Annealer(problem, lanes, widths, moves=only_waits).run(start, context(4000), "test")
    assert (found[0].lane == start.lane).all()
    assert (found[0].order == start.order).all()


def two_chains_of_a_team() -> Problem:
    """Two chains of four operators that take 10 us narrow and 6 us wide: both lanes at work win a little, one narrow operator loses."""
    slow = np.ones((2, 2))
    costs = CostTable((1, 2), np.tile(np.array([[0, 1]], dtype=np.int32), (8, 1)), np.array([10.0, 6.0]), slow, slow, 0.0, 1.0, 0.0, 2)
    return Problem.from_arrays([[], [], [0], [1], [2], [3], [4], [5]], dataclasses.replace(costs, one_team=True))


def test_a_run_of_operators_becomes_narrow_where_each_alone_would_lose() -> None:
    problem = two_chains_of_a_team()
    order, zeros = np.arange(8, dtype=np.int32), np.zeros(8, dtype=np.int32)
    start = Candidate(48.0, order, zeros, zeros + 1, zeros - 1)
    assert makespan_us(problem, start.schedule(problem)) == 48.0
    annealer = partial(Annealer, problem, 2, np.array([0, 1], dtype=np.int32))
    one, _ = annealer(moves=dataclasses.replace(NO_MOVES, width=1.0)).run(start, context(500), "test")
    assert one[0].makespan_us == 48.0
    run, _ = annealer(moves=dataclasses.replace(NO_MOVES, width_run=1.0)).run(start, context(500), "test")
    assert run[0].makespan_us == 40.0
    assert makespan_us(problem, run[0].schedule(problem)) == 40.0


def test_runs_get_one_width_where_lanes_are_one_team_only() -> None:
    chances = partial(MoveWeights().cumulative, lanes=2)
    assert chances(widths=2, choices=2, one_team=True)[6] > chances(widths=2, choices=2, one_team=True)[5]
    for widths, one_team in ((2, False), (1, True), (1, False)):
        found = chances(widths=widths, choices=2, one_team=one_team)
        assert found[6] == found[5]


def test_no_operator_gets_another_variant_where_its_width_may_not_be_used() -> None:
    problem = with_variants(synthetic.random_problem(3, 40, widths=(1, 2)), 3)
    found = STRATEGIES.get("anneal").propose(problem, context(widths=(2,)))
    assert {width for schedule in found for width in schedule.width} == {2}


@pytest.mark.parametrize("seed", range(20))
def test_widening_a_run_changes_nothing_else_and_can_be_undone(seed: int) -> None:
    from autosched.search.compiled.moves import RUN, restore_run, widen_run

    problem, rng = synthetic.random_problem(seed, 30, widths=(1, 2)), np.random.default_rng(seed)
    order = synthetic.random_order(problem, rng)
    position = np.argsort(order).astype(np.int32)
    width_index = rng.integers(0, 2, size=30).astype(np.int32)
    lane_of = one_wide_lane(rng.integers(0, 4, size=30), width_index, 2)
    before = lane_of.copy(), width_index.copy()
    begin, width = int(rng.integers(0, 30)), int(rng.integers(0, 2))
    end = min(30, begin + int(rng.integers(1, RUN + 1)))
    run = order[begin:end]
    kept, ready = np.zeros((2, RUN), dtype=np.int32), np.zeros(4 + 30)
    changed = widen_run(
        order, position, lane_of, width_index, begin, end, width, 4, kept, ready, problem.pred_ptr, problem.pred_idx, problem.kernel,
        problem.solo_us, problem.latency_us,
    )  # fmt: skip
    assert changed == (before[1][run] != width).sum()
    assert (width_index[run] == width).all()
    assert (one_wide_lane(lane_of, width_index, 2) == lane_of).all()
    untouched = np.ones(30, dtype=np.bool_)
    untouched[run] = False
    untouched |= before[1] == width
    assert (lane_of[untouched] == before[0][untouched]).all()
    restore_run(order, lane_of, width_index, begin, end, kept)
    assert (lane_of == before[0]).all()
    assert (width_index == before[1]).all()


def test_a_wait_that_pays_is_found_and_needless_ones_are_dropped() -> None:
    # 0 then 2 on one lane; 1 slows 0 tenfold and does nothing to 2. If 1 waits for 0, nobody loses anything.
    slow = np.array([[1.0, 10.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    kernel = np.array([[0], [1], [2]], dtype=np.int32)
    costs = CostTable((1,), kernel, np.array([10.0, 2.0, 10.0]), slow, slow, 0.0, 0.0, 0.0, 2)
    problem = Problem.from_arrays([[], [], [0]], costs)
    start = Decoder(problem, 2, np.array([0], dtype=np.int32)).decode(Policy())
    assert start.makespan_us == pytest.approx(21.8)
    only_waits = dataclasses.replace(NO_MOVES, wait=1.0)
    found, _ = Annealer(problem, 2, np.array([0], dtype=np.int32), moves=only_waits).run(start, context(500), "test")
    assert found[0].makespan_us == pytest.approx(20.0)
    assert found[0].schedule(problem).extra_edges == ((0, 1),)


def test_a_wider_beam_and_a_pilot_are_no_worse_than_the_best_policy() -> None:
    problem = synthetic.random_problem(5, 60)
    narrow = best_policies(problem, context(), Decoder(problem, 4, np.array([0], dtype=np.int32)))[0][0].makespan_us
    for beam in (Beam("b", width=16, branch=6, pilot=False), Beam("p", width=3, branch=4, pilot=True)):
        found, _ = beam.run(problem, context(100_000))
        assert found[0].makespan_us <= narrow
        assert makespan_us(problem, found[0].schedule(problem)) == pytest.approx(found[0].makespan_us, rel=1e-9)


def test_an_exhausted_beam_completes_what_it_has() -> None:
    problem = synthetic.random_problem(5, 40)
    found, spent = Beam("p", width=3, branch=4, pilot=True).run(problem, context(60))
    assert spent < 100  # at most one level more than was paid for
    assert all(sorted(candidate.order.tolist()) == list(range(40)) for candidate in found)


def test_an_optuna_study_goes_on_where_it_stopped_with_the_same_result(tmp_path: Path) -> None:
    problem = synthetic.random_problem(6, 30)
    whole = OptunaSearch(trials=24).propose(problem, context(study_path=str(tmp_path / "whole.db")))
    path = str(tmp_path / "broken.db")
    first = OptunaSearch(trials=24)
    seen = 0

    def die(strategy: str, evaluations: int, best_us: float) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.propose(problem, context(study_path=path, progress=die))
    assert OptunaSearch(trials=24).propose(problem, context(study_path=path)) == whole


def test_what_an_interrupted_study_was_to_begin_with_is_still_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = synthetic.random_problem(6, 30)
    whole = OptunaSearch(trials=24).propose(problem, context())
    decode, decoded = Decoder.decode, 0

    def die(decoder: Decoder, policy: Policy) -> Candidate:
        nonlocal decoded
        decoded += 1
        if decoded == 5:  # the fourth of the policies that are given: the search has decoded one by itself
            raise KeyboardInterrupt
        return decode(decoder, policy)

    study = context(study_path=str(tmp_path / "study.db"))
    monkeypatch.setattr(Decoder, "decode", die)
    with pytest.raises(KeyboardInterrupt):
        OptunaSearch(trials=24).propose(problem, study)
    monkeypatch.setattr(Decoder, "decode", decode)
    assert OptunaSearch(trials=24).propose(problem, context(study_path=study.study_path)) == whole


def test_a_long_graph_is_staged_greedily_once_the_deadline_has_passed() -> None:
    # Two blocks whose endings are more than can be looked at in a blink.
    problem = synthetic.random_problem(0, 120, max_lanes=4)
    solver = _Solver(IOS, problem, context(deadline_s=0.0), 4)
    assert all(solver.solve(block) for block in blocks(problem))
    assert solver.transitions < 120


@pytest.mark.parametrize("changed", ["lanes", "widths", "costs"])
def test_a_study_of_other_lanes_widths_or_costs_is_another_study(changed: str, tmp_path: Path) -> None:
    problem = synthetic.random_problem(6, 30, widths=(1, 2), max_lanes=4)
    path = str(tmp_path / "study.db")
    OptunaSearch(trials=24).propose(problem, context(study_path=path))
    limits = {"lanes": {"max_lanes": 2}, "widths": {"widths": (1,)}}.get(changed, {})
    if changed == "costs":
        problem = Problem.make(problem.graph, dataclasses.replace(problem.costs, solo_us=problem.costs.solo_us[::-1].copy()))
    found = OptunaSearch(trials=24).propose(problem, context(study_path=path, **limits))
    assert found == OptunaSearch(trials=24).propose(problem, context(**limits))


def test_what_random_search_exports_is_what_it_evaluated_where_operators_run_wide() -> None:
    problem = synthetic.random_problem(3, 14, widths=(1, 2), max_lanes=3)
    best_us: list[float] = []
    search = context(200, progress=lambda strategy, evaluations, value_us: best_us.append(value_us))
    [found] = STRATEGIES.get("random").propose(problem, search)
    assert max(found.width) > 1
    assert makespan_us(problem, found) == pytest.approx(best_us[-1], rel=1e-12)


def test_more_random_trials_are_never_worse() -> None:
    problem = synthetic.random_problem(7, 30)
    few, many = (makespan_us(problem, STRATEGIES.get("random").propose(problem, context(count))[0]) for count in (5, 200))
    assert many <= few


def test_optunas_schedules_are_ranked_by_what_is_exported_where_operators_run_wide() -> None:
    problem = synthetic.random_problem(3, 14, widths=(1, 2))
    found = OptunaSearch(trials=60).propose(problem, SearchContext(np.random.default_rng(0), max_evaluations=60, max_lanes=3))
    assert max(found[0].width) > 1
    times_us = [makespan_us(problem, schedule) for schedule in found]
    assert times_us == pytest.approx(sorted(times_us))


@pytest.mark.parametrize(("kernels", "operators"), [(1, 1), (1, 7), (3, 2), (65, 40), (200, 300)])
def test_the_mean_excess_is_that_of_all_operators_beside_all_to_the_last_bit(kernels: int, operators: int) -> None:
    rng = np.random.default_rng(kernels)
    excess = rng.exponential(size=(kernels, kernels))
    rows = rng.integers(0, kernels, operators).astype(np.int32)
    np.testing.assert_array_equal(mean_excess(excess, rows), excess[:, rows][rows].mean(axis=0))
    assert mean_excess(excess, rows[:0]).shape == (0,)


def test_list_policies_of_a_graph_of_thousands_of_operators_need_no_table_of_operators() -> None:
    costs = dataclasses.replace(flat_costs([3.0]), kernel=np.zeros((4000, 1), dtype=np.int32))
    problem = Problem.from_arrays([[index - 1] if index else [] for index in range(4000)], costs)
    Decoder(Problem.from_arrays([[]], flat_costs([3.0])), 2, np.array([0], dtype=np.int32))  # what is imported for it
    tracemalloc.start()
    try:
        Decoder(problem, 2, np.array([0], dtype=np.int32))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4000 * 4000  # bytes; a table of numbers would be eight times that


@pytest.mark.parametrize("name", ["random", "anneal"])
def test_of_a_graph_of_thousands_of_operators_the_clock_is_looked_at_after_fewer_schedules(name: str) -> None:
    problem = synthetic.random_problem(0, 4000, max_lanes=2)
    looks = [0]
    told = SearchContext(np.random.default_rng(0), max_evaluations=1200, progress=lambda _, spent, best_us: looks.append(spent))
    STRATEGIES.get(name).propose(problem, told)
    assert 0 < max(np.diff(looks)) * problem.count <= 2_000_000 + problem.count


def test_naming_the_strategies_imports_neither_the_compiler_nor_optuna() -> None:
    code = (
        "import sys; from autosched.search.strategy import STRATEGIES, baselines; baselines(); "
        "sys.exit(any(name in sys.modules for name in ('numba', 'optuna', 'ortools', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["why?", "50%25", "#1", "{SCHEMA_VERSION}", "a b@c:d"])
def test_a_study_lies_where_it_is_said_to_whatever_the_folder_is_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / name / "study.db", Path(name, "relative.db")):
        OptunaSearch(trials=3).propose(synthetic.random_problem(1, 8), context(study_path=str(path)))
        with contextlib.closing(sqlite3.connect(path)) as file:
            assert file.execute("SELECT count(*) FROM trials").fetchone()[0] == 3
    assert [item.name for item in tmp_path.iterdir()] == [name]
    assert not caplog.messages


def test_a_study_file_that_cannot_be_used_costs_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "broken.db").write_bytes(b"this is no database" * 100)
    problem = synthetic.random_problem(2, 12)
    found = OptunaSearch(trials=3).propose(problem, context(study_path=str(tmp_path / "broken.db")))
    assert found == OptunaSearch(trials=3).propose(problem, context())
    assert "in memory only" in caplog.text


def test_a_study_whose_file_is_removed_meanwhile_ends_as_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    problem = synthetic.random_problem(6, 30)
    path = tmp_path / "study.db"

    def remove(*_: object) -> None:
        path.unlink(missing_ok=True)

    found = OptunaSearch(trials=24).propose(problem, context(study_path=str(path), progress=remove))
    assert found == OptunaSearch(trials=24).propose(problem, context())
    assert "in memory only" in caplog.text


def test_a_study_that_is_damaged_where_its_trials_are_costs_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "study.db"
    problem = synthetic.random_problem(2, 12)
    found = OptunaSearch(trials=3).propose(problem, context(study_path=str(path)))
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE trial_params SET distribution_json = '{'")
    assert OptunaSearch(trials=3).propose(problem, context(study_path=str(path))) == found
    assert "in memory only" in caplog.text


def test_the_file_of_a_study_is_closed_at_the_end_and_after_an_error(tmp_path: Path) -> None:
    """Python 3.13 and later warn of a database left open; earlier ones keep the file open without a word."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("this system does not list the open files of a process")

    def is_open() -> bool:
        return any(link.is_symlink() and os.readlink(link) == str(path) for link in Path("/proc/self/fd").iterdir())

    path = tmp_path / "study.db"
    with open_study(str(path), "one") as study:
        study.ask()
        assert is_open()
    assert not is_open()

    def die(*_: object) -> None:
        assert is_open()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        OptunaSearch(trials=3).propose(synthetic.random_problem(1, 8), context(study_path=str(path), progress=die))
    assert not is_open()
    OptunaSearch(trials=3).propose(synthetic.random_problem(1, 8), context(study_path=str(path)))
    assert not is_open()
