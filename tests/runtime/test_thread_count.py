"""The number of threads of one thread's operators: its own and nobody else's, where PyTorch's threads are OpenMP's."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from autosched.runtime import thread_count
from autosched.runtime.thread_count import use_threads


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's own library has another name")
def test_the_calling_thread_alone_is_told() -> None:
    for count in (1, 2):
        use_threads(count)
        assert torch.get_num_threads() == count
        assert of_a_new_thread() == 3


@pytest.mark.parametrize("absent", ["library", "function", "OpenMP"])
def test_where_only_pytorch_can_be_told_it_is(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """One whose OpenMP is not PyTorch's."""

        MKL_Set_Num_Threads_Local = staticmethod(lambda count: 0)

        def __init__(self, path: str) -> None:
            if absent == "library":
                raise OSError(path)
            if absent == "OpenMP":
                self.omp_set_num_threads = lambda count: None

    monkeypatch.setattr(ctypes, "CDLL", Library)
    thread_count._own_counts.cache_clear()
    try:
        use_threads(2)
        assert torch.get_num_threads() == of_a_new_thread() == 2
    finally:
        thread_count._own_counts.cache_clear()
