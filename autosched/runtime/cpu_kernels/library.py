"""The kernels of this folder, compiled for this processor, and loaded. Whatever goes wrong is a reason: other libraries compute it then."""

from __future__ import annotations

import ctypes
import logging
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from autosched.core.forks import RenewedLock
from autosched.runtime.host_key import processor_digest
from autosched.runtime.native.compiler import Recipe, not_loaded

_log = logging.getLogger(__name__)

_BUILD_LIMIT_S = 300.0  # two cores that do nothing else take some ten
_SOURCES = tuple(Path(__file__).parent / f"{name}.cpp" for name in ("convolutions", "low_precision", "layers", "products"))
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# No bit may depend on which of several copies of some code the compiler joins a product and a sum in.
_COMPILE = ("-std=c++20", "-O3", _NATIVE, "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pipe")

_MOST_POINTERS = 7  # of a kernel; as ``autosched_call`` in products.cpp hands over


@dataclass(frozen=True, slots=True)
class Entry:
    """A function of the library, for Python and by its address; where it lacks memory, that is an error (``std::bad_alloc``)."""

    name: str
    call: Callable[..., None]
    address: int


Entries = Mapping[tuple[bool, bool], Entry]
"""By whether there is a bias, and whether there is a residual."""


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """What there is to call.

    Args:
        lanes: float32 numbers in a vector.
        pairs: whether weights in bfloat16 are laid out in pairs of channels.
        winograd, direct: parameters are addresses: what is read, the result, bias, residual, weights, geometry.
        scaled: the same with what channels are multiplied with, before the weights.
        halves: products in sixteen bits: what is read, the result, bias, weights, geometry; by whether there is a bias.
        bytes: products in eight bits: what is read, the result, what is read beside it, weights, geometry; by how much is read beside it.
            No entries where the processor has no instructions for them.
        chain: what is read, the result, weights, geometry.
        gru, lstm: what is read, the result, the state before, the cell before (of an LSTM), weights, geometry.
        pooling: what is read, the result, geometry.
        attention: queries, the result, keys, values, the mask (if there is one), geometry; by whether there is a mask.
        loaded: keeps the code where it is.
    """

    lanes: int
    pairs: bool
    winograd: Entries
    direct: Entries
    scaled: Entries
    halves: Mapping[bool, Entry]
    bytes: tuple[Entry, ...]
    chain: Entry
    gru: Entry
    lstm: Entry
    pooling: Entry
    attention: Mapping[bool, Entry]
    loaded: object


class _State:
    """What this process has found out; nothing is tried twice."""

    def __init__(self) -> None:
        self.turn = RenewedLock()
        self.found: Library | None = None
        self.refused = ""


_state = _State()


def kernel_library() -> Library | str:
    """The library: at once if it was built before, else in the seconds of a compiler; or why there is none."""
    with _state.turn.lock:
        if _state.found is None and not _state.refused:
            made = _library()
            if isinstance(made, Library):
                _state.found = made
            else:
                _state.refused = made
                _log.info("no kernels of our own: %s", made)
        return _state.found or _state.refused


def kernels_built() -> bool:
    """Whether the library is there, or loaded and since removed, and nothing was found to be wrong with it."""
    return _state.found is not None or (not _state.refused and kernels_recipe().find() is not None)


def kernels_obstacle() -> str:
    """Why the library cannot be built here, as far as can be told without trying; empty if nothing is in the way."""
    if _state.refused:
        return _state.refused
    return kernels_recipe().obstacle() if sys.platform == "linux" else f"it is built on Linux only, not on {sys.platform}"


def _library() -> Library | str:
    recipe = kernels_recipe()
    path = recipe.find()
    if path is None:
        built = kernels_obstacle() or recipe.make(_BUILD_LIMIT_S)
        if isinstance(built, str):
            return built
        path = built
    try:
        return _loaded(path)
    except (OSError, AttributeError) as error:
        return not_loaded(path, error)


def _loaded(path: Path) -> Library:
    loaded = ctypes.CDLL(str(path))
    either = (False, True)
    winograd, direct, scaled = (
        {
            (bias, residual): _entry(loaded, f"{kernel}{'_bias' * bias}{'_residual' * residual}", beside=bias + residual + more)
            for bias in either
            for residual in either
        }
        for kernel, more in (("winograd", 0), ("direct", 0), ("scaled", 1))
    )
    pooling, chain, gru, lstm = (
        _entry(loaded, name, beside=beside) for name, beside in (("pooling", -1), ("chain", 0), ("gru", 1), ("lstm", 2))
    )
    attention = {masked: _entry(loaded, f"attention{'_masked' * masked}", beside=1 + masked) for masked in either}
    halves = {bias: _entry(loaded, f"halves{'_bias' * bias}", beside=bias) for bias in either}
    bytes_ = tuple(_entry(loaded, f"bytes{beside}", beside=beside) for beside in range(4)) if loaded.autosched_has_bytes() else ()
    lanes, pairs = int(loaded.autosched_vector_lanes()), bool(loaded.autosched_pairs())
    return Library(lanes, pairs, winograd, direct, scaled, halves, bytes_, chain, gru, lstm, pooling, attention, loaded)


def _entry(loaded: ctypes.CDLL, kernel: str, *, beside: int) -> Entry:
    name = f"autosched_{kernel}"
    address = ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0
    guarded = loaded.autosched_call
    guarded.argtypes, guarded.restype = [ctypes.c_void_p] * (1 + _MOST_POINTERS), ctypes.c_int64
    unused = (None,) * (_MOST_POINTERS - 4 - beside)

    def call(*pointers: int) -> None:
        if not guarded(address, *pointers, *unused):
            raise MemoryError(f"not enough memory for what {name} works in")

    return Entry(name, call, address)


@lru_cache(maxsize=1)
def kernels_recipe() -> Recipe:
    """How the library is made for this processor."""
    return Recipe("kernels", _SOURCES, _COMPILE, ("-shared",), depends=(processor_digest(),))
