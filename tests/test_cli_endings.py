"""Commands that end before their time: a reader that leaves, a full disk, SIGTERM."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autosched.cli import endings, main
from autosched.cli.printing import complain, live_progress
from autosched.core.errors import NoFeasibleCandidate
from autosched.export.bundle import encode_bundle
from autosched.progress import LiveProgress
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.command import run
from tests.conformance.graphs import TwoBranches


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))


def test_what_is_left_at_the_end_is_not_looked_through() -> None:
    """With a captured model the interpreter took up to eight seconds for that, behind the last line."""
    look = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); from autosched.cli import main; main(['--version'])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


@pytest.mark.parametrize("arguments", [["models"], ["--version"], ["tune", "--help"], ["models", "--json"], ["cache"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_mistake(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as nobody:
        done = subprocess.run([sys.executable, "-P", "-m", "autosched", *arguments], stdout=nobody, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_of_json_that_leaves_takes_no_exit_code_away() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-P", "-m", "autosched", "report", "missing.autosched", "--json"]
    with os.fdopen(writing, "wb") as nobody:
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_leaves_makes_no_incompatible_file_compatible(more: list[str], tmp_path: Path) -> None:
    file = tmp_path / "two.autosched"
    file.write_bytes(encode_bundle(two_branches_bundle(TwoBranches())))
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-P", "-m", "autosched", "check", str(file), "autosched:toy", *more]
    with os.fdopen(writing, "wb") as nobody:
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (4, "")


_PRINTS = """
import os, sys
import autosched.doctor
from autosched.cli import main
def examine():
    print("by the model")
    os.system("echo by its child")
    os.write(1, b"by its library\\n")
    return []
autosched.doctor.examine = examine
main(sys.argv[1:])
"""


@pytest.mark.parametrize("arguments", [["doctor", "--json"], ["doctor"]], ids=" ".join)
def test_what_a_model_prints_is_not_among_the_json(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(_PRINTS)
    command = [sys.executable, "-P", str(tmp_path / "prints.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    others = done.stdout
    if "--json" in arguments:
        assert json.loads(done.stdout) == {"findings": []}
        others = done.stderr
    for who in ("by the model", "by its child", "by its library"):
        assert who in others


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [("models", 0), ("models --json", 0), ("report missing.autosched", 2), ("report missing.autosched --json", 2), ("tune", 2)],
)
def test_a_process_without_standard_streams_ends_with_the_same_code(arguments: str, code: int, closed: str) -> None:
    command = f"{shlex.quote(sys.executable)} -P -m autosched {arguments} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    if "--json" in arguments and closed == "2>&-":
        assert json.loads(done.stdout)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize("arguments", [["models"], ["--version"]], ids=" ".join)
def test_a_full_disk_is_said_in_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-P", "-m", "autosched", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_as_large_as_it_may_be_is_said_in_one_line(tmp_path: Path) -> None:
    command = f"ulimit -f 1; exec {shlex.quote(sys.executable)} -P -m autosched models > {shlex.quote(str(tmp_path / 'said'))}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "number", "code", "words"),
    [
        (["tune", "autosched:toy", "--device", "cpu"], signal.SIGTERM, 143, "the same command continues"),
        (["tune", "autosched:toy", "--device", "cpu"], signal.SIGINT, 130, "the same command continues"),
        (["compare", "autosched:toy", "--device", "cpu"], signal.SIGTERM, 143, "the same command continues"),
        (["collect", "autosched:toy", "--device", "cpu"], signal.SIGTERM, 143, "the same command continues"),
        (["tune", "autosched:toy", "--device", "cpu"], signal.SIGHUP, 129, "the same command continues"),
    ],
)
def test_a_signal_ends_a_job_with_its_code_and_how_to_go_on(
    command: list[str], number: signal.Signals, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autosched.zoo.load", lambda *args, **options: os.kill(os.getpid(), number))
    before = signal.getsignal(signal.SIGTERM)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may be run by nohup
    try:
        assert run(*command) == code
    finally:
        signal.signal(signal.SIGHUP, hangup)
    assert words in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


_LONG = """
import sys, time
import autosched.doctor
from pathlib import Path
from autosched.cli import main
from autosched.cli.printing import live_progress
from autosched.core.scratch import Scratch
def examine():
    with Scratch(Path(sys.argv[1])) as folder, live_progress() as progress:
        progress.stage("capture", 10.0)
        (folder / "weights").touch()
        for _ in range(600):
            time.sleep(0.05)
