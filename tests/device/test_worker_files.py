"""A measuring process that cannot be given its files, or cannot be started: what is missing and what to do are named."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import threading
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch

from autosched.core.errors import ScratchFull, WorkerLost
from autosched.device import worker as worker_room
from autosched.device.worker import Worker


def test_a_folder_for_temporary_files_that_takes_nothing_is_named() -> None:
    worker = Worker("no.module.is.started", timeout_s=1.0)
    try:
        (worker.folder / "constants.safetensors").mkdir()
        with pytest.raises(ScratchFull, match=r"4\.0 MiB .* cannot be written to .*TMPDIR"):
            worker.write_tensors("constants.safetensors", {"0": torch.zeros(1024, 1024)})
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
