"""A measuring process that cannot be given its files, or cannot be started: what is missing and what to do are named."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.errors import ScratchFull, WorkerLost
from autosched.device import worker as worker_room
from autosched.device.worker import Worker
from autosched.device.worker_tensors import read_program
from tests.conformance.programs import chain_program

_WRITTEN: dict[str, tuple[Callable[[Worker], object], str]] = {
    "constants.safetensors": (
        lambda worker: worker.write_tensors("constants.safetensors", {"0": torch.zeros(1024, 1024)}),
        r"4\.0 MiB .* cannot be written to .*TMPDIR",
    ),
    "program.json": (lambda worker: worker.write_program(*chain_program()), r"MiB .* cannot be written to .*TMPDIR"),
}


@pytest.mark.parametrize("name", _WRITTEN)
def test_a_folder_for_temporary_files_that_takes_nothing_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_room, "_SHARED", tmp_path / "none")
    write, said = _WRITTEN[name]
    worker = Worker("no.module.is.started", timeout_s=1.0)
    try:
        (worker.folder / name).mkdir()
        with pytest.raises(ScratchFull, match=said):
            write(worker)
    finally:
        worker.close()


def test_a_temporary_folder_whose_name_is_no_utf_8_is_named_and_stays_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "\udcff"
    home.mkdir()
    monkeypatch.setattr(worker_room, "_SHARED", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    worker = Worker("no.module.is.started", timeout_s=1.0)
    with pytest.raises(ScratchFull, match=r"not UTF-8.*TMPDIR"):
        worker.write_program(*chain_program())
    assert list(home.iterdir()) == []


_ROOM = 8 << 30


def _two_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> tuple[Path, Path]:
    """Shared memory of 8 GiB, and a folder for temporary files on disk."""
    shared, disk = tmp_path / "shared", tmp_path / "disk"
    for folder in (shared, disk):
        folder.mkdir()
    monkeypatch.setattr(worker_room, "_SHARED", shared)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=_ROOM, free=free))
    return shared, disk


@pytest.mark.parametrize(
    ("spare", "size", "on_disk"), [(1 << 20, 1 << 10, False), (1 << 20, 1 << 20, True), (-1, 0, True)], ids=["fits", "does not", "full"]
)
def test_a_file_that_shared_memory_cannot_spare_goes_to_the_disk(
    spare: int, size: int, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, disk = _two_places(tmp_path, monkeypatch, _ROOM // 4 + spare)
    worker = Worker("no.module.is.started", timeout_s=1.0)
    try:
        first = worker.folder
        path = worker.write_tensors("constants.safetensors", {"0": torch.zeros(size, dtype=torch.uint8)})
        assert path.parent.parent == (disk if on_disk else shared)
        assert path.stat().st_size > size
        assert worker.folder == first
    finally:
        worker.close()
    assert not [*shared.iterdir(), *disk.iterdir()]


def test_what_shared_memory_refuses_is_written_to_the_disk_and_leaves_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, disk = _two_places(tmp_path, monkeypatch, _ROOM)
    places: list[Path] = []

    def write(path: Path, tensors: object) -> None:
        path.write_bytes(b"a piece")
        places.append(path)
        if path.is_relative_to(shared):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(worker_room, "write_tensors", write)
    worker = Worker("no.module.is.started", timeout_s=1.0)
    try:
        path = worker.write_tensors("constants.safetensors", {"0": torch.zeros(1)})
        assert [place.parent.parent for place in places] == [shared, disk]
        assert path == places[1]
        assert not places[0].exists()
        # The folder is then a file, so that none can be made in it.
        monkeypatch.setattr(tempfile, "tempdir", str(path))
        other = Worker("no.module.is.started", timeout_s=1.0)
        with pytest.raises(ScratchFull, match=r"no folder for the files .*TMPDIR"):
            other.write_tensors("constants.safetensors", {"0": torch.zeros(1)})
        other.close()
    finally:
        worker.close()


def _refusing(error: Exception) -> Callable[..., NoReturn]:
    def refuse(*args: object, **options: object) -> NoReturn:
        raise error

    return refuse


def test_where_there_is_no_folder_for_temporary_files_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_room, "_scratch", _refusing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(ScratchFull, match=r"No space left on device.* TMPDIR"):
        Worker("no.module.is.started", timeout_s=1.0).start()


def test_where_there_is_no_room_for_what_a_fresh_process_shares_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, disk = _two_places(tmp_path, monkeypatch, _ROOM)
    tried: list[Path] = []

    def write(path: Path, content: bytes) -> NoReturn:
        tried.append(path.parent.parent)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write)
    worker = Worker("no.module.is.started", timeout_s=1.0)
    with pytest.raises(ScratchFull, match=r"No space left on device.* TMPDIR"):
        worker.start()
    worker.close()
    assert tried == [shared, disk]


_LIMITS: dict[str, tuple[object, str, Exception]] = {
    "open files": (os, "pipe", OSError(errno.EMFILE, os.strerror(errno.EMFILE))),
    "processes": (subprocess, "Popen", BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))),
    "threads": (threading.Thread, "start", RuntimeError("can't start new thread")),
}


@pytest.mark.parametrize("limit", _LIMITS)
def test_a_limit_of_the_process_is_named_and_nothing_is_left(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, error = _LIMITS[limit]
    worker = Worker("no.module.is.started", timeout_s=1.0)
    assert worker.folder.is_dir()
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with monkeypatch.context() as full:
        full.setattr(where, name, _refusing(error))
        with pytest.raises(WorkerLost, match="cannot be started") as said:
            worker.start()
    assert "ulimit" in str(said.value)
    assert said.value.__cause__ is error
    assert worker.pid is None
    # Its traceback holds what was begun.
    del said
    error.__traceback__ = None
    gc.collect()
    assert len(before) == (len(os.listdir("/proc/self/fd")) if before else 0)
    worker.close()


@pytest.mark.parametrize("named", ["", "/no/such/python"])
def test_a_python_that_cannot_be_run_is_named(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has the interpreter in it has none to name."""
    monkeypatch.setattr(sys, "executable", named)
    worker = Worker("no.module.is.started", timeout_s=1.0)
    with pytest.raises(WorkerLost, match=f"another process of sys.executable, '{named}'") as said:
        worker.start()
    assert "ulimit" not in str(said.value)
    worker.close()


def test_what_only_the_prologue_reads_stays_in_the_file(tmp_path: Path) -> None:
    """Weights that are packed: the measuring process would hold each three times, as it came and packed for two numbers of threads."""
    captured = capture(nn.Conv2d(16, 16, 3).eval(), (torch.randn(1, 16, 9, 9),))
    (packed,) = (binding.value for binding in captured.program.bindings if binding.name == "weight")
    if any(packed in operator.reads for operator in captured.program.graph.operators):
        pytest.skip("this PyTorch packs no weights")
    worker = Worker("no.module.is.started", timeout_s=1.0)
    try:
        files = worker.write_program(captured.program, captured.constants)
        program, constants = read_program(*files)
        mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if files[1] in line]
        in_file = {
            value for value, tensor in constants.items() if any(int(begin, 16) <= tensor.data_ptr() < int(end, 16) for begin, end in mapped)
        }
        assert in_file == {packed}
    finally:
        worker.close()
    assert program == captured.program
    for value, tensor in constants.items():
        assert torch.equal(tensor, captured.constants[value])