autosched.doctor.examine = examine
main(["doctor"])
"""


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_stops_a_command_and_leaves_no_weights(nohup: bool, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(_LONG)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process, terminal = pty.fork()
    if process == 0:
        # These tests may be run by nohup themselves.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-P", str(tmp_path / "long.py"), str(scratch)])
    try:
        end_s = time.monotonic() + 60.0
        while not list(scratch.glob("*/weights")) and time.monotonic() < end_s:
            time.sleep(0.05)
        os.close(terminal)
        if nohup:
            time.sleep(1.0)
            assert os.waitpid(process, os.WNOHANG) == (0, 0)
            assert list(scratch.glob("*/weights"))
            return
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 129
        assert not list(scratch.iterdir())
    finally:
        if nohup:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


_INTERRUPTED_IN_EXEC = """
import os, signal, sys
import autosched.doctor
from autosched.cli import main
autosched.doctor.examine = lambda: exec(f"import os; os.kill(os.getpid(), {sys.argv[1]})")
main(["doctor"])
"""  # run with -m: only then does the interpreter look at its note when it ends


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_python_makes_a_note_of_has_the_same_code(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupted_in_exec.py").write_text(_INTERRUPTED_IN_EXEC)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")])))
    command = [sys.executable, "-P", "-m", "interrupted_in_exec", str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + number, "autosched: interrupted\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_is_json_when_json_was_asked_for(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autosched.zoo.load", lambda *args, **options: os.kill(os.getpid(), number))
    assert run("tune", "autosched:toy", "--device", "cpu", "--json") == code
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["exit_code"]) == ("Interrupted", code)
    assert "the same command continues" in error["message"]


def test_a_bug_is_json_too_and_still_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stumble() -> None:
        raise KeyError("lanes")

    monkeypatch.setattr("autosched.doctor.examine", stumble)
    with pytest.raises(KeyError, match="lanes"):
        main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out) == {"error": {"type": "KeyError", "message": "'lanes'", "exit_code": 1}}


@pytest.mark.parametrize(
    ("code", "words"),
    [("no data set", "ended it: no data set."), (0, "sys.exit(0)"), (None, "sys.exit()"), (3, "sys.exit(3)")],
)
def test_code_that_ends_the_process_has_not_done_what_was_asked_for(
    code: object, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave() -> None:
        raise SystemExit(code)

    monkeypatch.setattr("autosched.doctor.examine", leave)
    assert run("doctor", "--json") == 2
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert (error["type"], error["exit_code"]) == ("SystemExit", 2)
    assert words in error["message"]
    assert words in said.err


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_code_that_ends_the_process_at_once_is_told_of_and_a_forked_one_may(options: tuple[str, ...]) -> None:
    code = (
        "import os, sys, autosched.doctor\n"
        "from autosched.cli import main\n"
        "def leave():\n"
        "    forked = os.fork()\n"
        "    if forked:\n"
        "        print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), file=sys.stderr)\n"
        "    os._exit(0)\n"
        "autosched.doctor.examine = leave\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, "doctor", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "0\nautosched: code that the command called ended it with os._exit(0). Look for os._exit in the model's code.\n"
    assert json.loads(done.stdout)["error"]["exit_code"] == 2 if options else done.stdout == ""


def test_what_leaves_nothing_behind_promises_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("autosched.doctor.examine", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run("doctor") == 143
    assert capsys.readouterr().err == "autosched: interrupted\n"


class _Dying:
    """Asks this process to stop just when no exception can get out."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0)


def test_a_stop_where_no_exception_gets_out_is_heard_a_moment_later() -> None:
    with endings.stoppable() as stop:
        with pytest.raises(KeyboardInterrupt):
            _die_and_wait()
        assert stop.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _die_and_wait() -> None:
    dying = _Dying()
    del dying
    time.sleep(20)


