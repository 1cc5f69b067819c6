"""Every way a measuring process can go wrong, injected: one failure as a value, a fresh process, and the job goes on.

Faults come from a plugin file that the process runs first; it wraps the operators. Only tests can name one.
"""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autosched.core.errors import DeviceError, WorkerLost
from autosched.core.program import Program
from autosched.core.records import Failure, FailureKind, PairRecord, ScheduleRecord, SoloRecord
from autosched.core.schedule import Schedule, sequential
from autosched.device import worker_process
from autosched.device.base import Pair
from autosched.device.cpu_session import CpuSession
from autosched.device.worker import Worker
from tests.conformance.graphs import random_placement
from tests.conformance.programs import branches_program
from tests.conformance.waiting import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc to see who is alive")

# Operators of the test program: two branches of (mm, relu); the last operator joins them.
BRANCHES, DEPTH = 2, 2
BAD = 3

Open = Callable[..., CpuSession]


@pytest.fixture
def program() -> Program:
    return branches_program(branches=BRANCHES, depth=DEPTH, size=16)[0]


PLUGIN = """
import pathlib
seen = {{}}

def current():
    text = pathlib.Path({code!r}).read_text()
    if text not in seen:
        exec(compile(text, "fault", "exec"), seen.setdefault(text, {{}}))
    return seen[text]

def wrap_kernel(index, kernel):
    def run(slots):
        names = current()
        return names["fault"](kernel, slots) if names["INDEX"] == index else kernel(slots)
    return run
"""

FAULT = """
import os, signal, subprocess, sys, threading, time
import torch

INDEX = {index}

def once():
    try:
        os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def fault(kernel, slots, folder={folder!r}):
{code}
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[float], tuple[CpuSession, Path]]]:
    """A session for each time limit, with the file whose code its operators run now: a living process serves the next test too."""
    sessions: dict[float, tuple[CpuSession, Path]] = {}

    def get(timeout_s: float) -> tuple[CpuSession, Path]:
        if timeout_s not in sessions:
            folder = tmp_path_factory.mktemp("plugin")
            code = folder / "code.py"
            (folder / "plugin.py").write_text(PLUGIN.format(code=str(code)))
            program, constants = branches_program(branches=BRANCHES, depth=DEPTH, size=16)
            session = CpuSession(program, constants, timeout_s=timeout_s, max_lanes=2, widths=(1,), plugin=folder / "plugin.py")
            sessions[timeout_s] = session, code
        return sessions[timeout_s]

    yield get
    for session, _ in sessions.values():
        session.close()


@pytest.fixture
def opened(tmp_path: Path, warm: Callable[[float], tuple[CpuSession, Path]]) -> Open:
    """A session whose operator ``BAD`` first runs ``code``, in which ``once()`` is true the first time on this machine."""

    def make(code: str, *, timeout_s: float = 60.0, index: int = BAD) -> CpuSession:
        session, place = warm(timeout_s)
        indented = textwrap.indent(textwrap.dedent(code), "    ")
        text = FAULT.format(marker=str(tmp_path / "marker"), folder=str(tmp_path), index=index, code=indented)
        fresh = place.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(place)
        session._ended.clear()  # its operators are others from now on
        return session

    return make


def state(pid: int) -> str:
    """The state letter of a process, empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_gone(pid: int) -> bool:
    return wait_until(lambda: state(pid) in ("", "Z"))


_drawn: set[Schedule] = set()
_rng = random.Random(0)


def lane_schedules(program: Program) -> list[Schedule]:
    """One on a lane and one on two, neither seen before: a living process runs them a first time, one after the other."""
    found: list[Schedule] = []
    _drawn.add(sequential(program.graph))  # which a test may have run before
    while len(found) < 2:
        drawn = random_placement(_rng, program.graph, 1 + len(found))
        if drawn not in _drawn:
            _drawn.add(drawn)
            found.append(drawn)
    return found


def expect_failure(found: object, kind: FailureKind, words: str = "") -> None:
    assert isinstance(found, Failure), found
    assert found.kind is kind
    assert words in found.detail


