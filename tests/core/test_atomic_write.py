"""A file is the old one or the new one, and what a killed writer left is removed when it is old."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from autosched.core import atomic_write
from autosched.core.atomic_write import remove_half_written, replace_folder, write_atomically


def left_by_a_killed_writer(target: Path, age_s: float) -> Path:
    path = target.with_name(f".{target.name}.{'0a' * 8}.part")
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_file_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "file"
    for content in (b"first", b"", b"second"):
        write_atomically(target, content)
        assert target.read_bytes() == content
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_a_writer_that_fails_leaves_what_was_there(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def refuse(*arguments: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(atomic_write.os, step, refuse)
    with pytest.raises(OSError, match="no room"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_what_was_left_goes_when_it_is_old_and_is_of_that_file(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "file2"
    old, of_other = left_by_a_killed_writer(file, 7200.0), left_by_a_killed_writer(other, 7200.0)
    write_atomically(file, b"new")
    assert (old.exists(), of_other.exists()) == (False, True)
    young = left_by_a_killed_writer(file, 1.0)
    remove_half_written(tmp_path, "file|file2")
    assert (young.exists(), of_other.exists()) == (True, False)


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"old")
    link.symlink_to(file)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert file.read_bytes() == b"new"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no such device")
def test_a_device_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: object) -> None:
        raise AssertionError(names)

    monkeypatch.setattr(atomic_write.os, "replace", refuse)
    link = tmp_path / "nowhere"
    link.symlink_to("/dev/null")
    for path in (Path("/dev/null"), link):
        write_atomically(path, b"gone")
        assert stat.S_ISCHR(os.stat(path).st_mode)


def folder_with(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "content").write_text(content)
    return path


def test_a_folder_is_replaced_and_never_absent_where_the_system_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    replace_folder(folder_with(tmp_path / "first", "first"), target)
    fresh = folder_with(tmp_path / "fresh", "second")
    if not atomic_write._exchanged(fresh, target):
        pytest.skip("this file system cannot exchange two folders")
    assert (target / "content").read_text() == "second"
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("two steps"))
    replace_folder(fresh, target)
    assert [(path / "content").read_text() for path in (target, fresh)] == ["first", "second"]


def test_where_it_cannot_a_folder_is_replaced_too_and_comes_back_if_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_write, "_exchanged", lambda *_: False)
    target = folder_with(tmp_path / "target", "old")
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "not there", target)
    assert (target / "content").read_text() == "old"
    replace_folder(folder_with(tmp_path / "fresh", "new"), target)
    assert (target / "content").read_text() == "new"
    assert not (tmp_path / "fresh").exists()
