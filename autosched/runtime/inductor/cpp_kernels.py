"""Inductor's C++ kernels, called from lanes: without this they hold the interpreter's lock and no two of them overlap.

What PyTorch does (seen in 2.13; another text of the line is left alone): ``async_compile.cpp_pybinding`` appends a small binding to
the kernel, a function that parses its arguments and runs ``kernel(...); Py_RETURN_NONE;`` with the lock held. The text of that line is
a class attribute, so here it is replaced, while kernels are built or loaded, by one that parses the arguments first and gives up the
lock around the kernel alone. A call through ``ctypes`` would release the lock as well, but takes longer, and ends the process when a
kernel throws.

The line is part of what is hashed: kernels built here and kernels that ``torch.compile`` builds never share a cache entry.

Within the same block, on AVX2, loads of eight numbers of eight bits are made one instruction (see ``_short_loads``).
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from autosched.core.forks import RenewedLock

_HOLDS_LOCK = "kernel({}); Py_RETURN_NONE;"
# A lambda: its arguments are parsed before its body runs. The guard takes the lock back also when the kernel throws.
_RELEASES_LOCK = (
    "[](auto... given) {{ struct Released {{ PyThreadState* state = PyEval_SaveThread(); ~Released() {{ PyEval_RestoreThread(state); }} }} "
    "released; kernel(given...); }}({}); Py_RETURN_NONE;"
)
# These report a division by zero through one pointer of the whole process, so two of them must not run at the same time.
_DIVIDES_INTEGERS = ("floor_divide_integral(", "remainder_integral(", "mod(")

# A load of as many numbers of eight bits as a register of AVX2 holds of float32.
_SHORT_LOAD = re.compile(r"auto (tmp\d+) = at::vec::Vectorized<(u?int8_t)>::loadu\((.+), static_cast<int64_t>\(8\)\);")

# The function that the binding calls; its name is a setting of PyTorch's binding cache, the same for all kernels.
_SIGNATURE = re.compile(r'extern\s+"C"\s+void\s+kernel\s*\(([^()]*)\)\s*\{')

_patching = RenewedLock(threading.RLock)


@dataclass(frozen=True, slots=True)
class Entry:
    """The function of a kernel: ``void kernel(T*...)`` at ``address``, for as long as ``loaded`` is held."""

    address: int
    loaded: object


@contextlib.contextmanager
def kernels_release_gil() -> Iterator[bool]:
    """Within the block, C++ kernels that Inductor builds or loads release the interpreter's lock while they run.

    Covers what this process compiles or loads inside the block, also from Inductor's caches on disk; one block at a time in a process.
    Kernels that divide integers keep the lock (see the module).

    Yields:
        Whether it takes effect; ``False`` where this PyTorch writes its bindings in another way: kernels are right there, and run one
        at a time.
    """
    with _patching.lock:
        cache = _binding_cache()
        if cache is None:
            yield False
            return
        own = "load_pybinding_async" in vars(cache)
        original = vars(cache).get("load_pybinding_async")
        build = cache.load_pybinding_async

        def load(cls: Any, argtypes: Any, main_code: str, *args: Any, **kwargs: Any) -> Any:
            main_code = _short_loads(main_code)
            if any(name in main_code for name in _DIVIDES_INTEGERS):
                return build(argtypes, main_code, *args, **kwargs)
            cache.call_entry_function = _RELEASES_LOCK
            try:
                return build(argtypes, main_code, *args, **kwargs)
            finally:
                cache.call_entry_function = _HOLDS_LOCK

        cache.load_pybinding_async = classmethod(load)
        try:
            yield True
        finally:
            if own:
                cache.load_pybinding_async = original
            else:
                del cache.load_pybinding_async


def _binding_cache() -> Any:
    """The class that writes the bindings, or None if it is not the one known here."""
    try:
        from torch._inductor.codecache import CppPythonBindingsCodeCache
    except ImportError:
        return None
    cache: Any = CppPythonBindingsCodeCache
    known = getattr(cache, "call_entry_function", None) == _HOLDS_LOCK and getattr(cache, "entry_function", None) == "kernel"
    return cache if known and hasattr(cache, "load_pybinding_async") else None


def _short_loads(code: str) -> str:
    """``code`` with short loads on AVX2 made by one instruction, where each is only widened to float32.

    PyTorch's own (seen in 2.13) fills a register in memory, copies the eight numbers over its front and reads all of it back, which waits
    for both stores: some twenty cycles. What it leaves behind the eight numbers differs, so nothing else may read them.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return code

    def shortened(found: re.Match[str]) -> str:
        name, dtype, address = found.groups()
        rest = code[found.end() :]
        again = rest.find(f"auto {name} = ")
        read = rest if again < 0 else rest[:again]
        widened = read.count(f"at::vec::convert<float>({name})")
        if not widened or widened != len(re.findall(rf"\b{name}\b", read)):
            return found.group()
        return f"auto {name} = at::vec::Vectorized<{dtype}>::loadu_one_fourth({address});"

    return _SHORT_LOAD.sub(shortened, code)


def entry_of(binding: object, parameters: Sequence[str], source: str) -> Entry | str:
    """The C++ function behind a binding, to be called without the interpreter; or why it must not be.

    Args:
        binding: what generated code calls.
        parameters: C++ types of its arguments.
        source: its text.
    """
    if any(name in source for name in _DIVIDES_INTEGERS):
        return "divides integers, and two such kernels must not run at the same time"
    signatures = _SIGNATURE.findall(source)
    if len(signatures) != 1:
        return f"has {len(signatures)} functions called kernel; expected one"
    declared = [" ".join(part.split()[:-1]) for part in signatures[0].replace("*", "* ").split(",")]
    if declared != [" ".join(part.replace("*", "* ").split()) for part in parameters]:
        return f"takes {declared}; expected {list(parameters)}"
    if not all(part.endswith("*") for part in declared):
        return "takes numbers beside pointers"
    module = getattr(binding, "__self__", None)
    path = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not path:
        return "is not bound as PyTorch binds C++"
    try:
        library = ctypes.CDLL(path)
        address = ctypes.cast(library.kernel, ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        return f"cannot be found in its library: {error}"
    return Entry(address, library) if address else "has no address"
