"""The measurement journal: torn tails, damaged lines, scopes, and two processes at once."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autosched.core.errors import IncompatibleArtifact, UsageError
from autosched.core.records import (
    Contamination,
    DeviceKey,
    Engine,
    Failure,
    FailureKind,
    PairRecord,
    Samples,
    SoftwareKey,
    SoloRecord,
)
from autosched.datasets import journal as journal_module
from autosched.datasets.journal import Journal, Scope

SCOPE = Scope(DeviceKey("cpu", "test", (("cores", "2"),)), SoftwareKey((("torch", "2.13"),)))


def solo(signature: str, median: float = 5.0, count: int = 7) -> SoloRecord:
    return SoloRecord(signature, 1, Samples(median, median, median, median, median, count), Contamination())


def pair(first: str, last: str) -> PairRecord:
    return PairRecord(first, 1, last, 1, 5.0, 6.0, 7.0, 1.1, 1.2, 0.64, 1, 1, 7, Contamination(0.01, 2000.0))


def test_answers_survive_reopening(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "run.jsonl"
    failure = Failure(FailureKind.CRASH, "signal 9")
    with Journal.open(path, SCOPE) as journal:
        journal.add(solo("a"))
        journal.add(pair("b", "a"))
        journal.add(pair("a", "b"))
        journal.add_solo("b", 2, failure)
        journal.add_pair("b", 1, "b", 2, failure)
    again = Journal.open(path, SCOPE)
    assert again.solo("a", 1) == solo("a")
    assert again.solo("a", 2) is None
    assert again.solo("b", 2) == failure
    assert again.pair("a", 1, "b", 1) == pair("a", "b")
    assert again.pair("b", 2, "a", 1) is None
    assert again.pair("b", 1, "b", 2) == failure
    # In a fixed order, whichever was measured first.
    assert again.pairs() == [pair("a", "b"), pair("b", "a")]
    # One line each, and none more for looking.
    written = path.read_bytes()
    assert written.count(b"\n") == 5
    again.close()
    assert path.read_bytes() == written


def test_a_job_that_measured_nothing_leaves_no_file(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "j", SCOPE) as journal:
        assert len(journal) == 0
    assert not (tmp_path / "j").exists()


def test_answers_are_on_the_disk_when_a_batch_of_them_has_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    path.touch()  # as a process leaves it that ended before its first line
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes().count(b"\n")))
    with Journal.open(path, SCOPE, batch=2) as journal:
        for name in "abcde":
            journal.add(solo(name))
    assert synced == [2, 4, 5]


def test_what_others_measure_meanwhile_is_read_with_the_next_batch_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    decoded: list[str] = []
    decode_json = journal_module.decode_json
    monkeypatch.setattr(journal_module, "decode_json", lambda data, kind: decoded.append(kind.__name__) or decode_json(data, kind))
    with Journal.open(path, SCOPE, batch=1) as journal, Journal.open(path, SCOPE, batch=1) as other:
        for name in "abc":
            other.add(solo(name))
        assert journal.solo("a", 1) is None
        journal.add(solo("d"))
        assert [journal.solo(name, 1) for name in "abcd"] == [solo(name) for name in "abcd"]
        decoded.clear()
        other.add(solo("e"))
        journal.add(solo("f"))
        assert journal.solo("e", 1) == solo("e")
        # Each reads its own line and what the other has added since: "d" and "e", "e" and "f".
        assert decoded.count("_Line") == 4


def test_a_file_that_another_process_has_replaced_or_emptied_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal.open(path, SCOPE, batch=1) as journal:
        journal.add(solo("a"))
        journal.add(solo("b"))
        damaged = bytearray(path.read_bytes())
        damaged[20] ^= 0x01
        path.write_bytes(bytes(damaged))
        # This one puts the damaged line aside: the file is another one, and soon longer than what was read of the old one.
        with Journal.open(path, SCOPE, batch=1) as other:
            for name in ("longer name", "another name"):
                other.add(solo(name))
        journal.refresh()
        assert journal.solo("longer name", 1) == solo("longer name")
        assert len(list(tmp_path.glob("j.corrupt-*"))) == 1
        path.write_bytes(b"")
        with Journal.open(path, SCOPE) as other:
            other.add(solo("c"))
        journal.refresh()
        assert journal.solo("c", 1) == solo("c")


def test_what_cannot_be_written_is_said_once_answered_all_the_same_and_written_when_it_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "j"
    with Journal.open(path, SCOPE, batch=2) as journal, caplog.at_level(logging.WARNING):
        # As where the disk is full.
        path.mkdir()
        for name in "abcd":
            journal.add(solo(name))
        assert [journal.solo(name, 1) for name in "abcd"] == [solo(name) for name in "abcd"]
        assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
        path.rmdir()
        journal.add(solo("e"))
    again = Journal.open(path, SCOPE)
    assert [again.solo(name, 1) for name in "abcde"] == [solo(name) for name in "abcde"]


def test_lines_that_others_damage_on_a_full_disk_cost_no_more_than_they_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal.open(path, SCOPE, batch=1) as journal, caplog.at_level(logging.WARNING):
        path.write_bytes(b"damaged\n")
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "write_atomically", full)
            journal.add(solo("a"))
        assert "No space left" in caplog.text
        journal.add(solo("b"))
    with Journal.open(path, SCOPE) as journal:
        assert [journal.solo(name, 1) for name in "ab"] == [solo(name) for name in "ab"]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_file_system_without_locks_costs_no_answer(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Journal.open(tmp_path / "j", SCOPE, batch=1) as journal:
        for name in "ab":
            journal.add(solo(name))
        assert [journal.solo(name, 1) for name in "ab"] == [solo(name) for name in "ab"]


def test_a_process_that_was_stopped_with_the_file_in_its_hands_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an end to it, a job hung for as long as another one was suspended."""
    monkeypatch.setattr(journal_module, "_WAIT_S", 0.3)
    path = tmp_path / "run.jsonl"
    code = f"from filelock import FileLock; lock = FileLock({str(path) + '.lock'!r}); lock.acquire(); print(flush=True); input()"
    with Journal.open(path, SCOPE, batch=1) as journal:
        journal.add(solo("a"))
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stopped:
            assert stopped.stdout is not None
            stopped.stdout.readline()
            written = path.read_bytes()
            waited_s = []
            for name in "bc":
                begin_s = time.monotonic()
                journal.add(solo(name))
                waited_s.append(time.monotonic() - begin_s)
            with pytest.raises(TimeoutError):
                Journal.open(path, SCOPE)
            assert path.read_bytes() == written
            stopped.communicate(b"\n")
        assert waited_s[0] >= 0.3 > waited_s[1]
        assert [solo(name) for name in "abc"] == [journal.solo(name, 1) for name in "abc"]
    assert len(Journal.open(path, SCOPE)) == 3
    (said,) = caplog.messages
    assert f"measurements are not kept: {path} cannot be written (The file lock" in said


