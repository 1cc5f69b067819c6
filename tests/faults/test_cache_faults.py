"""The cache of tuned schedules when something is wrong with its files or its folder: a miss and one warning, never more."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle
from autosched.export.cache import keep
from autosched.runtime import cache
from autosched.runtime.cache import CacheKey, CacheWarning, find, key_of
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.forked import run_forked
from tests.conformance.graphs import TwoBranches

_BUNDLE = two_branches_bundle(TwoBranches().eval())
_DATA = encode_bundle(_BUNDLE)
_KEY = key_of(_BUNDLE)


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_warned", set())


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "there"
    assert find(folder, _KEY) is None
    assert keep(folder, _BUNDLE) == folder / _KEY.filename
    found = find(folder, _KEY)
    assert found is not None
    assert encode_bundle(found) == _DATA
    assert [path.name for path in folder.iterdir()] == [_KEY.filename]


def test_every_part_of_the_key_matters(tmp_path: Path) -> None:
    keep(tmp_path, _BUNDLE)
    device, software = _KEY.device, _KEY.software
    others = [
        CacheKey("0" * 64, device, software, _KEY.numerics),
        CacheKey(_KEY.structure, DeviceKey(device.kind, device.name, (*device.details, ("more", "1"))), software, _KEY.numerics),
        CacheKey(_KEY.structure, DeviceKey("cuda", device.name, device.details), software, _KEY.numerics),
        CacheKey(_KEY.structure, device, SoftwareKey((*software.versions, ("zlib", "2"))), _KEY.numerics),
        CacheKey(_KEY.structure, device, software, (*_KEY.numerics, ("more", "True"))),
    ]
    assert len({other.filename for other in others} | {_KEY.filename}) == 1 + len(others)
    assert [find(tmp_path, other) for other in others] == [None] * len(others)


def _torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :]


def _empty(data: bytes) -> bytes:
    return b""


def _another_kind(data: bytes) -> bytes:
    return b"\x80\x04\x95" + data


def _tail_lost(data: bytes) -> bytes:
    return data[:-1]


def _for_something_else(data: bytes) -> bytes:
    """Sound, but of a model with other shapes: somebody copied or renamed a file."""
    return encode_bundle(two_branches_bundle(TwoBranches().eval(), rows=6))


@pytest.mark.parametrize("damage", [_torn, _flipped, _empty, _another_kind, _tail_lost, _for_something_else])
def test_a_damaged_entry_is_set_aside_with_one_warning(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    entry = keep(tmp_path, _BUNDLE)
    assert entry is not None
    bad = damage(_DATA)
    entry.write_bytes(bad)
    with pytest.warns(CacheWarning, match="damaged") as said:
        assert find(tmp_path, _KEY) is None
    assert len(said) == 1
    [left] = tmp_path.iterdir()
    assert left.name.startswith(f"{_KEY.filename}.corrupt-")
    assert left.read_bytes() == bad  # kept for whoever wants to know what happened
    assert find(tmp_path, _KEY) is None  # a plain miss now
    assert keep(tmp_path, _BUNDLE) == entry
    assert find(tmp_path, _KEY) is not None


def test_damage_again_in_the_same_second_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.time, "strftime", lambda *args: "20300101T000000Z")
    for text in (b"one", b"two", b"three"):
        (tmp_path / _KEY.filename).write_bytes(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            assert find(tmp_path, _KEY) is None
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) == [b"one", b"three", b"two"]


def test_a_damaged_entry_that_another_process_has_moved_meanwhile_is_said_to_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = tmp_path / _KEY.filename
    entry.write_bytes(b"nothing")
    read = cache._read

    def then_moved(path: Path) -> object:
        try:
            return read(path)
        finally:
            path.rename(tmp_path / "theirs")

    monkeypatch.setattr(cache, "_read", then_moved)
    with pytest.warns(CacheWarning, match="it was moved by another process and is not used"):
        assert find(tmp_path, _KEY) is None
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_damaged_entry_that_cannot_be_moved_is_a_miss_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    (tmp_path / _KEY.filename).write_bytes(b"nothing")
    monkeypatch.setattr(cache.os, "rename", refuse)
    with pytest.warns(CacheWarning, match="left where it is") as said:
        assert [find(tmp_path, _KEY) for _ in range(3)] == [None] * 3
    assert len(said) == 1


def test_an_entry_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / _KEY.filename).mkdir()
    with pytest.warns(CacheWarning, match="not a regular file"):
        assert find(tmp_path, _KEY) is None
    assert find(tmp_path, _KEY) is None
    assert (tmp_path / _KEY.filename).is_dir()


def test_a_pipe_in_place_of_an_entry_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / _KEY.filename)
    with pytest.warns(CacheWarning, match="not a regular file"):
        assert find(tmp_path, _KEY) is None


def test_a_folder_that_is_a_file_costs_one_warning(tmp_path: Path) -> None:
    occupied = tmp_path / "schedules"
    occupied.write_text("not a folder")
    assert find(occupied, _KEY) is None
    with pytest.warns(CacheWarning, match="AUTOSCHED_CACHE") as said:
        assert [keep(occupied, _BUNDLE) for _ in range(3)] == [None] * 3
    assert len(said) == 1
    assert occupied.read_text() == "not a folder"


@contextlib.contextmanager
def _read_only(folder: Path) -> Iterator[None]:
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        yield
    finally:
        folder.chmod(stat.S_IRWXU)


_READ_ONLY_KEEP = """
import sys, warnings
from autosched.export.cache import keep
from autosched.runtime.cache import find, key_of
from autosched.runtime.bundle.format import read_bundle
bundle = read_bundle(sys.argv[2])
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    answers = [keep(sys.argv[1], bundle) for _ in range(2)]
    found = find(sys.argv[1], key_of(bundle))
