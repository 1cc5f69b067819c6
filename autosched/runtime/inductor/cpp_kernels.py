"""Inductor's C++ kernels, called from lanes: without this they hold the interpreter's lock and no two of them overlap.

What PyTorch does (seen in 2.13; another text of the line is left alone): ``async_compile.cpp_pybinding`` appends a small binding to
the kernel, a function that parses its arguments and runs ``kernel(...); Py_RETURN_NONE;`` with the lock held. The text of that line is
a class attribute, so here it is replaced, while kernels are built or loaded, by one that parses the arguments first and gives up the
lock around the kernel alone. A call through ``ctypes`` would release the lock as well, but takes longer, and ends the process when a
kernel throws.

The line is part of what is hashed: kernels built here and kernels that ``torch.compile`` builds never share a cache entry. So is a line
that names the processor: the compiler is told to write for the one that it runs on (``-march=native``), and of two processors that share
Inductor's cache, one may lack an instruction that was used for the other, which would end the process there.

Within the same block the text of kernels is revised, too (``cpp_source``), files in Inductor's cache are checked (``cache_files``), and
what fails is not remembered (``unfinished``).
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from autosched.core.forks import RenewedLock
from autosched.runtime.host_key import processor_digest
from autosched.runtime.inductor.cache_files import cache_files_checked
from autosched.runtime.inductor.cpp_source import divides_integers, revised
from autosched.runtime.inductor.unfinished import failures_forgotten

_HOLDS_LOCK = "kernel({}); Py_RETURN_NONE;"
# A lambda: its arguments are parsed before its body runs. The guard takes the lock back also when the kernel throws.
_RELEASES_LOCK = (
    "[](auto... given) {{ struct Released {{ PyThreadState* state = PyEval_SaveThread(); ~Released() {{ PyEval_RestoreThread(state); }} }} "
    "released; kernel(given...); }}({}); Py_RETURN_NONE;"
)
# The function that the binding calls; its name is a setting of PyTorch's binding cache, the same for all kernels.
_SIGNATURE = re.compile(r'extern\s+"C"\s+void\s+kernel\s*\(([^()]*)\)\s*\{')

_patching = RenewedLock()


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
    with _patching.lock, cache_files_checked(), failures_forgotten():
        cache = _binding_cache()
        if cache is None:
            yield False
            return
        own = "load_pybinding_async" in vars(cache)
        original = vars(cache).get("load_pybinding_async")
        build = cache.load_pybinding_async

        def load(cls: Any, argtypes: Any, main_code: str, *args: Any, **kwargs: Any) -> Any:
            main_code = f"// for {processor_digest()[:16]}\n{revised(main_code)}"
            if divides_integers(main_code):
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


def entry_of(binding: object, parameters: Sequence[str], source: str) -> Entry | str:
    """The C++ function behind a binding, to be called without the interpreter; or why it must not be.

    Args:
        binding: what generated code calls.
        parameters: C++ types of its arguments.
        source: its text.
    """
    if divides_integers(source):
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