def test_a_sigterm_that_somebody_handles_already_is_left_to_them() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with endings.stoppable() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert stop.exit_code == 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell_on(writing: int, monkeypatch: pytest.MonkeyPatch) -> LiveProgress:
    """Tell of two stages, and complain, where what is written to the descriptor ``writing``, which is closed then, cannot arrive."""
    with os.fdopen(writing, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        with live_progress() as progress:
            for stage in ("capture", "search"):
                progress.stage(stage, 10.0)
                progress.update(done=1, total=2)
        complain("a word")
        monkeypatch.undo()
        # What could not be written would be tried again when the file is closed.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), writing)
    return progress


def test_a_job_goes_on_when_nobody_reads_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    _tell_on(writing, monkeypatch)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("a full disk", marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")),
        "a terminal that is gone",
    ],
)
def test_a_job_whose_progress_cannot_be_written_goes_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "a full disk":
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        terminal, writing = pty.openpty()
        os.close(terminal)
    with pytest.raises(OSError, match=r"No space left|Input/output"):
        os.write(writing, b"a word")
    assert _tell_on(writing, monkeypatch)._console.quiet


@pytest.mark.parametrize(("asked", "silent"), [(("--quiet",), True), (("-q",), True), ((), False)])
def test_quiet_leaves_out_progress_and_no_error(
    asked: tuple[str, ...], silent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(*_: object, progress: LiveProgress, **__: object) -> None:
        progress.stage("capture", 10.0)
        progress.update(done=1, total=2)
        raise NoFeasibleCandidate("nothing runs")

    for name in ("tune", "compare"):
        monkeypatch.setattr(f"autosched.pipeline.{name}", job)
        assert run(name, "autosched:toy", "--device", "cpu", *asked) == 5
        said = capsys.readouterr().err.splitlines()
        assert said[-1] == "autosched: nothing runs"
        assert (len(said) == 1) == silent


@pytest.mark.parametrize(
    "arguments", [["models", "--json"], ["tune", "autosched:t\u0153y", "--json"], ["check", "\u00e9.autosched"]], ids=" ".join
)
def test_a_terminal_that_lacks_a_letter_gets_json_as_utf_8_and_no_traceback(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = subprocess.run([sys.executable, "-P", "-m", "autosched", *arguments], capture_output=True, check=False)
    assert "Traceback" not in done.stderr.decode("ascii")
    assert done.returncode == (0 if arguments[0] == "models" else 2)
    if "--json" in arguments:
        said = json.loads(done.stdout.decode())
        assert "models" in said or "\u0153" in said["error"]["message"]


@pytest.mark.parametrize("coding", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}], ids=" ".join)
def test_a_result_has_an_escape_where_its_terminal_lacks_a_letter(coding: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in coding.items():
        monkeypatch.setenv(name, value)
    code = "from autosched.cli import printing; printing.spell_out_what_has_no_letter(); printing.tell('caf\\u00e9')"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, b"caf\\xe9", b"")


@pytest.mark.parametrize("arguments", [["report", "\udcff.autosched"], ["tune", "\udcff.pt2"]], ids=["report", "tune"])
def test_the_json_of_a_file_whose_name_is_no_utf_8_spells_it_out(arguments: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "autosched", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
    assert "\\udcff." in json.loads(done.stdout)["error"]["message"]


_WARNS = """
import warnings
import autosched.doctor
from autosched.cli import main
from autosched.runtime.cache import CacheWarning
def examine():
    warnings.warn("autosched: not kept", CacheWarning)
    warnings.warn("of somebody else", UserWarning)
    raise SystemExit(0)
autosched.doctor.examine = examine
main(["doctor"])
"""


def test_a_warning_of_our_own_is_a_line_without_its_source(tmp_path: Path) -> None:
    (tmp_path / "warns.py").write_text(_WARNS)
    done = subprocess.run([sys.executable, str(tmp_path / "warns.py")], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert lines[0] == "autosched: not kept"
    assert lines[1].endswith("UserWarning: of somebody else")
