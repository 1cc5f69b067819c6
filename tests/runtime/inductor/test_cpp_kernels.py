"""Kernels that Inductor builds inside the block release the interpreter's lock, compute the same, and still throw."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch

from autosched.runtime import host_key
from autosched.runtime.host_key import cpu_device_key
from autosched.runtime.inductor.cpp_kernels import kernels_release_gil

# Says that it runs in its second number, waits until its third is set or its milliseconds are over, and says in its first which it was.
_WAITS = """
#include <cstdint>
#include <stdexcept>
#include <chrono>
#include <thread>
extern "C" void kernel(const float* in_ptr0, float* out_ptr0)
{
    if (in_ptr0[0] < 0) throw std::runtime_error("negative");
    volatile float* shared = out_ptr0;
    shared[1] = 1;
    for (int64_t left_ms = static_cast<int64_t>(in_ptr0[0]); left_ms > 0 && shared[2] == 0; --left_ms)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    out_ptr0[0] = shared[2] == 0 ? -1 : 1;
}
"""


def _build(source: str = _WAITS):  # type: ignore[no-untyped-def]
    codecache = pytest.importorskip("torch._inductor.codecache")
    with kernels_release_gil() as active:
        kernel = codecache.CppPythonBindingsCodeCache.load_pybinding(["const float*", "float*"], source)
    return active, kernel


def _was_answered(kernel, most_ms: float) -> bool:  # type: ignore[no-untyped-def]
    """Whether another Python thread could answer the kernel while it ran, for at most ``most_ms``."""
    made = torch.zeros(3)
    shared = made.numpy()  # read and written with the lock held, which operators of tensors give up
    done = threading.Event()

    def answer() -> None:
        while shared[1] == 0 and not done.is_set():
            time.sleep(0.001)
        shared[2] = 1

    thread = threading.Thread(target=answer)
    thread.start()
    kernel(torch.tensor([most_ms]), made)
    done.set()
    thread.join()
    assert abs(made[0].item()) == 1.0
    return made[0].item() > 0


def test_other_threads_run_while_a_kernel_does() -> None:
    active, kernel = _build()
    assert active
    assert _was_answered(kernel, 60_000.0)


def test_what_a_kernel_throws_is_an_exception() -> None:
    _, kernel = _build()
    with pytest.raises(RuntimeError, match="negative"):
        kernel(torch.tensor([-1.0]), torch.zeros(3))


def test_kernels_that_divide_integers_keep_the_lock() -> None:
    source = _WAITS.replace("out_ptr0[0] =", "/* mod(a, b) */ out_ptr0[0] =")
    _, kernel = _build(source)
    assert not _was_answered(kernel, 200.0)


def test_what_is_built_for_one_processor_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("torch._inductor.codecache").CppPythonBindingsCodeCache
    texts: list[str] = []
    monkeypatch.setattr(cache, "load_pybinding_async", classmethod(lambda cls, types, code, **_: texts.append(code)))
    here = cpu_device_key()
    fewer = dataclasses.replace(here, details=tuple((name, "1" if name == "cores" else value) for name, value in here.details))
    for processor in (here, fewer, dataclasses.replace(here, name="another")):
        host_key.processor_digest.cache_clear()
        monkeypatch.setattr(host_key, "cpu_device_key", lambda processor=processor: processor)
        with kernels_release_gil():
            cache.load_pybinding_async([], _WAITS)
    host_key.processor_digest.cache_clear()
    assert texts[0] == texts[1] != texts[2]
    assert all(_WAITS in text for text in texts)


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
