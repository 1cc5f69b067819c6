"""How many threads the operators of the calling thread have, without telling other threads.

``torch.set_num_threads`` says it to OpenMP and MKL for the calling thread, and leaves the number to every thread that asks PyTorch for one
for the first time later; that one keeps it. A thread of a server's that first uses PyTorch while lanes run would have one thread for life,
and a thread that puts back what it had would undo what the user has set meanwhile. As ``native/threads.h``, for lanes in Python and for
whoever puts a count back.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import torch


def use_threads(count: int) -> None:
    """Have operators of the calling thread use ``count`` threads; of others as well, later, where only PyTorch itself can be told."""
    for tell in _own_counts() or (torch.set_num_threads,):
        tell(count)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """PyTorch's own count is ``count`` within the block: code that is compiled there is written for so many threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _own_counts() -> tuple[Callable[[int], object], ...]:
    """OpenMP's and MKL's functions for the calling thread; none where they cannot be had, or PyTorch's threads are not OpenMP's."""
    try:
        # Through PyTorch's own library: another OpenMP or MKL may be loaded beside it.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = [library.omp_set_num_threads]
        if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call,unused-ignore]
            found.append(library.MKL_Set_Num_Threads_Local)
    except (OSError, AttributeError):
        return ()
    before = torch.get_num_threads()
    found[0](before + 1)
    heard = torch.get_num_threads() == before + 1
    found[0](before)
    return tuple(found) if heard else ()
