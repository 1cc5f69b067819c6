"""Compiling a function, and keeping the result on disk for as long as no file of this folder has changed.

numba's own cache looks at the file of the function it caches. The functions of this folder call each other across files, and the machine
code of a caller holds that of what it calls, so an edit would leave callers in other files with the old code. Here the stamp of every
cached function is a digest of the whole folder instead: an edit anywhere in it compiles anew what is used. And numba believes whatever
machine code it reads: here it is kept with its own digest, and what a disk has damaged is compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import numba

from autosched.search.compiled.turns import turn

logger = logging.getLogger(__name__)

Function = Callable[..., Any]

I1 = "i4[::1]"
F1 = "f8[::1]"
F2 = "f8[:,::1]"
ARRAYS = f"{I1},{I1},{I1},{I1},i4[:,::1],{F1},{F1},{F2},{F2},{F1}"
"""``Problem.arrays``."""
SPACE = f"{F2},u4[:,::1],{F2},u4[:,::1]"
"""``layout.workspace``."""

inlined = cast(Callable[[Function], Function], numba.njit(inline="always", error_model="numpy"))
"""For a function that only compiled code calls, in one place of each caller: compiled as part of it, which saves a library, its wrappers
and its optimisation."""


_compiles: ContextVar[bool] = ContextVar("_compiles", default=True)


class NotKept(Exception):
    """Code is not on disk yet."""


@contextlib.contextmanager
def only_what_is_kept() -> Iterator[None]:
    """Within, :func:`compiled` raises ``NotKept`` instead of compiling what another process could compile and keep."""
    token = _compiles.set(False)
    try:
        yield
    finally:
        _compiles.reset(token)


def compiled(signature: str) -> Callable[[Function], Function]:
    """``numba.njit`` for one signature, at once; loaded from disk if it was compiled before.

    Of several processes that do so at once, one compiles the function and the others load it. Not kept where neither the package nor the
    user's cache folder can be written, or where numba's cache is not as it is known here.
    """

    def decorate(function: Function) -> Function:
        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
            return function
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
        try:
            dispatcher._cache = _folder_cache()(function)
        except (ImportError, AttributeError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "no locator available" not in str(error):
                raise
            logger.info("compiled code is not kept on disk: %s", error)
        try:
            dispatcher.compile(signature)
        except NotKept:
            if not _compiles.get():
                raise
            with turn(dispatcher._cache.turn_file):
                dispatcher._cache.may_lack = True
                dispatcher.compile(signature)
        dispatcher.disable_compile()
        return cast(Function, dispatcher)

    return decorate


@functools.cache
def _folder_digest() -> bytes:
    """SHA-256 of the names and texts of all files of this folder."""
    digest = hashlib.sha256()
    for file in sorted(importlib.resources.files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py"):
            text = file.read_bytes()
            digest.update(f"{file.name} {len(text)} ".encode() + text)
    return digest.digest()


@functools.cache
def _folder_cache() -> Function:
    """The class of numba's cache of one function, stamped with the digest of the folder, and its code with the digest of that.

    numba has no public way to say what compiled code depends on. All that is taken from behind its interface is in this function, but
    for the attribute that ``Dispatcher.enable_caching`` sets too.

    Raises:
        ImportError, AttributeError: if this numba keeps its cache differently.
    """
    from numba.core.caching import CompileResultCacheImpl, FunctionCache
    from numba.core.dispatcher import Dispatcher
    from numba.core.serialize import dumps, loads

    if not hasattr(Dispatcher, "enable_caching"):
        raise AttributeError("numba's Dispatcher has no enable_caching")

    class FolderImplementation(CompileResultCacheImpl):
        def __init__(self, function: Function) -> None:
            super().__init__(function)  # type: ignore[no-untyped-call]
            self.locator.get_source_stamp = _folder_digest

        def reduce(self, cres: Any) -> tuple[bytes, bytes]:
            code = dumps(super().reduce(cres))  # type: ignore[no-untyped-call]
            return hashlib.sha256(code).digest(), code

        def rebuild(self, target_context: Any, payload: Any) -> Any:
            digest, code = payload
            # LLVM ends the process over an object file with one wrong bit, where it notices it at all.
            if hashlib.sha256(code).digest() != digest:
                raise ValueError("the code is not what its digest says")
            return super().rebuild(target_context, loads(code))  # type: ignore[no-untyped-call]

    class FolderCache(FunctionCache):
        _impl_class = FolderImplementation
        may_lack = False

        @property
        def turn_file(self) -> Path:
            return Path(self.cache_path, f"{self._impl.filename_base}.turn")

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            try:
                found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
            except Exception as error:  # the digest, or whatever pickle makes of a file that a power cut has left empty
                logger.info("kept code is damaged and compiled again: %r", error)
                found = None
                if self.may_lack:
                    # A damaged index could not be added to.
                    with contextlib.suppress(OSError):
                        self.flush()  # type: ignore[no-untyped-call]
            if found is None and not self.may_lack:
                raise NotKept
            return found

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)  # type: ignore[no-untyped-call]
            except OSError as error:
                # A full disk, say. The code is compiled, and only the next process has to do it again.
                logger.info("compiled code is not kept on disk: %s", error)

    return FolderCache
