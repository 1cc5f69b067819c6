"""What lies in Inductor's cache, compared with what was written there before it is used. Private interface, the same in PyTorch 2.11 to
2.15: ``codecache.write``, through which every text goes that is run or compiled.

PyTorch takes whatever lies under a name for what it wrote there once. It does not wait for the disk, so a power cut may leave a text
empty, and a library full of zeros that is as long as it should be. From then on the text cannot be used, or the library ends the process
that calls it, or computes something else, for as long as the file is there. Texts are compared with what they should be, and written anew.
Libraries have their digest beside them, in a file of ours, if they were built here; one that is something else is removed, and built anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autosched.core.atomic_write import write_atomically
from autosched.core.forks import RenewedLock
from autosched.core.regular_file import read_regular
from autosched.runtime.inductor.unfinished import is_whole, note_header

_log = logging.getLogger(__name__)

_TEXTS = ("py", "cpp", ".h")
_DIGEST = ".sha256"

_patching = RenewedLock()
_precompiled: set[Path] = set()  # PyTorch asks for each once in a process


@contextlib.contextmanager
def cache_files_checked() -> Iterator[None]:
    """Within the block, what Inductor finds in its cache is what was written there, as far as that is known; one block at a time.

    Libraries that it builds within the block, and headers that it precompiles for them, are known from then on, unless the block ends with
    an error: then they may be unfinished.
    """
    with _patching.lock:
        module = _codecache()
        if module is None:
            yield
            return
        write, built = module.write, set()

        def checked(content: Any, extension: str, *args: Any, **kwargs: Any) -> Any:
            name, path = write(content, extension, *args, **kwargs)
            # A name that was given says nothing of the content.
            if f".{extension}".endswith(_TEXTS) and kwargs.get("key") is None and not _holds(path, content):
                _log.info("%s in Inductor's cache is damaged and written again", path)
                with contextlib.suppress(OSError):
                    Path(path).unlink()
                name, path = write(content, extension, *args, **kwargs)
            if extension == "h":
                _precompiled.add(Path(f"{path}.gch"))
            if extension.endswith("cpp") and _is_to_be_built(library := Path(path).with_suffix(".so")):
                built.add(library)
            return name, path

        module.write = checked
        try:
            yield
        finally:
            module.write = write
        if any([_noted(library) for library in sorted(built)]):
            for header in sorted(_precompiled):
                note_header(header)


def _codecache() -> Any:
    """The module that writes the cache, or ``None`` if it is not the one known here."""
    try:
        from torch._inductor import codecache
    except Exception:  # whoever compiles next finds out, and says why
        return None
    return codecache if callable(getattr(codecache, "write", None)) else None


def _holds(path: str, content: str | bytes) -> bool:
    """Whether a file holds ``content``, but for space around it, which has no part in the file's name."""
    try:
        # As it was written: PyTorch leaves the encoding to the system.
        there = Path(path).read_bytes() if isinstance(content, bytes) else Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return there.strip() == content.strip()


def _is_to_be_built(library: Path) -> bool:
    """Whether a library is not there; one that is not what was built is not there any more."""
    noted = _digest_file(library)
    try:
        if noted.exists() and library.exists() and noted.read_text(encoding="ascii") != _digest(library):
            _log.info("%s in Inductor's cache is damaged and built again", library)
            library.unlink()
            library.with_suffix(".o").unlink(missing_ok=True)
        if library.exists():
            return False
        # Whoever builds it, the note is of another file.
        noted.unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _noted(library: Path) -> bool:
    """Whether it was built; its digest is beside it then."""
    with contextlib.suppress(OSError):
        if library.exists() and is_whole(library):
            write_atomically(_digest_file(library), _digest(library).encode())
            return True
    return False


def _digest_file(library: Path) -> Path:
    return library.with_name(library.name + _DIGEST)


def _digest(library: Path) -> str:
    return hashlib.sha256(read_regular(library)).hexdigest()
