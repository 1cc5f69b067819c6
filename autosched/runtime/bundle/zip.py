"""Files out of a zip that may come from a stranger: every size is bounded, from the zip's own directory, before anything is unpacked."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autosched.core.errors import ArtifactCorrupt, UsageError, why_of

_MIB = 2**20
MAX_BUNDLE_BYTES = 1024 * _MIB
_MAX_DIRECTORY_BYTES = 64 * 1024
_MAX_MESSAGE = 500
# Everything zipfile and zlib are documented, or were seen, to raise on damaged bytes.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, KeyError, struct.error, OverflowError)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a zip may hold.

    Args:
        max_files: entries of the directory.
        max_bytes: largest size of the file with a name, or ``None`` if no such file belongs there.
        complete: given all names, what is wrong with the set of them, or nothing.
        max_text_bytes: of all files that end in ``.json`` together; text takes many times its size to parse.
    """

    max_files: int
    max_bytes: Callable[[str], int | None]
    complete: Callable[[Sequence[str]], str]
    max_text_bytes: int


def printable(text: str) -> str:
    """``text`` without control characters and of bounded length: bundles come from strangers, messages go to terminals."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= _MAX_MESSAGE else clean[: _MAX_MESSAGE - 3] + "..."


def corrupt(label: str, why: str) -> ArtifactCorrupt:
    """The error for a file that is not what its writer wrote."""
    return ArtifactCorrupt(label, printable(why))


def read_file(path: Path) -> bytes:
    """The bytes of a regular file of bounded size.

    Raises:
        UsageError: if there is none.
        ArtifactCorrupt: if it is too large.
    """
    try:
        # Asked before opening: to open a pipe is to wait for its writer.
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"cannot read {path}: not a regular file. Name a file written by 'autosched tune'.")
        if status.st_size > MAX_BUNDLE_BYTES:
            raise ArtifactCorrupt(str(path), f"{status.st_size} bytes; a schedule file has at most {MAX_BUNDLE_BYTES}")
        with path.open("rb") as file:
            # No more than that: Python sets aside as much memory as it is told to read at most.
            return file.read(status.st_size)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {why_of(error)}. Name a file written by 'autosched tune'.") from error


def unzip(data: bytes, limits: Limits, label: str) -> dict[str, bytes]:
    """Every file of a zip, by name.

    Raises:
        ArtifactCorrupt: if it is damaged, or holds something other, larger or more than ``limits`` say.
    """
    _check_directory(data, limits.max_files, label)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            _check_entries(entries, limits, label)
            return {entry.filename: archive.read(entry) for entry in entries}
    except _ZIP_ERRORS as error:
        raise corrupt(label, f"damaged zip ({error})") from error


def _check_directory(data: bytes, max_files: int, label: str) -> None:
    """Bound what ``zipfile`` will parse: our writer leaves no comment, so the end record is the last 22 bytes."""
    if not data:
        raise corrupt(label, "the file is empty")
    if len(data) > MAX_BUNDLE_BYTES:
        raise corrupt(label, f"{len(data)} bytes; a schedule file has at most {MAX_BUNDLE_BYTES}")
    if data[:4] != b"PK\x03\x04" or len(data) < 22 or data[-22:-18] != b"PK\x05\x06" or data[-42:-38] == b"PK\x06\x07":
        raise corrupt(label, "not a complete schedule file (truncated, or another kind of file)")
    here, total, size, offset, comment = struct.unpack("<4x4xHHIIH", data[-22:])
    if comment or here != total or total > max_files or size > _MAX_DIRECTORY_BYTES or offset + size + 22 != len(data):
        raise corrupt(label, f"a zip directory of {total} files in {size} bytes; expected at most {max_files} files")


def _check_entries(entries: list[zipfile.ZipInfo], limits: Limits, label: str) -> None:
    seen: set[str] = set()
    text = 0
    for entry in entries:
        name = entry.filename
        most = limits.max_bytes(name)
        if most is None:
            raise corrupt(label, f"it holds {name[:80]!r}, which no schedule file does")
        if name in seen:
            raise corrupt(label, f"it holds {name} twice")
        seen.add(name)
        if entry.flag_bits & 0x1:
            raise corrupt(label, f"{name} is encrypted")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise corrupt(label, f"{name} is compressed by method {entry.compress_type}; expected stored or deflated")
        if entry.file_size > most:
            raise corrupt(label, f"{name} has {entry.file_size} bytes; expected at most {most}")
        text += entry.file_size if name.endswith(".json") else 0
    if sum(entry.file_size for entry in entries) > MAX_BUNDLE_BYTES:
        raise corrupt(label, f"its files have more than {MAX_BUNDLE_BYTES} bytes together")
    if text > limits.max_text_bytes:
        raise corrupt(label, f"its JSON files have {text} bytes together; expected at most {limits.max_text_bytes}")
    if why := limits.complete([entry.filename for entry in entries]):
        raise corrupt(label, why)
