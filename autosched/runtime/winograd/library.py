"""``convolution.cpp`` compiled for this processor, and loaded. Whatever goes wrong is a reason: convolutions are oneDNN's then."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from autosched.config import winograd_wanted
from autosched.core.forks import RenewedLock
from autosched.runtime.host_key import cpu_device_key
from autosched.runtime.native.compiler import Recipe, no_compiler

_log = logging.getLogger(__name__)

_BUILD_LIMIT_S = 120.0
_SWITCHED_OFF = "switched off by AUTOSCHED_WINOGRAD=0"
_SOURCE = Path(__file__).parent / "convolution.cpp"
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# No bit may depend on which of several copies of some code the compiler joins a product and a sum in.
_COMPILE = ("-std=c++20", "-O3", _NATIVE, "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pipe")


@dataclass(frozen=True, slots=True)
class Entry:
    """A function of the library, for Python and by its address."""

    name: str
    call: Callable[..., None]
    address: int


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """What ``convolution.cpp`` holds.

    Args:
        lanes: float32 numbers in a vector.
        entries: by whether there is a bias, and whether there is a residual. Parameters, all addresses: picture, result, bias, residual,
            weights, geometry.
        loaded: keeps the code where it is.
    """

    lanes: int
    entries: Mapping[tuple[bool, bool], Entry]
    loaded: object


class _State:
    """What this process has found out; nothing is tried twice."""

    def __init__(self) -> None:
        self.turn = RenewedLock()
        self.found: Library | None = None
        self.refused = ""


_state = _State()


def winograd_library() -> Library | str:
    """The library: at once if it was built before, else in the second or two of a compiler; or why there is none."""
    if not winograd_wanted():
        return _SWITCHED_OFF
    with _state.turn.lock:
        if _state.found is None and not _state.refused:
            made = _library()
            if isinstance(made, Library):
                _state.found = made
            else:
                _state.refused = made
                _log.info("no convolution by Winograd's algorithm: %s", made)
        return _state.found or _state.refused


def winograd_built() -> bool:
    """Whether the library is there, and wanted, and nothing was found to be wrong with it."""
    return winograd_wanted() and not _state.refused and winograd_recipe().find() is not None


def winograd_obstacle() -> str:
    """Why the library cannot be built here, as far as can be told without trying; empty if nothing is in the way."""
    if not winograd_wanted():
        return _SWITCHED_OFF
    if _state.refused:
        return _state.refused
    return no_compiler() if sys.platform == "linux" else f"it is built on Linux only, not on {sys.platform}"


def _library() -> Library | str:
    recipe = winograd_recipe()
    path = recipe.find()
    if path is None:
        built = winograd_obstacle() or recipe.make(_BUILD_LIMIT_S)
        if isinstance(built, str):
            return built
        path = built
    try:
        return _loaded(path)
    except (OSError, AttributeError) as error:
        return f"what was built cannot be loaded ({str(error).splitlines()[0]}); after 'autosched cache clear native' it is built anew"


def _loaded(path: Path) -> Library:
    loaded = ctypes.CDLL(str(path))
    entries = {
        (bias, residual): _entry(loaded, f"autosched_winograd{'_bias' * bias}{'_residual' * residual}", 4 + bias + residual)
        for bias in (False, True)
        for residual in (False, True)
    }
    return Library(int(loaded.autosched_winograd_lanes()), entries, loaded)


def _entry(loaded: ctypes.CDLL, name: str, parameters: int) -> Entry:
    function = getattr(loaded, name)
    function.argtypes, function.restype = [ctypes.c_void_p] * parameters, None
    return Entry(name, function, ctypes.cast(function, ctypes.c_void_p).value or 0)


@lru_cache(maxsize=1)
def winograd_recipe() -> Recipe:
    """How the library is made for this processor."""
    processor = hashlib.sha256(msgspec.json.encode(cpu_device_key(), order="sorted")).hexdigest()
    return Recipe("winograd", _SOURCE, _COMPILE, ("-shared",), depends=(processor,))
