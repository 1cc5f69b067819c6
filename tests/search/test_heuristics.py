"""Each published scheduler on a graph small enough to check by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autosched.core.schedule import Schedule, violations
from autosched.search.dp import Ios, blocks
from autosched.search.heuristics import linear_clustering, nimble, opara, raf_asap, torchsched, trtllm, wavefront
from autosched.search.heuristics.streams import chains
from autosched.search.problem import Problem
from autosched.search.simulate import makespan_us
from autosched.search.strategy import STRATEGIES, SearchContext
from autosched.search.synthetic import random_problem
from tests.conformance.strategy_suite import flat_costs

#     0
#    / \
#   1   2      two branches: 1-3 (heavy) and 2-4, joined by 5
#   |   |
#   3   4
#    \ /
#     5
TWO_BRANCHES = [[], [0], [0], [1], [2], [3, 4]]
TIMES = [1.0, 5.0, 2.0, 5.0, 2.0, 1.0]


def two_branches(**options: object) -> Problem:
    return Problem.from_arrays(TWO_BRANCHES, flat_costs(TIMES, **options))  # type: ignore[arg-type]


def first(name: str, problem: Problem) -> Schedule:
    return STRATEGIES.get(name).propose(problem, SearchContext(np.random.default_rng(0), max_evaluations=2000))[0]


def late(deadline_s: float | None) -> SearchContext:
    return SearchContext(np.random.default_rng(0), deadline_s=deadline_s)


def test_sequential_is_the_sum_of_all_times() -> None:
    problem = two_branches(widths=(1, 2))
    assert makespan_us(problem, first("sequential", problem)) == 16.0
    assert makespan_us(problem, first("sequential_wide", problem)) == 8.0
    assert first("sequential_wide", problem).width == (2,) * 6


@pytest.mark.parametrize(
    "name", ["critical_path", "estf", "opara", "nimble", "raf_asap", "trtllm", "linear_clustering", "list_policies", "beam", "pilot_beam"]
)
def test_branches_run_side_by_side(name: str) -> None:
    problem = two_branches()
    found = first(name, problem)
    assert found.lane[1] == found.lane[3] != found.lane[2] == found.lane[4]
    assert makespan_us(problem, found) == 12.0  # the heavy branch: 1 + 5 + 5 + 1


def test_a_wavefront_waits_for_the_slowest_of_each_wave() -> None:
    problem = Problem.from_arrays([[], [], [0], [1]], flat_costs([1.0, 4.0, 4.0, 1.0]))
    assert wavefront.waves(problem) == [[0, 1], [2, 3]]
    assert makespan_us(problem, first("wavefront", problem)) == 8.0  # 4 + 4; without barriers it would be 5
    assert makespan_us(problem, first("critical_path", problem)) == 5.0


def test_heft_takes_the_longest_path_first() -> None:
    # Three independent operators on two lanes: 6 alone, 3 and 3 share the other lane; the short ones first would end at 9.
    problem = Problem.from_arrays([[], [], []], flat_costs([3.0, 3.0, 6.0]))
    found = first("critical_path", problem)
    assert found.order[0] == 2
    assert makespan_us(problem, found) == 6.0


def test_estf_holds_an_operator_back_where_contention_costs_more_than_it_gains() -> None:
    problem = Problem.from_arrays([[], []], flat_costs([4.0, 4.0], slowdown=4.0))
    assert makespan_us(problem, first("estf", problem)) == 8.0  # one after the other; side by side would take 16
    assert makespan_us(problem, first("critical_path", problem)) == 16.0


def test_opara_follows_first_predecessors_and_opens_streams_for_the_rest() -> None:
    problem = two_branches()
    # 1 inherits 0's stream; 2 finds it passed on and opens one; 3 and 4 inherit; 5 inherits from 3.
    assert opara.allocate_streams(problem) == [0, 0, 1, 0, 1, 0]


def test_opara_alternates_classes_and_takes_the_least_demand_first() -> None:
    base = Problem.from_arrays([[], [], [], []], flat_costs([1.0] * 4))
    problem = Problem.make(base.graph, base.costs, demand=[0.4, 0.1, 0.3, 0.2], memory_bound=[True, True, False, False])
    assert opara.launch_order(problem, alternate=True) == [1, 3, 0, 2]
    assert opara.launch_order(problem, alternate=False) == [1, 3, 2, 0]


def test_nimble_reduces_the_graph_matches_chains_and_needs_the_fewest_synchronisations() -> None:
    # A shortcut 0 -> 3 that the path over 1 makes needless.
    problem = Problem.from_arrays([[], [0], [0], [0, 1], [2], [3, 4]], flat_costs(TIMES))
    assert nimble.minimum_equivalent_graph(problem) == [[1, 2], [3], [4], [5], [5], []]
    stream = nimble.allocate_streams(problem)
    # Six edges remain, four can be matched, so two synchronisations are the least; width is two, so are the streams.
    edges = [(before, after) for before, items in enumerate(nimble.minimum_equivalent_graph(problem)) for after in items]
    assert sum(stream[before] != stream[after] for before, after in edges) == 2
    assert len(set(stream)) == 2


def test_nimble_matching_is_maximum_where_greedy_is_not() -> None:
    assert nimble.maximum_matching([[0, 1], [0]], 2) == [1, 0]
    assert nimble.maximum_matching([[0], [0, 1], [1, 2], [2]], 3).count(-1) == 1
    rng = np.random.default_rng(0)
    import networkx

    for _ in range(30):
        options = [sorted(set(rng.integers(0, 8, size=rng.integers(0, 4)).tolist())) for _ in range(8)]
        graph = networkx.Graph()
        graph.add_nodes_from(("left", place) for place in range(8))
        graph.add_edges_from((("left", place), ("right", item)) for place, items in enumerate(options) for item in items)
        matched = networkx.bipartite.maximum_matching(graph, top_nodes=[("left", place) for place in range(8)])
        assert sum(item >= 0 for item in nimble.maximum_matching(options, 8)) == len(matched) // 2


def test_nimble_past_its_deadline_takes_more_streams_and_is_legal() -> None:
    problem = random_problem(3, 200)
    late_streams = nimble.allocate_streams(problem, late(0.0).expired)
    assert len(set(late_streams)) > len(set(nimble.allocate_streams(problem)))
    for spent in range(4, 600, 99):
        asked = itertools.count()
        stream = nimble.allocate_streams(problem, lambda asked=asked, spent=spent: next(asked) >= spent)
        follows = problem.graph.reachable
        for chain in chains(stream, range(problem.count)):
            assert all(follows[before] >> after & 1 for before, after in itertools.pairwise(chain))
    (found,) = STRATEGIES.get("nimble").propose(problem, late(0.0))
    assert not violations(problem.graph, found)


def test_nimble_streams_keep_independent_operators_apart() -> None:
    problem = Problem.from_arrays([[], [], [0, 1], [2], [2], [2], [3, 4, 5]], flat_costs([1.0] * 7, max_lanes=8))
    stream = nimble.allocate_streams(problem)
    assert len({stream[3], stream[4], stream[5]}) == 3
    assert len(set(stream)) == 3  # the two sources share streams with the later branches


def test_raf_chains_follow_the_deepest_successor() -> None:
    problem = Problem.from_arrays([[], [0], [0], [2], [1, 3]], flat_costs([1.0] * 5))
    chain = raf_asap.heavy_chains(problem)
    assert chain[0] == chain[2] == chain[3] == chain[4] != chain[1]


def test_torchsched_keeps_the_deepest_path_and_deals_out_the_rest() -> None:
    problem = Problem.from_arrays([[], [0], [0], [0], [1], [4, 2, 3]], flat_costs([1.0] * 6, max_lanes=3))
    assert torchsched.deepest_path(problem) == [0, 1, 4, 5]
    found = first("torchsched", problem)
    assert len({found.lane[index] for index in (0, 1, 4, 5)}) == 1
    assert len({found.lane[0], found.lane[2], found.lane[3]}) == 3


def test_trtllm_constants_priorities_and_emission() -> None:
    assert [trtllm.constant_cost(kind) for kind in ("aten::mm", "aten::convolution", "aten::view", "aten::relu", "x::fused_moe")] == [
        10, 10, 0, 1, 20,
    ]  # fmt: skip
    problem = two_branches()
    assert trtllm.assign(problem, [1, 10, 1, 10, 1, 1], 2) == [0, 0, 1, 0, 1, 0]
    # Stream 0 runs as far as it can, then stream 1, then the join that waited for it.
    assert trtllm.emit(problem, [0, 0, 1, 0, 1, 0], 2) == [0, 1, 3, 2, 4, 5]


def test_linear_clusters_are_the_longest_paths() -> None:
    assert linear_clustering.clusters(two_branches()) == [[0, 1, 3, 5], [2, 4]]


@pytest.mark.parametrize("shape", ["layered", "cells", "wide"])
def test_each_cluster_is_the_longest_path_of_what_is_left(shape: str) -> None:
    problem = random_problem(3, 60, shape=shape)
    times, cross_us = problem.operator_us().tolist(), float(problem.latency_us[1])
    left = set(range(problem.count))
    for path in linear_clustering.clusters(problem):
        length: dict[int, float] = {}
        for index in sorted(left, reverse=True):
            after = [cross_us + length[later] for later in problem.successors(index) if later in left]
            length[index] = times[index] + max(after, default=0.0)
        assert length[path[0]] == max(length.values())
        assert sum(times[index] for index in path) + cross_us * (len(path) - 1) == pytest.approx(length[path[0]])
        assert all(after in problem.successors(before) for before, after in itertools.pairwise(path))
        left -= set(path)
    assert not left


def test_clusters_of_many_operators_look_at_few_of_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(1, 1000, shape="wide")
    looked: list[int] = []
    successors = Problem.successors

    def counted(problem: Problem, index: int) -> list[int]:
        looked.append(index)
        return successors(problem, index)

    monkeypatch.setattr(Problem, "successors", counted)
    assert len(linear_clustering.clusters(problem)) > 100
    assert len(looked) < 10 * problem.count


def test_clusters_of_layers_with_every_edge_look_at_no_operator_twice_for_one_path(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = 20
    before = [list(range(index - index % layer - layer, index - index % layer)) if index >= layer else [] for index in range(4 * layer)]
    problem = Problem.from_arrays(before, flat_costs([float(index % 7) for index in range(len(before))]))
    looked: list[int] = []
    successors = Problem.successors

    def counted(problem: Problem, index: int) -> list[int]:
        looked.append(index)
        return successors(problem, index)

    monkeypatch.setattr(Problem, "successors", counted)
    paths = linear_clustering.clusters(problem)
    assert len(looked) <= (len(paths) + 1) * problem.count


def test_clusters_go_to_the_lane_that_is_free_first_once_the_deadline_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(1, 60, shape="wide")
    proposed = [STRATEGIES.get("linear_clustering").propose(problem, late(deadline_s)) for deadline_s in (None, 0.0)]
    monkeypatch.setattr(linear_clustering, "STATES", 1)
    assert proposed[0] != proposed[1] == STRATEGIES.get("linear_clustering").propose(problem, late(None))


def test_clusters_share_a_lane_when_there_are_more_than_lanes() -> None:
    problem = Problem.from_arrays([[] for _ in range(4)], flat_costs([4.0, 3.0, 2.0, 1.0], max_lanes=2))
    assert makespan_us(problem, first("linear_clustering", problem)) == 5.0


def test_ios_cuts_at_operators_comparable_to_all_others() -> None:
    assert blocks(two_branches()) == [[0], [1, 2, 3, 4, 5]]
    assert blocks(Problem.from_arrays([[], [0], [1]], flat_costs([1.0] * 3))) == [[0], [1], [2]]


def test_ios_finds_the_stages_that_a_hand_enumeration_finds() -> None:
    problem = two_branches()
    # One stage with the groups (1, 3) and (2, 4): 1 + 10 + 1, barriers are free here.
    assert makespan_us(problem, first("ios", problem)) == 12.0


def test_ios_puts_operators_that_harm_each_other_in_different_stages() -> None:
    problem = Problem.from_arrays([[], []], flat_costs([4.0, 4.0], slowdown=4.0))
    assert makespan_us(problem, first("ios", problem)) == 8.0


def test_ios_pruning_limits_groups_and_their_length() -> None:
    chain = Problem.from_arrays([[], [], [0], [1], [2], [3]], flat_costs([1.0, 1.0, 1.0, 1.0, 1.0, 1.0]))
    context = SearchContext(np.random.default_rng(0))
    assert makespan_us(chain, Ios(group_operators=3).propose(chain, context)[0]) == 3.0
    single = Ios(groups=1).propose(chain, context)[0]
    assert makespan_us(chain, single) == 6.0


def test_ios_without_barriers_is_never_slower_when_nothing_interferes() -> None:
    from autosched.search.synthetic import layered

    predecessors = layered(np.random.default_rng(2), 24)
    problem = Problem.from_arrays(predecessors, flat_costs([float(1 + index % 5) for index in range(24)], max_lanes=3))
    found = STRATEGIES.get("ios").propose(problem, SearchContext(np.random.default_rng(0)))
    assert makespan_us(problem, found[-1]) <= makespan_us(problem, found[0])
