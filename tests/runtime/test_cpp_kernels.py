"""Kernels that Inductor builds inside the block release the interpreter's lock, compute the same, and still throw."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from autosched.runtime.cpp_kernels import kernels_release_gil

_SLEEPER = """
#include <cstdint>
#include <stdexcept>
#include <chrono>
#include <thread>
extern "C" void kernel(const float* in_ptr0, float* out_ptr0)
{
    if (in_ptr0[0] < 0) throw std::runtime_error("negative");
    std::this_thread::sleep_for(std::chrono::milliseconds(static_cast<int64_t>(in_ptr0[0])));
    out_ptr0[0] = in_ptr0[0] + 1;
}
"""


def _build(source: str = _SLEEPER):  # type: ignore[no-untyped-def]
    codecache = pytest.importorskip("torch._inductor.codecache")
    with kernels_release_gil() as active:
        kernel = codecache.CppPythonBindingsCodeCache.load_pybinding(["const float*", "float*"], source)
    return active, kernel


def _ticks_while(call) -> int:  # type: ignore[no-untyped-def]
    """How many times another Python thread could run while ``call`` did."""
    counted = [0]
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    time.sleep(0.01)
    before = counted[0]
    call()
    after = counted[0]
    done.set()
    thread.join()
    return after - before


def test_other_threads_run_while_a_kernel_does() -> None:
    active, kernel = _build()
    assert active
    made = torch.empty(1)
    assert _ticks_while(lambda: kernel(torch.tensor([200.0]), made)) >= 2
    assert made.item() == 201.0


def test_what_a_kernel_throws_is_an_exception() -> None:
    _, kernel = _build()
    with pytest.raises(RuntimeError, match="negative"):
        kernel(torch.tensor([-1.0]), torch.empty(1))


def test_kernels_that_divide_integers_keep_the_lock() -> None:
    source = _SLEEPER.replace("out_ptr0[0] =", "/* mod(a, b) */ out_ptr0[0] =")
    _, kernel = _build(source)
    made = torch.empty(1)
    # At most the tick that was under way when the kernel began.
    assert _ticks_while(lambda: kernel(torch.tensor([200.0]), made)) <= 1
    assert made.item() == 201.0


def test_the_class_is_as_it_was_afterwards() -> None:
    cache = pytest.importorskip("torch._inductor.codecache").CppPythonBindingsCodeCache
    before = (cache.call_entry_function, vars(cache)["load_pybinding_async"])
    with pytest.raises(KeyError), kernels_release_gil():
        raise KeyError
    assert (cache.call_entry_function, vars(cache)["load_pybinding_async"]) == before


def test_unknown_bindings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("torch._inductor.codecache").CppPythonBindingsCodeCache
    monkeypatch.setattr(cache, "call_entry_function", "something else")
    with kernels_release_gil() as active:
        assert not active
        assert cache.call_entry_function == "something else"
