"""Files out of a zip: reading one takes the memory of that one, and what is larger than may be is refused, no sooner."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from autosched.core.errors import ArtifactCorrupt
from autosched.runtime.bundle.zip import MAX_BUNDLE_BYTES, Limits, printable, read_file, unzip

_LIMITS = Limits(2, lambda name: 100 if name in ("a.json", "b.bin") else None, lambda names: "", 150)


def test_reading_a_small_file_sets_no_more_memory_aside(tmp_path: Path) -> None:
    path = tmp_path / "small.autosched"
    path.write_bytes(bytes(5000))
    tracemalloc.start()
    try:
        data = read_file(path)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(data) == 5000
    assert most_bytes < 1 << 20


def test_a_file_larger_than_may_be_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.autosched"
    with path.open("wb") as file:
        file.truncate(MAX_BUNDLE_BYTES + 1)  # without taking that much of the disk
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactCorrupt, match=f"{MAX_BUNDLE_BYTES + 1} bytes; a schedule file has at most"):
            read_file(path)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 1 << 20


def _zip(*files: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files:
            archive.writestr(name, data)
    return buffer.getvalue()


_FULL = (("a.json", b"1" * 100), ("b.bin", b"2" * 100))


def test_as_much_as_may_be_is_read() -> None:
    assert unzip(_zip(*_FULL), _LIMITS, "it") == dict(_FULL)
    text = Limits(2, lambda name: 100, lambda names: "", 200)
    assert unzip(_zip(("a.json", b"1" * 100), ("b.json", b"2" * 100)), text, "it").keys() == {"a.json", "b.json"}


@pytest.mark.parametrize(
    ("files", "limits", "words"),
    [
        ((("a.json", b"1" * 101),), _LIMITS, "a.json has 101 bytes; expected at most 100"),
        ((("c.json", b""),), _LIMITS, "holds 'c.json'"),
        (_FULL, Limits(1, lambda name: 100, lambda names: "", 150), "a zip directory of 2 files"),
        (_FULL, Limits(2, lambda name: 100, lambda names: "", 99), "its JSON files have 100 bytes together; expected at most 99"),
        (_FULL, Limits(2, lambda name: 100, lambda names: f"{len(names)} names", 150), "2 names"),
        ((("a" * 65_400, b""), ("b" * 200, b"")), Limits(2, lambda name: 100, lambda names: "", 150), "a zip directory of 2 files in 65"),
    ],
)
def test_what_is_more_than_may_be_is_refused(files: tuple[tuple[str, bytes], ...], limits: Limits, words: str) -> None:
    with pytest.raises(ArtifactCorrupt, match=words):
        unzip(_zip(*files), limits, "it")


def _with_end(**changes: int) -> bytes:
    """A zip whose last 22 bytes say something else."""
    data = bytearray(_zip(*_FULL))
    for name, value in changes.items():
        place, size = {"here": (8, 2), "total": (10, 2), "size": (12, 4), "offset": (16, 4), "comment": (20, 2)}[name]
        begin = len(data) - 22 + place
        data[begin : begin + size] = value.to_bytes(size, "little")
    return bytes(data)


@pytest.mark.parametrize(
    "changes", [{"here": 1}, {"total": 1}, {"total": 3, "here": 3}, {"size": 0}, {"offset": 0}, {"comment": 5}], ids=str
)
def test_a_directory_that_is_not_where_and_what_it_says_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ArtifactCorrupt, match="a zip directory of"):
        unzip(_with_end(**changes), _LIMITS, "it")


def test_a_directory_of_the_large_kind_is_refused() -> None:
    """There every number stands twice, and ``zipfile`` believes the one that was not looked at."""
    data = _zip(*_FULL)
    end = data[-22:]
    offset = int.from_bytes(end[16:20], "little") + 20
    large = data[:-22] + b"PK\x06\x07" + bytes(16) + end[:16] + offset.to_bytes(4, "little") + end[20:]
    with pytest.raises(ArtifactCorrupt, match="not a complete schedule file"):
        unzip(large, _LIMITS, "it")


def test_messages_are_of_bounded_length_and_printable() -> None:
    assert printable("a" * 500) == "a" * 500
    assert printable("a" * 501) == "a" * 497 + "..."
    assert printable("a\tb\x1b") == "a?b?"
