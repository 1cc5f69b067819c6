"""Shared libraries, and precompiled headers, in Inductor's cache that are not whole, because whoever wrote them was killed.

PyTorch writes a library where it will be looked for, and takes what is there for finished. A compiling process that is ended at its
limit may leave the beginning of one, and from then on everything that needs that kernel fails on this machine ("file too short"), the
user's own ``torch.compile`` among it; some beginnings even end the process that loads them (SIGBUS). So it is removed: before anything is
loaded, after such an end, and where compiling has failed.

Of a header, a killed compiler leaves the first block, which every later one passes over: each kernel then reads PyTorch's headers anew, for
seconds. More of it than that ends every later compiler ("cannot read PCH file"). Headers say nothing of their own length: that of one with
which something was compiled is noted beside it, and one without a note is in doubt where compiling has failed.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from autosched.core.atomic_write import write_atomically
from autosched.runtime.compiler_files import inductor_folder

_NOTE = ".bytes"
_HEADERS = "precompiled_headers"
_NO_HEADER = "cannot read PCH file"  # g++
_READING_S = 1.0
_LEAST_HEADER_BYTES = 1 << 20  # PyTorch's are more than a hundred times as long
_HEADER = struct.Struct("<4s36xQ10xHHH")  # of a 64-bit ELF file: magic, offset of the section headers, their size and number


def remove_unfinished(*, idle_s: float = 0.0) -> list[Path]:
    """Remove libraries and precompiled headers that are not whole and that no process of this user has open; returns those. On Linux only,
    elsewhere nothing.

    Args:
        idle_s: only those that nobody has written to for so long: other users' processes, and other machines', are not seen from here.
            0, after something has failed: headers that may be whole, too.
    """
    folder = inductor_folder()
    if folder is None or not sys.platform.startswith("linux"):
        return []

    def sound(path: Path) -> bool:
        return is_whole(path) if path.suffix == ".so" else _is_whole_header(path, trusted=idle_s > 0)

    headers = _headers_folder()
    there = [*folder.glob("*/*.so"), *(headers.glob("*.gch") if headers is not None else ())]
    broken = [path for path in there if not sound(path)]
    removed = []
    for path in sorted(set(broken) - _open_files(broken)):
        with contextlib.suppress(OSError):
            # Once more: it may have been finished since. What was written in the future was written before the clock was set back.
            if not sound(path) and abs(time.time() - path.stat().st_mtime) >= idle_s:
                path.unlink()
                removed.append(path)
                _note_of(path).unlink(missing_ok=True)
    return removed


def worth_another_try(reason: str) -> bool:
    """Whether compiling that has failed for ``reason`` may succeed now: something was removed, here or by another process just before."""
    if _NO_HEADER in reason:
        # Several processes come upon one header, and none removes what another one's compiler reads.
        time.sleep(_READING_S)
        remove_unfinished()
        return True
    # Whoever tidies up a folder for temporary files, under a server that has been there for days, removes headers that it wrote.
    return bool(remove_unfinished()) or _HEADERS in reason


@contextlib.contextmanager
def failures_forgotten() -> Iterator[None]:
    """What fails within the block (on a full disk, of a header that is gone) is tried anew when it is asked for again.

    PyTorch keeps what came of each kernel, and of each header, for as long as the process lives.
    """
    try:
        yield
    except BaseException:
        module = sys.modules.get("torch._inductor.codecache")
        for name in ("CppPythonBindingsCodeCache", "_precompile_header"):
            clear = getattr(getattr(module, name, None), "cache_clear", None)
            if callable(clear):
                clear()
        raise


def note_header(path: Path) -> None:
    """Remember of a precompiled header that something was compiled with it as it is."""
    with contextlib.suppress(OSError):
        if not _note_of(path).exists():
            write_atomically(_note_of(path), str(path.stat().st_size).encode())


def _is_whole_header(path: Path, *, trusted: bool) -> bool:
    try:
        bytes_there = path.stat().st_size
        noted = _note_of(path)
        return int(noted.read_text(encoding="ascii")) == bytes_there if noted.exists() else trusted and bytes_there >= _LEAST_HEADER_BYTES
    except ValueError:
        return False
    except OSError:
        return True


def _note_of(path: Path) -> Path:
    return path.with_name(path.name + _NOTE)


def _headers_folder() -> Path | None:
    """Where they are: PyTorch keeps them apart from all that ``TORCHINDUCTOR_CACHE_DIR`` moves."""
    try:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        return Path(default_cache_dir()) / _HEADERS
    except (ImportError, OSError, KeyError):
        return None


def is_whole(path: Path) -> bool:
    """Whether a library's end is there: an ELF file ends with its section headers. A file that cannot be read is left to others."""
    try:
        # Thousands of files are looked at, most of whose time Python's own way to open one would be.
        # Without waiting for a writer, if it is a pipe.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            start, bytes_there = os.read(file, 64), os.fstat(file).st_size
        finally:
            os.close(file)
    except OSError:
        return True
    if len(start) < 64:
        return False
    magic, offset, each, count, _ = _HEADER.unpack_from(start)
    return bool(magic == b"\x7fELF" and offset + each * count <= bytes_there)


def _open_files(paths: Iterable[Path]) -> set[Path]:
    """Those of ``paths`` that some process of this user has open now."""
    wanted = {os.path.realpath(path): path for path in paths}
    if not wanted:
        return set()
    found = set()
    for process in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for entry in os.scandir(process):
                with contextlib.suppress(OSError):
                    if (target := os.readlink(entry.path)) in wanted:
                        found.add(wanted[target])
    return found
