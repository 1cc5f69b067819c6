"""``native/lanes.cpp`` and the files beside it compiled for this PyTorch: found in the cache folder, else built there once; and loaded.

It uses PyTorch's C++ interface, which has no stable binary form, so it cannot travel in a wheel. Whatever goes wrong is a reason, not an
error: lanes are Python threads then. What is in the folder is run as code, and trusted as the store of compiled regions trusts its files.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from autosched.config import NATIVE_LIBRARY, cpp_compiler, native_dir, native_lanes_wanted
from autosched.core.atomic_write import write_atomically
from autosched.core.records import Engine
from autosched.core.scratch import Scratch
from autosched.runtime.forking import outlive_forks
from autosched.runtime.regions.store import private_file, private_folder

_log = logging.getLogger(__name__)

BUILD_LIMIT_S = 300.0
_SOURCE = Path(__file__).parent / "lanes.cpp"  # which takes the rest of the folder in
# Little of the time is spent in this file's own code, and much in reading PyTorch's headers: -O1 takes as long as none, -O2 longer.
_COMPILE = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-pipe", "-c")
_LINK = ("-shared", "-ltorch_cpu", "-lc10")
_FALLBACKS = ("g++", "clang++", "c++")
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
        self.lock = threading.RLock()
        self.operators: Library | None = None
        self.looked_for: Path | None = None
        self.refused = ""

    def after_fork(self) -> None:
        """Whoever held the lock is the parent's."""
        self.lock = threading.RLock()


_state = _State()
outlive_forks(_state)


def native_library() -> Library | None:
    """What an earlier process, or :func:`build_native` in this one, has built; ``None`` if lanes are Python threads here."""
    if not native_lanes_wanted():
        return None
    with _state.lock:
        folder = native_dir()
        if _state.operators is None and not _state.refused and _state.looked_for != folder:
            _state.looked_for = folder
            if (found := _find(folder)) is not None:
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
    with _state.lock:
        if native_library() is None and not _state.refused:
            path = _made(native_dir(), limit_s)
            if isinstance(path, Path):
                _load(path)
            else:
                _state.refused = path
                _log.info("lanes are threads of Python: %s", path)
        return _state.refused


def do_without(reason: str) -> None:
    """From now on lanes are threads of Python in this process."""
    with _state.lock:
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
    if not _compiler():
        return "there is no C++ compiler; install g++ or clang++, or name one in CXX"
    return ""


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
        # It is found again also where another compiler would do better: the name does not say which built it.
        _state.refused = (
            f"what was built cannot be loaded ({str(error).splitlines()[0]}); after 'autosched cache clear native' it is built anew"
        )
        return
    # The operator itself, where it can be had: what lies around it takes a microsecond.
    called = {name: getattr(function, "_op", function) for name, function in found.items()}
    _state.operators = Library(**called, **functions)


def _made(folder: Path, limit_s: float) -> Path | str:
    """The library, built if it is not there; or why it cannot be."""
    if why := obstacle():
        return why
    deadline = time.monotonic() + limit_s
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not private_folder(folder):
            return f"{folder} belongs to somebody else, or others may write into it, and what is built there is run"
        with FileLock(folder / ".lock", timeout=limit_s):
            return _find(folder) or _compiled(folder, deadline)
    except Timeout:
        return f"another process has been building them for {limit_s:.0f} s"
    except OSError as error:
        return f"they cannot be kept: {error}"


def _compiled(folder: Path, deadline: float) -> Path | str:
    libraries = _headers().parent / "lib"
    with Scratch() as scratch:
        made, whole = scratch / "lanes.o", scratch / "lanes.so"
        include = ["-I", str(_headers())]
        steps = (
            [*_compiler(), *_COMPILE, f"-D_GLIBCXX_USE_CXX11_ABI={int(_new_strings())}", *include, str(_SOURCE), "-o", str(made)],
            [*_compiler(), str(made), "-L", str(libraries), *_LINK, "-o", str(whole)],
        )
        for command in steps:
            if why := _run(command, deadline):
                return why
            if not Path(command[-1]).is_file():
                return f"{command[0]} ended without an error, and wrote nothing"
        content = whole.read_bytes()
    # Whatever the mask is (002 where each user has a group): what others may write is not loaded.
    write_atomically(folder / f"lanes-{_key()}-{_digest(content)}.so", content, mode=0o644)
    return _find(folder) or f"what was built cannot be read back from {folder}, or others may write it there"


def _run(command: Sequence[str], deadline: float) -> str:
    """Why a command did not do what it should; empty if it did."""
    # A session of its own: the compiler is more than one process, and all of them end together.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            said, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _end(process)
            return f"{command[0]} was ended after its time was over"
        except BaseException:
            _end(process)
            raise
    if process.returncode == 0:
        return ""
    lines = [line for line in said.decode(errors="replace").splitlines() if "error" in line]
    return f"{command[0]} failed: {lines[0].strip() if lines else f'exit status {process.returncode}'}"


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _find(folder: Path) -> Path | None:
    try:
        if not private_folder(folder):
            return None
        for path in sorted(folder.glob(f"lanes-{_key()}-*.so")):
            if re.fullmatch(NATIVE_LIBRARY, path.name) and private_file(path) and path.stem.endswith(_digest(path.read_bytes())):
                return path
    except OSError:
        pass
    return None


@lru_cache(maxsize=1)
def _key() -> str:
    """Digest of what is built and of the PyTorch it is built for. The compiler is not in it: where it was built it may since be gone."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(_SOURCE.parent.iterdir()) if path.suffix in (".cpp", ".h")]
    told = [*sources, *_COMPILE, *_LINK, str(torch.__version__), str(torch.version.git_version), str(_new_strings())]
    return hashlib.sha256("\n".join([*told, sys.platform, platform.machine()]).encode()).hexdigest()[:24]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _new_strings() -> bool:
    return bool(torch.compiled_with_cxx11_abi())


def _headers() -> Path:
    # As torch.utils.cpp_extension has it, which takes half a second to import, and asks nvcc for its version.
    return Path(torch.__file__).parent / "include"


def _compiler() -> list[str]:
    """The command: ``CXX`` or g++, as Inductor has it, else another that is there; empty if none is."""
    try:
        named = shlex.split(cpp_compiler())
    except ValueError:  # a quotation mark without the other: no command
        named = []
    for command in (named, *([name] for name in _FALLBACKS)):
        if command and shutil.which(command[0]):
            return command
    return []