def test_a_newer_answer_replaces_and_too_few_samples_count_as_none(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "j", SCOPE) as journal:
        journal.add(solo("a", 5.0, count=3))
        assert journal.solo("a", 1, min_count=4) is None
        assert journal.solo("a", 1, min_count=3) is not None
        journal.add(solo("a", 6.0, count=9))
        journal.add(pair("a", "b"))
        assert journal.pair("a", 1, "b", 1, min_count=8) is None
        assert journal.pair("a", 1, "b", 1, min_count=7) == pair("a", "b")
        # What failed would fail again, however many samples are asked for.
        failure = Failure(FailureKind.CRASH, "signal 9")
        journal.add_pair("b", 1, "b", 1, failure)
        assert journal.pair("b", 1, "b", 1, min_count=8) == failure
    assert Journal.open(tmp_path / "j", SCOPE).solo("a", 1, min_count=4) == solo("a", 6.0, count=9)


def test_another_device_or_version_does_not_answer(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "j", SCOPE) as journal:
        journal.add(solo("a"))
    other = Scope(SCOPE.device, SoftwareKey((("torch", "2.12"),)))
    with Journal.open(tmp_path / "j", other) as journal:
        assert journal.solo("a", 1) is None
        journal.add(solo("a", 50.0))
    assert Journal.open(tmp_path / "j", SCOPE).solo("a", 1) == solo("a")


