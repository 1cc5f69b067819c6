"""What Opara goes by: measured residency where the device tells it, the roofline for the rest."""

from __future__ import annotations

from autosched.datasets.facts import DeviceFacts, LaunchFacts
from autosched.pipeline.demands import demands
from autosched.search import synthetic
from tests.search.test_fluid_twins import two_operators

GRAPH = two_operators(1.0, 1.0).graph
GPU = DeviceFacts("made up", "cuda", 100, peak_gflops=1000.0, bandwidth_gb_s=1000.0, threads_per_unit=2048)


def test_one_blocks_share_is_the_inverse_of_residency_else_of_threads() -> None:
    first, second = GRAPH.operators
    found = demands(GRAPH, {first.signature: LaunchFacts(10, 256, blocks_per_sm=4), second.signature: LaunchFacts(10, 512)}, GPU)
    assert found.demand == (0.25, 0.25)
    assert demands(GRAPH, {first.signature: LaunchFacts(10, 256, blocks_per_sm=4)}, GPU).demand == (0.25, 0.0)


def test_without_launches_or_peaks_nothing_is_claimed() -> None:
    found = demands(GRAPH, {}, DeviceFacts("cpu", "cpu", 2))
    assert (found.demand, found.memory_bound) == (None, None)


def test_the_roofline_says_what_memory_limits() -> None:
    graph = synthetic.make_graph([[], [0]], [0, 30])  # 1 KiB and 31 Ki operations over 2 KiB each
    assert demands(graph, {}, GPU).memory_bound == (True, False)