assert answers == [None, None], answers
assert found is not None
assert [str(item.message) for item in said if "not kept in the cache" in str(item.message)][1:] == [], said
print(len(said))
"""


def test_a_read_only_folder_serves_what_it_has(tmp_path: Path) -> None:
    folder = tmp_path / "schedules"
    keep(folder, _BUNDLE)
    with _read_only(folder):
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write anywhere; the next test refuses by other means")
        other = tmp_path / "copy.autosched"
        other.write_bytes(_DATA)
        done = run_forked(_READ_ONLY_KEEP, str(folder), str(other))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_a_full_or_read_only_disk_costs_one_warning_and_leaves_the_old_entry(
    step: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, _BUNDLE)

    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    changed = two_branches_bundle(TwoBranches().eval(), schedule=sequential(_BUNDLE.program.graph))
    with monkeypatch.context() as broken:
        broken.setattr(os, step, refuse)
        with pytest.warns(CacheWarning, match="not kept in the cache") as said:
            assert [keep(tmp_path, changed) for _ in range(2)] == [None, None]
    assert len(said) == 1
    assert [path.name for path in tmp_path.iterdir()] == [_KEY.filename]  # no half of a file either
    found = find(tmp_path, _KEY)
    assert found is not None
    assert found.schedule == _BUNDLE.schedule


_WRITERS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
sys.path.append(sys.argv[1])
import torch
from autosched.export.cache import keep
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches

torch.set_num_threads(1)
os.fsync = lambda handle: None  # what survives a power cut is not asked here, and disks that others use are slow
bundles = [two_branches_bundle(TwoBranches().eval(), lanes=int(lanes)) for lanes in sys.argv[3:]]
with ThreadPoolExecutor(len(bundles)) as pool:
    assert all(pool.map(lambda mine: all(keep(sys.argv[2], mine) is not None for _ in range(25)), bundles))
"""


def test_four_writers_of_one_key_and_a_reader(tmp_path: Path) -> None:
    """Readers see one writer's entry, whole, at every moment. The writers are two processes of two threads each."""
    written = {two_branches_bundle(TwoBranches().eval(), lanes=lanes).schedule for lanes in range(1, 5)}
    command = [sys.executable, "-P", "-c", _WRITERS, str(Path(__file__).resolve().parents[2]), str(tmp_path)]
    writers = [subprocess.Popen([*command, *lanes]) for lanes in (("1", "2"), ("3", "4"))]
    seen = set()
    reads = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        while any(writer.poll() is None for writer in writers):
            found = find(tmp_path, _KEY)
            if found is None:
                time.sleep(0.01)  # they are still importing
            else:
                seen.add(found.schedule)
                reads += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert reads > 0
    assert seen <= written
    assert find(tmp_path, _KEY) is not None
    assert [path.name for path in tmp_path.iterdir()] == [_KEY.filename]


_KILLED = """
import os, sys
from autosched.export.cache import keep
from autosched.runtime.bundle.format import read_bundle
bundle = read_bundle(sys.argv[2])
os.fsync = lambda handle: os.kill(os.getpid(), 9)
keep(sys.argv[1], bundle)
"""


def test_a_writer_killed_half_way_leaves_the_old_entry(tmp_path: Path) -> None:
    folder = tmp_path / "schedules"
    keep(folder, _BUNDLE)
    other = tmp_path / "copy.autosched"
    other.write_bytes(_DATA)
    done = run_forked(_KILLED, str(folder), str(other))
    assert done.returncode == -9
    found = find(folder, _KEY)
    assert found is not None
    assert encode_bundle(found) == _DATA
    # What it left behind is hidden and no entry: the next writer is not in its way.
    assert all(path.name.startswith(".") for path in folder.iterdir() if path.name != _KEY.filename)
    assert keep(folder, _BUNDLE) is not None


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o757])
def test_a_folder_among_temporary_files_is_used_only_if_nobody_else_may_write_there(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "autosched-0" / "schedules"
    before = os.umask(0o002)
    try:
        assert keep(folder, _BUNDLE) is not None
    finally:
        os.umask(before)
    assert find(folder, _KEY) is not None
    folder.chmod(mode)
    if mode == 0o755:
        assert find(folder, _KEY) is not None
        return
    with pytest.warns(CacheWarning, match="others can write there") as said:
        assert [find(folder, _KEY) for _ in range(2)] == [None, None]
    assert len(said) == 1
    # A folder that the user has named elsewhere may be a team's.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    assert find(folder, _KEY) is not None


def test_a_folder_of_another_user_among_temporary_files_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    keep(tmp_path / "schedules", _BUNDLE)
    if os.getuid() == 0:
        os.chown(tmp_path / "schedules", 12345, -1)
    else:
        # Whoever owns it is now somebody else than who asks.
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert find(tmp_path / "schedules", _KEY) is None