NATIVE = Scope(SCOPE.device, SCOPE.software.on(Engine.NATIVE))


@pytest.mark.parametrize(("scope", "engine", "other"), [(NATIVE, Engine.NATIVE, Engine.PYTHON), (SCOPE, Engine.PYTHON, Engine.NATIVE)])
def test_only_what_the_scopes_engine_ran_is_kept(tmp_path: Path, scope: Scope, engine: Engine, other: Engine) -> None:
    path = tmp_path / "j"
    with Journal.open(path, scope) as journal:
        for name, ran in (("mine", engine), ("other", other)):
            journal.add(dataclasses.replace(solo(name), engine=ran))
            journal.add(dataclasses.replace(pair(name, name), engine=ran))
        # Whoever measured it need not measure it again.
        assert journal.solo("other", 1) is not None
        assert len(journal.pairs()) == 2
    assert path.read_bytes().count(b"\n") == 2
    again = Journal.open(path, scope)
    assert again.solo("mine", 1) == dataclasses.replace(solo("mine"), engine=engine)
    assert again.solo("other", 1) is None
    assert [record.first for record in again.pairs()] == ["mine"]


def test_a_record_from_before_they_said_what_ran_them_answers_where_there_was_no_choice(tmp_path: Path) -> None:
    """A journal of native lanes also held what a program with an operator that they do not take was timed at, on lanes of Python."""
    path = tmp_path / "j"
    for scope in (SCOPE, NATIVE):
        body = (
            b'{"schema":1,"scope":"%s","kind":"solo","key":["a",1],"solo":{"signature":"a","width":1,"samples":{"median_us":5.0,'
            b'"ci_low_us":5.0,"ci_high_us":5.0,"p95_us":5.0,"min_us":5.0,"count":7},"contamination":{"foreign_load":-1.0,"clock_mhz":0.0},'
            b'"source":"measured"}}' % scope.digest.encode()
        )
        with path.open("ab") as file:
            file.write(b'{"check":"%s","entry":%s}\n' % (hashlib.sha256(body).hexdigest()[:16].encode(), body))
    failure = Failure(FailureKind.CRASH, "signal 9")
    assert Journal.open(path, SCOPE).solo("a", 1) == solo("a")
    with Journal.open(path, NATIVE) as journal:
        assert journal.solo("a", 1) is None
        journal.add_solo("b", 1, failure)
    # It is no damaged line, and stays where it is.
    assert not list(tmp_path.glob("*.corrupt-*"))
    assert Journal.open(path, SCOPE).solo("a", 1) == solo("a")
    assert Journal.open(path, NATIVE).solo("b", 1) == failure


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_last_line_is_forgotten_and_the_next_append_is_sound(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "j"
    with Journal.open(path, SCOPE) as journal:
        journal.add(solo("a"))
        journal.add(solo("b"))
    path.write_bytes(path.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING), Journal.open(path, SCOPE) as journal:
        assert journal.solo("a", 1) is not None
        assert journal.solo("b", 1) is None
        journal.add(solo("c"))
    again = Journal.open(path, SCOPE)
    assert again.solo("a", 1) == solo("a")
    assert again.solo("c", 1) == solo("c")
    assert not caplog.records


@pytest.mark.parametrize("garbage", [b"\x00\xff\xfe garbage\n", b"{}\n", b"null\n", b'{"check":"0","entry":{}}\n'])
def test_a_damaged_line_is_put_aside_with_one_warning(tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "j"
    with Journal.open(path, SCOPE) as journal:
        journal.add(solo("a"))
        journal.flush()
        with path.open("ab") as file:
            file.write(garbage)
        journal.add(solo("b"))
    with caplog.at_level(logging.WARNING):
        again = Journal.open(path, SCOPE)
        Journal.open(path, SCOPE)
    assert again.solo("a", 1) == solo("a")
    assert again.solo("b", 1) == solo("b")
    # The appending process noticed it, and nobody after it.
    (aside,) = tmp_path.glob("j.corrupt-*")
    assert aside.read_bytes() == garbage
    assert caplog.messages == [f"{path} held 1 damaged lines; they are kept in {aside} and will be measured again"]


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal.open(path, SCOPE) as journal:
        journal.add(solo("a", 5.25))
        journal.add(solo("b"))
    sound = path.read_bytes()
    first_line = sound.index(b"\n")
    for place in range(0, first_line, 7):
        damaged = bytearray(sound)
        damaged[place] ^= 0x01
        path.write_bytes(bytes(damaged))
        journal = Journal.open(path, SCOPE)
        assert journal.solo("a", 1) is None
        assert journal.solo("b", 1) == solo("b")


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    body = b'{"schema":99,"something":"new"}'
    check = hashlib.sha256(body).hexdigest()[:16]
    (tmp_path / "j").write_bytes(b'{"check":"%s","entry":%s}\n' % (check.encode(), body))
    with pytest.raises(IncompatibleArtifact, match="schema: 99"):
        Journal.open(tmp_path / "j", SCOPE)


def test_a_file_that_was_begun_anew_and_has_the_number_of_the_old_one_is_read_from_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, fresh = tmp_path / "j", tmp_path / "fresh"
    with Journal.open(path, SCOPE, batch=1) as journal:
        journal.add(solo("a"))
        with Journal.open(fresh, SCOPE) as other:
            for name in ("a name of another length", "b", "c"):
                other.add(solo(name))
        # As after --fresh on a file system that gives a number out again.
        path.write_bytes(fresh.read_bytes())
        journal.refresh()
        assert [journal.solo(name, 1) for name in "abc"] == [solo(name) for name in "abc"]
    assert not caplog.messages
    assert not list(tmp_path.glob("*.corrupt-*"))


def test_a_newer_autosched_beside_a_running_job_costs_it_nothing(tmp_path: Path) -> None:
    path = tmp_path / "j"
    body = b'{"schema":99,"something":"new"}'
    newer = b'{"check":"%s","entry":%s}\n' % (hashlib.sha256(body).hexdigest()[:16].encode(), body)
    with Journal.open(path, SCOPE, batch=1) as journal:
        path.write_bytes(newer)
        for name in "ab":
            journal.add(solo(name))
        assert [journal.solo(name, 1) for name in "ab"] == [solo(name) for name in "ab"]
    mine = path.read_bytes().removeprefix(newer)
    path.write_bytes(mine)
    again = Journal.open(path, SCOPE)
    assert [again.solo(name, 1) for name in "ab"] == [solo(name) for name in "ab"]


def test_a_record_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "j", SCOPE) as journal:
        with pytest.raises(UsageError, match="finite"):
            journal.add(solo("a", float("nan")))
        assert len(journal) == 0


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_journal import SCOPE, solo
from autosched.datasets.journal import Journal
with Journal.open(Path(sys.argv[1]), SCOPE, batch=3) as journal:
    for index in range(40):
        journal.add(solo(f"{sys.argv[2]}-{index}"))
"""


def test_two_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "j"
    here = str(Path(__file__).parent)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name, here]) for name in ("x", "y")]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0]
    journal = Journal.open(path, SCOPE)
    assert len(journal) == 80
    assert not list(tmp_path.glob("*.corrupt-*"))
