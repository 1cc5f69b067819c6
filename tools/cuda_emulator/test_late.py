"""What ``--late`` promises; run under run.py with it, and skipped elsewhere."""

from __future__ import annotations

import os
import threading

import pytest
import torch

LATE = torch.cuda.is_available() and "EMULATED_CUDA_LATE" in os.environ
pytestmark = pytest.mark.skipif(not LATE, reason="use run.py --late")


def streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(), torch.cuda.Stream()


@pytest.mark.parametrize("ordered", [True, False])
def test_what_another_stream_makes_is_there_only_for_who_waits(ordered: bool) -> None:
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    first, second = streams()
    with torch.cuda.stream(first):
        made = x + 1
    if ordered:
        second.wait_stream(first)
    with torch.cuda.stream(second):
        read = made * 2
        assert bool(read.isnan().all()) is not ordered
    torch.cuda.synchronize()
    assert made.tolist() == [1.0] * 4


def test_a_graph_reads_what_is_there_when_its_launch_comes_up() -> None:
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    first, second = streams()
    with torch.cuda.stream(first):
        x.fill_(2.0)
    with torch.cuda.stream(second):
        graph.replay()
    second.synchronize()
    with torch.cuda.stream(second):
        assert y.tolist() == [1.0] * 4  # nobody has waited for the fill
    torch.cuda.synchronize()
    graph.replay()
    assert y.tolist() == [3.0] * 4


def test_memory_of_the_host_is_read_when_it_is_pinned_and_staged_when_it_is_not() -> None:
    for pinned, found in ((True, 5.0), (False, 1.0)):
        given = torch.ones(4).pin_memory() if pinned else torch.ones(4)
        moved = given.to("cuda", non_blocking=True)
        given.fill_(5.0)
        assert moved.tolist() == [found] * 4


def test_threads_that_wait_for_each_others_streams_do_not_wait_for_ever() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(20):
                value = torch.full((8,), float(number + turn), device="cuda")
                if (value * 2).sum().item() != 16 * (number + turn):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