@pytest.mark.parametrize(("how", "words"), [("SIGKILL", "SIGKILL"), ("SIGSEGV", "SIGSEGV")])
def test_killed_by_a_signal_is_one_failure(opened: Open, program: Program, how: str, words: str) -> None:
    session = opened(f"if once(): os.kill(os.getpid(), signal.{how})\nkernel(slots)")
    found = session.schedules(lane_schedules(program), rounds=2)
    expect_failure(found[0], FailureKind.CRASH, words)
    assert isinstance(found[1], ScheduleRecord)
    again = session.schedules(lane_schedules(program), rounds=2)
    assert all(isinstance(item, ScheduleRecord) for item in again)


def test_killed_from_outside_in_the_middle_goes_on(opened: Open, program: Program) -> None:
    # Slow enough that the signal finds it at work.
    session = opened("time.sleep(0.002); kernel(slots)")
    session.schedules(lane_schedules(program), rounds=1)
    first = session.worker_pid
    assert first is not None
    killer = threading.Timer(0.3, os.kill, (first, signal.SIGKILL))
    killer.start()
    found = session.schedules(lane_schedules(program), rounds=400)
    killer.join()
    assert sorted(type(item).__name__ for item in found) in (["Failure", "ScheduleRecord"], ["ScheduleRecord", "ScheduleRecord"])
    assert session.worker_pid != first
    assert state(first) == ""  # reaped, no zombie


def test_where_memory_runs_out_the_measuring_process_is_the_first_to_go(opened: Open, program: Program) -> None:
    session = opened("kernel(slots)")
    session.schedules([sequential(program.graph)], rounds=1)
    ours, theirs = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (os.getpid(), session.worker_pid))
    assert theirs == min(1000, ours + 500)


def test_one_kill_from_outside_costs_an_interleaved_measurement_nothing(opened: Open, program: Program) -> None:
    session = opened("if once(): os.kill(os.getpid(), signal.SIGKILL)\nkernel(slots)")
    found = session.paired(lane_schedules(program), rounds=2)
    assert not isinstance(found, Failure)
    assert [len(row) for row in found] == [2, 2]


def test_the_crash_report_quotes_the_last_words(opened: Open, program: Program) -> None:
    session = opened("print('these were my last words', flush=True)\nos.abort()")
    expect_failure(session.schedules([sequential(program.graph)], rounds=1)[0], FailureKind.CRASH, "these were my last words")


def test_the_crash_report_quotes_the_thread_that_crashed(opened: Open, program: Program) -> None:
    other = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    session = opened(f"def by_the_guilty(): os.abort()\n{other}\nby_the_guilty()")
    expect_failure(session.schedules([sequential(program.graph)], rounds=1)[0], FailureKind.CRASH, "in by_the_guilty")


def test_a_flood_of_output_blocks_nobody(opened: Open, program: Program) -> None:
    session = opened("sys.stdout.write('x' * 300_000)\nsys.stdout.flush()\nkernel(slots)")
    assert isinstance(session.schedules([sequential(program.graph)], rounds=2)[0], ScheduleRecord)


def test_exit_in_the_middle_is_a_crash(opened: Open, program: Program) -> None:
    session = opened("os._exit(7)")
    expect_failure(session.schedules([sequential(program.graph)], rounds=1)[0], FailureKind.CRASH, "status 7")


