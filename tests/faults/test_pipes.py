"""Something that is no file where a file should be, above all a pipe, which whoever opens it waits for: nothing waits, and all goes on."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from autosched.core.records import DeviceKey, Failure, FailureKind, SoftwareKey
from autosched.core.regular_file import open_regular, read_regular
from autosched.datasets.journal import Journal, Scope
from autosched.datasets.store import Store
from autosched.pipeline.diary import Diary
from autosched.pipeline.memory import open_journal
from autosched.runtime.inductor.unfinished import remove_unfinished
from tests.conformance.store_suite import example_rows

SCOPE = Scope(DeviceKey("cpu", "double", ()), SoftwareKey((("torch", "0"),)))
FAILED = Failure(FailureKind.OOM, "too large")
pytestmark = pytest.mark.timeout(120)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def a_folder(path: Path) -> None:
    path.mkdir()


@pytest.fixture(params=[a_pipe, a_socket, a_folder])
def put(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """Puts something else in a file's place."""
    found: Callable[[Path], None] = request.param
    return found


def test_only_a_file_is_opened(tmp_path: Path, put: Callable[[Path], None]) -> None:
    put(tmp_path / "x")
    for mode in ("rb", "ab", "r+b"):
        with pytest.raises(OSError, match=r"not a regular file|No such device|Is a directory"):
            open_regular(tmp_path / "x", mode)
    with open_regular(tmp_path / "file", "ab") as file:
        file.write(b"12")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link", "ab") as file:
        file.write(b"34")
    assert read_regular(tmp_path / "file") == b"1234"


def test_in_a_pipe_that_somebody_reads_nothing_is_written(tmp_path: Path) -> None:
    a_pipe(tmp_path / "x")
    reader = os.open(tmp_path / "x", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(tmp_path / "x", "ab")
    finally:
        os.close(reader)


def test_a_job_whose_journal_is_none_measures_and_does_not_keep_it(
    tmp_path: Path, put: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    (tmp_path / "measurements").mkdir()
    put(tmp_path / "measurements" / f"{SCOPE.digest}.jsonl")
    with open_journal(SCOPE, private=False) as journal:
        journal.add_solo("a", 1, FAILED)
    assert journal.solo("a", 1) == FAILED
    assert "measurements are not kept" in caplog.text


def test_a_journal_that_is_put_aside_while_a_job_runs_costs_it_nothing(tmp_path: Path, put: Callable[[Path], None]) -> None:
    with Journal.open(tmp_path / "j", SCOPE) as journal:
        put(tmp_path / "j")
        journal.add_solo("a", 1, FAILED)
    assert journal.solo("a", 1) == FAILED


def test_a_job_whose_diary_is_none_goes_on(tmp_path: Path, put: Callable[[Path], None], caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "d.jsonl")
    with caplog.at_level(logging.WARNING), Diary(tmp_path / "d.jsonl", "q") as diary:
        diary.add({"key": (1.0,)}, {})
    assert diary.times_us == {"key": [1.0]}
    assert "a killed job will not go on" in caplog.text


def test_a_part_of_runs_that_is_none_is_passed_over(tmp_path: Path, put: Callable[[Path], None]) -> None:
    store = Store.create(tmp_path)
    store.append(example_rows())
    expected = store.solo()
    put(tmp_path / "solo" / f"part-{'0' * 64}.parquet")
    assert Store.open(tmp_path).solo() == expected


def test_a_pipe_for_a_library_of_inductors_goes(tmp_path: Path, put: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.runtime.cache_dir_utils.default_cache_dir", lambda: str(tmp_path))
    (tmp_path / "ab").mkdir()
    put(tmp_path / "ab" / "x.so")
    expected = [tmp_path / "ab" / "x.so"] if put is a_pipe else []
    assert remove_unfinished() == expected
