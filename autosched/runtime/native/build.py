"""``native/lanes.cpp`` and the files beside it compiled for this PyTorch, and loaded.

It uses PyTorch's C++ interface, which has no stable binary form, so it cannot travel in a wheel. Whatever goes wrong is a reason, not an
error: lanes are Python threads then.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from autosched.config import native_dir, native_lanes_wanted
from autosched.core.forks import RenewedLock
from autosched.core.records import Engine
from autosched.runtime.native.compiler import Recipe, not_loaded

_log = logging.getLogger(__name__)

BUILD_LIMIT_S = 300.0
_SOURCE = Path(__file__).parent / "lanes.cpp"  # which takes the rest of the folder in
# Little of the time is spent in this file's own code, and much in reading PyTorch's headers: -O1 takes as long as none, -O2 longer.
_COMPILE = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-pipe")
_LINK = ("-shared", "-ltorch_cpu", "-lc10")
_NAMESPACE = "autosched_lanes"
_SWITCHED_OFF = "switched off by AUTOSCHED_NATIVE=0"


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """The operators of ``lanes.cpp``, as they are described there, and its functions, which are called with the interpreter's lock.

    ``written`` is the address of the one that only the interpreter calls.
    """

    compile: Callable[..., Any]
    begin: Callable[..., Any]
    walk: Callable[..., Any]
    finish: Callable[..., Any]
    run_here: Callable[..., Any]
    resume: Callable[..., Any]
    forget: Callable[..., Any]
    team: Callable[..., Any]
    stop: Callable[..., Any]
    abandon: Callable[..., Any]
    implementations: Callable[..., Any]
    watch: Callable[..., Any]
    delete_program: Callable[[int], None]
    delete_watch: Callable[[int], None]
    unchanged: Callable[[int], int]
    writes: Callable[[int], int]
    written: int


class _State:
    """What this process has found out; nothing is tried twice."""

    def __init__(self) -> None:
        self.turn = RenewedLock()
        self.operators: Library | None = None
        self.looked_for: Path | None = None
        self.refused = ""


_state = _State()


def native_library() -> Library | None:
    """What an earlier process, or :func:`build_native` in this one, has built; ``None`` if lanes are Python threads here."""
    if not native_lanes_wanted():
        return None
    with _state.turn.lock:
        folder = native_dir()
        if _state.operators is None and not _state.refused and _state.looked_for != folder:
            _state.looked_for = folder
            if (found := lanes_recipe().find()) is not None:
                _load(found)
        return _state.operators


def engine_here() -> Engine:
    """What runs lanes in this process now."""
    return Engine.NATIVE if native_library() is not None else Engine.PYTHON


def engine_to_come() -> Engine:
    """What will run lanes in this process once :func:`build_native` was called, as far as can be told without trying."""
    return Engine.PYTHON if native_library() is None and obstacle() else Engine.NATIVE


def build_native(limit_s: float = BUILD_LIMIT_S) -> str:
    """Have the native lanes ready: at once if they were built before, else in the time of a compiler. Other processes wait for one.

    Returns:
        Why there are none; empty if there are.
    """
    if not native_lanes_wanted():
        return _SWITCHED_OFF
    with _state.turn.lock:
        if native_library() is None and not _state.refused:
            path = obstacle() or lanes_recipe().make(limit_s)
            if isinstance(path, Path):
                _load(path)
            else:
                _state.refused = path
                _log.info("lanes are threads of Python: %s", path)
        return _state.refused


def do_without(reason: str) -> None:
    """From now on lanes are threads of Python in this process."""
    with _state.turn.lock:
        _state.operators, _state.refused = None, reason


def obstacle() -> str:
    """Why native lanes cannot be built here, as far as can be told without trying; empty if nothing is in the way."""
    if not native_lanes_wanted():
        return _SWITCHED_OFF
    if _state.refused:
        return _state.refused
    if sys.platform != "linux":
        return f"they are built on Linux only, not on {sys.platform}"
    if not _headers().is_dir():
        return f"this PyTorch comes without its C++ headers ({_headers()})"
    return lanes_recipe().obstacle()


def _load(path: Path) -> None:
    try:
        # Not by torch.ops.load_library: what that has loaded is taken for the user's, whose operators a measuring process must have too.
        library = ctypes.PyDLL(str(path))
        unchanged, writes = library.autosched_unchanged, library.autosched_writes
        ends = {name: getattr(library, f"autosched_{name}") for name in ("delete_program", "delete_watch")}
        for function in (unchanged, writes, *ends.values()):
            function.argtypes = [ctypes.c_void_p]
        for end in ends.values():
            end.restype = None
        writes.restype = ctypes.c_void_p
        written = ctypes.cast(library.autosched_written, ctypes.c_void_p).value
        functions: dict[str, Any] = {"unchanged": unchanged, "writes": writes, "written": written, **ends}
        operators = getattr(torch.ops, _NAMESPACE)
        found = {name: getattr(operators, name).default for name in Library.__slots__ if name not in functions}
    except (OSError, AttributeError, RuntimeError) as error:
        _state.refused = not_loaded(path, error)
        return
    # The operator itself, where it can be had: what lies around it takes a microsecond.
    called = {name: getattr(function, "_op", function) for name, function in found.items()}
    _state.operators = Library(**called, **functions)


@lru_cache(maxsize=1)
def lanes_recipe() -> Recipe:
    """How the library is made for this PyTorch."""
    strings = f"-D_GLIBCXX_USE_CXX11_ABI={int(_new_strings())}"
    places = ("-I", str(_headers()), "-L", str(_headers().parent / "lib"))
    return Recipe("lanes", (_SOURCE,), (*_COMPILE, strings), _LINK, places, (str(torch.__version__), str(torch.version.git_version)))


def _new_strings() -> bool:
    return bool(torch.compiled_with_cxx11_abi())


def _headers() -> Path:
    # As torch.utils.cpp_extension has it, which takes half a second to import, and asks nvcc for its version.
    return Path(torch.__file__).parent / "include"