def test_a_process_that_closes_its_pipes_is_ended(opened: Open, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_DYING_S", 0.1)
    session = opened("""
        if once():
            os.closerange(3, 256)
            time.sleep(600)
        kernel(slots)
    """)
    found = session.schedules(lane_schedules(program), rounds=2)
    expect_failure(found[0], FailureKind.CRASH, "has closed its pipes")
    assert isinstance(found[1], ScheduleRecord)


def test_nobody_waits_for_ever_for_a_process_that_a_kill_does_not_end(
    program: Program, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits in the kernel, for a GPU that no longer answers."""
    waited: list[float | None] = []

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        assert timeout is not None, "the job would hang"
        waited.append(timeout)
        raise subprocess.TimeoutExpired("a measuring process", timeout)

    session = CpuSession(*branches_program(branches=BRANCHES, depth=DEPTH, size=16), timeout_s=60.0, max_lanes=2, widths=(1,))
    assert isinstance(session.schedules([sequential(program.graph)], rounds=1)[0], ScheduleRecord)
    child = session._worker._child
    assert child is not None
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", wait)
        session.close()
    assert waited[-1] == worker_process._KILLED_S
    assert f"the measuring process {child.pid} was killed and is still there" in caplog.text
    assert child._process.wait(60.0) == -signal.SIGKILL


def test_hang_is_a_timeout_and_the_process_is_gone(opened: Open, program: Program) -> None:
    opened("kernel(slots)", timeout_s=2.0).schedules([sequential(program.graph)], rounds=1)
    session = opened("if once(): time.sleep(1000)\nkernel(slots)", timeout_s=2.0)
    pid = session.worker_pid
    found = session.schedules(lane_schedules(program), rounds=1)
    expect_failure(found[0], FailureKind.TIMEOUT, "2 s")
    assert isinstance(found[1], ScheduleRecord)
    assert pid is not None
    assert wait_gone(pid)


def test_hang_with_the_interpreter_lock_held_is_a_timeout(opened: Open, program: Program) -> None:
    # A native loop that never lets another thread run: nothing inside the process could end it.
    session = opened("import ctypes\nif once(): ctypes.PyDLL(None).sleep(1000)\nkernel(slots)", timeout_s=2.0)
    expect_failure(session.schedules([sequential(program.graph)], rounds=1)[0], FailureKind.TIMEOUT)


def test_hang_with_a_grandchild_ends_both(opened: Open, program: Program, tmp_path: Path) -> None:
    code = """
    if once():
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            grandchild = subprocess.Popen(["sleep", "1000"])
            with open(folder + "/pids", "w") as file:
                file.write(f"{os.getpid()} {grandchild.pid}")
            time.sleep(1000)
        time.sleep(1000)
    kernel(slots)
    """
    session = opened(code, timeout_s=2.0)
    expect_failure(session.schedules([sequential(program.graph)], rounds=1)[0], FailureKind.TIMEOUT)
    pids = [int(item) for item in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert all(wait_gone(pid) for pid in pids)


def test_a_slow_worker_that_makes_progress_is_left_alone(opened: Open, program: Program) -> None:
    session = opened("time.sleep(0.3)\nkernel(slots)", timeout_s=2.0)
    began = time.monotonic()
    assert isinstance(session.schedules([sequential(program.graph)], rounds=8)[0], ScheduleRecord)
    assert time.monotonic() - began > 2.0  # longer in all than it may show no progress


def test_a_pause_of_all_processes_is_not_counted(opened: Open, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened("time.sleep(1.5)\nkernel(slots)", timeout_s=2.0)
    pauses = iter([0.5])  # seconds into the wait for an answer

    usual = worker_process._ready

    def stopped_once(descriptor: int, event: int, wait_s: float) -> bool:
        pid = session.worker_pid
        if event == select.POLLIN and pid is not None and (begin_s := next(pauses, None)) is not None:
            # As where a container is paused, or a batch system suspends a job.
            time.sleep(begin_s)
            os.killpg(pid, signal.SIGSTOP)
            time.sleep(4.0)
            os.killpg(pid, signal.SIGCONT)
            return False
        return usual(descriptor, event, wait_s)

    session.schedules([sequential(program.graph)], rounds=1)  # the process is there and has the program
    monkeypatch.setattr(worker_process, "_ready", stopped_once)
    assert isinstance(session.schedules([sequential(program.graph)], rounds=1)[0], ScheduleRecord)


ODD_EXCEPTIONS = """
class Local(Exception):
    lock = threading.Lock()
class Mute(Exception):
    def __str__(self): raise TypeError("never")
which = int(open(folder + "/which").read())
if which == 0: raise MemoryError("no more")
if which == 1: raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
if which == 2: torch.empty(1 << 60)
if which == 3: raise ValueError("unusual shape")
if which == 4: raise Local(threading.Lock())
if which == 5: raise Mute()
if which == 6: raise RuntimeError("std::bad_alloc")
kernel(slots)
"""


def test_an_exception_arrives_as_text_and_kills_nobody(opened: Open, program: Program, tmp_path: Path) -> None:
    session = opened(ODD_EXCEPTIONS)
    pids = set()
    for which, (kind, words) in enumerate(
        [
            (FailureKind.OOM, "no more"),
            (FailureKind.OOM, "can't allocate memory"),
            (FailureKind.OOM, "RuntimeError"),
            (FailureKind.CRASH, "ValueError: unusual shape"),
            (FailureKind.CRASH, "Local"),
            (FailureKind.CRASH, "Mute"),
            (FailureKind.OOM, "bad_alloc"),
        ]
    ):
        (tmp_path / "which").write_text(str(which))
        for item in session.schedules(lane_schedules(program), rounds=1):
            expect_failure(item, kind, words)
        expect_failure(session.paired(lane_schedules(program), rounds=1), kind, words)
        expect_failure(session.pairs([Pair(0, 4)], repeats=1)[0], kind, words)
        solo = session.solo((1,), repeats=2)
        expect_failure(solo[BAD][0], kind, words)
        assert all(isinstance(row[0], SoloRecord) for index, row in enumerate(solo) if index != BAD)
        pids.add(session.worker_pid)
    (tmp_path / "which").write_text("-1")
    assert all(isinstance(item, ScheduleRecord) for item in session.schedules(lane_schedules(program), rounds=1))
    pids.add(session.worker_pid)
    assert len(pids) == 1


NAN_AT_FIRST = """
kernel(slots)
if once():
    for place, item in enumerate(slots):
        if torch.is_tensor(item): slots[place] = item * float("nan")
"""


def test_nan_where_the_reference_is_finite(opened: Open, program: Program) -> None:
    # The first run is the candidate's, the second is the reference in order.
    session = opened(NAN_AT_FIRST, index=len(program.graph) - 1)
    found = session.schedules(lane_schedules(program), rounds=1)
    expect_failure(found[0], FailureKind.NONFINITE)
    assert isinstance(found[1], ScheduleRecord)


def test_death_in_the_middle_of_a_batch_keeps_what_was_answered(opened: Open) -> None:
    # Pairs are answered one by one; only a pair with the bad operator meets the fault a second time.
    session = opened(
        "fault.calls = getattr(fault, 'calls', 0) + 1\nif fault.calls > 1: os.kill(os.getpid(), signal.SIGKILL)\nkernel(slots)"
    )
    asked = [Pair(0, 4), Pair(1, 5), Pair(BAD, 4), Pair(2, 6)]
    found = session.pairs(asked, repeats=2)
    assert [type(item) for item in found] == [PairRecord, PairRecord, Failure, PairRecord]
    expect_failure(found[2], FailureKind.CRASH, "SIGKILL")
    assert isinstance(session.pairs([Pair(0, 4)], repeats=2)[0], PairRecord)


def test_an_operator_that_kills_does_not_hide_the_others(opened: Open) -> None:
    session = opened("os.kill(os.getpid(), signal.SIGKILL)")
    found = session.solo((1,), repeats=2)
    expect_failure(found[BAD][0], FailureKind.CRASH, "SIGKILL")
    assert all(isinstance(row[0], SoloRecord) for index, row in enumerate(found) if index != BAD)


def test_an_operator_that_kills_at_one_width_keeps_its_times_at_the_others(opened: Open) -> None:
    session = opened("if torch.get_num_threads() == 2: os.kill(os.getpid(), signal.SIGSEGV)\nkernel(slots)")
    found = session.solo((1, 2), repeats=2)
    assert all(isinstance(row[0], SoloRecord) for row in found)
    operators = session._program.graph.operators
    alike = {operator.index for operator in operators if operator.signature == operators[BAD].signature}
    assert {index for index, row in enumerate(found) if isinstance(row[1], Failure)} == alike
    expect_failure(found[BAD][1], FailureKind.CRASH, "SIGSEGV")


def test_a_worker_that_always_dies_is_lost_not_retried_for_ever(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("import os\nprint('cannot live here', flush=True)\nos._exit(3)\n")
    session = CpuSession(*branches_program(), timeout_s=60, max_lanes=2, widths=(1,), plugin=plugin)
    try:
        with pytest.raises(WorkerLost, match="cannot live here"):
            session.pairs([Pair(0, 4)], repeats=1)
    finally:
        session.close()


def test_a_program_that_cannot_be_opened_says_why() -> None:
    program, constants = branches_program()
    constants.popitem()
    with (
        CpuSession(program, constants, timeout_s=60, max_lanes=2, widths=(1,)) as session,
        pytest.raises(DeviceError, match=r"constant .* is missing"),
    ):
        session.pairs([Pair(0, 4)], repeats=1)


def test_a_process_with_a_thousand_open_files_measures(program: Program) -> None:
    """A server with its connections. ``select`` cannot ask about numbers from 1024, and the measuring process was taken for dead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("fewer files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        made = branches_program(branches=BRANCHES, depth=DEPTH, size=16)
        with CpuSession(*made, timeout_s=60.0, max_lanes=2, widths=(1,)) as session:
            found = session.schedules(lane_schedules(program), rounds=2)
    finally:
        for handle in held:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(isinstance(item, ScheduleRecord) for item in found), found


def test_close_leaves_no_process_and_no_file(program: Program) -> None:
    session = CpuSession(*branches_program(branches=BRANCHES, depth=DEPTH, size=16), timeout_s=60.0, max_lanes=2, widths=(1,))
    session.schedules([sequential(program.graph)], rounds=1)
    pid, folder = session.worker_pid, session._worker.folder
    assert pid is not None
    assert folder.exists()
    assert folder.stat().st_mode & 0o077 == 0
    session.close()
    assert state(pid) == ""
    assert not folder.exists()


def test_folders_of_dead_processes_are_removed() -> None:
    from autosched.device.worker import _shared_memory

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = _shared_memory() / f"autosched-{ended.pid}-left"
    mine = _shared_memory() / f"autosched-{os.getpid()}-mine"
    left.mkdir()
    (left / ".held").touch()
    mine.mkdir()
    try:
        worker = Worker("autosched.device.worker_main", timeout_s=1)
        assert worker.folder.exists()
        worker.close()
        assert not left.exists()
        assert mine.exists()
    finally:
        mine.rmdir()


PARENT = """
import sys, time
sys.path.append({root!r})
from pathlib import Path
from types import SimpleNamespace
from autosched.core.schedule import sequential
from autosched.device.cpu_session import CpuSession
from tests.conformance.programs import branches_program
from tests.conformance.waiting import wait_until

program, constants = branches_program(branches=2, depth=2, size=16)
session = CpuSession(program, constants, timeout_s=100, max_lanes=2, widths=(1,))
session.schedules([sequential(program.graph)], rounds=1)
print(session.worker_pid, session._worker.folder, flush=True)
{then}
"""


def run_parent(then: str) -> tuple[subprocess.Popen[str], int, Path]:
    root = str(Path(__file__).resolve().parents[2])
    # No guard for the main module and no installation: the way a user's script in a source checkout looks.
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT.format(root=root, then=then)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    return parent, int(pid), Path(folder)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_survives_its_parent(how: signal.Signals) -> None:
    parent, pid, folder = run_parent("session.schedules([sequential(program.graph)], rounds=10**7)")
    time.sleep(0.2)
    assert state(pid) not in ("", "Z")
    parent.send_signal(how)
    parent.communicate(timeout=120)
    assert wait_gone(pid)
    if how is signal.SIGINT:
        assert not folder.exists()
    elif folder.exists():
        import shutil

        shutil.rmtree(folder)


def test_a_forked_process_that_ends_leaves_its_parents_measuring_process_at_work() -> None:
    forks = """
import os
forked = os.fork()
if forked == 0:
    sys.exit(0)
assert os.waitpid(forked, 0) == (forked, 0)
time.sleep(0.2)
print(session.worker_pid, flush=True)
"""
    parent, pid, _ = run_parent(forks)
    still_there, errors = parent.communicate(timeout=120)
    assert still_there.split() == [str(pid)], errors


def test_a_parent_that_forgets_to_close_leaves_nothing() -> None:
    parent, pid, folder = run_parent("")
    _, errors = parent.communicate(timeout=120)
    assert parent.returncode == 0, errors
    assert wait_gone(pid)
    assert not folder.exists()
