"""Going on from a mark: annealing then does what it does without, to the bit, whatever it moves and whatever the simulator knows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autosched.search import anneal, synthetic
from autosched.search.anneal import Annealer, MoveWeights
from autosched.search.policies import Candidate, Decoder, Policy
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext
from tests.search.test_fluid_twins import of_one_team, with_concurrent_gap, with_room, with_threads, with_variants

KINDS = [field.name for field in dataclasses.fields(MoveWeights) if field.name not in ("near", "critical")]
PROBLEMS = {
    "lanes": lambda problem: problem,
    "started beside others": lambda problem: with_concurrent_gap(problem, 2.5),
    "room": lambda problem: with_room(problem, 1),
    "threads": lambda problem: with_threads(problem, 5.0, 400.0),
    "team": of_one_team,
    "variants": lambda problem: with_variants(problem, 2),
    "variants in a team": lambda problem: with_variants(of_one_team(problem), 2),
}


def annealed(problem: Problem, lanes: int, moves: MoveWeights, seed: int) -> tuple[list[tuple[float, bytes]], int]:
    widths = np.arange(len(problem.costs.widths), dtype=np.int32)
    start = Decoder(problem, lanes, widths).decode(Policy())
    context = SearchContext(np.random.default_rng(seed), max_evaluations=3000)
    found, spent = Annealer(problem, lanes, widths, moves=moves, hot=0.02).run(start, context, "anneal")
    return [described(item) for item in found], spent


def described(item: Candidate) -> tuple[float, bytes]:
    return item.makespan_us, np.stack([item.order, item.lane, item.width_index, item.wait]).tobytes()


def both_ways(problem: Problem, lanes: int, moves: MoveWeights, seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Anneal with and without marks; how many schedules were found on the way."""
    ways = []
    for marks in (0, 11, 1000):
        monkeypatch.setattr(anneal, "_MARKS", marks)
        ways.append(annealed(problem, lanes, moves, seed))
    assert ways[0] == ways[1] == ways[2]
    return len(ways[0][0])


@pytest.mark.parametrize("known", PROBLEMS)
@pytest.mark.parametrize("lanes", [2, 3, 6])
def test_annealing_from_marks_takes_every_step_that_it_takes_without(known: str, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = 0
    for seed in range(6):
        problem = PROBLEMS[known](synthetic.random_problem(seed, 10 + 12 * seed, widths=(1, 2), max_lanes=lanes))
        found += both_ways(problem, lanes, MoveWeights(), seed, monkeypatch)
    assert found > 6  # it got somewhere


@pytest.mark.parametrize("known", PROBLEMS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_move_alone_goes_on_from_what_it_leaves_alone(kind: str, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only = MoveWeights(**{name: float(name == kind) for name in KINDS})
    for seed in range(3):
        problem = PROBLEMS[known](synthetic.random_problem(seed, 40, widths=(1, 2), max_lanes=4))
        both_ways(problem, 4, only, seed, monkeypatch)
