"""Regions compiled in other processes: the same results as here, and a process that crashes, hangs or lies costs its region alone."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.decoding import decode_json
from autosched.core.errors import UsageError
from autosched.core.schedule import Schedule, sequential
from autosched.core.variants import Lowering, Variant
from autosched.runtime.inductor.common import Refused
from autosched.runtime.inductor.turns import turns, wait_for_turns
from autosched.runtime.kernels import random_inputs
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.regions import compilers
from autosched.runtime.regions import library as regions
from autosched.runtime.regions import pool as region_pool
from autosched.runtime.regions.compilers import end_ahead, start_ahead, take_ahead
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.regions.pool import begin_ahead, compile_apart, worker_count
from autosched.runtime.regions.store import RegionStore
from autosched.runtime.regions.worker import Job, Opening
from autosched.runtime.widths import WidePrograms

CPU = torch.device("cpu")
# Only the first test compiles for real; the others ask whether there is a compiler.
pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")


class Four(nn.Module):
    """Four different regions, the second of them twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.sigmoid(x - x.mean(-1, keepdim=True)) * 2.0
        b = torch.tanh(a @ x + 1.0) * 3.0
        b = torch.tanh(b @ x + 1.0) * 3.0
        c = torch.relu((b @ x) - 0.5).cumsum(0)
        d = torch.exp(-torch.abs((c @ x).sum(-1, keepdim=True)))
        return d @ torch.ones(1, 16)


class Two(nn.Module):
    """Two different regions, the second of them twice: what a compiler makes of them costs seconds each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.sigmoid(x - x.mean(-1, keepdim=True)) * 2.0
        b = torch.tanh(a @ x + 1.0) * 3.0
        return torch.tanh(b @ x + 1.0) * 3.0


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(Four().eval(), (torch.randn(16, 16),), lowering=Lowering.FUSED)


def everything(captured: Captured, library: RegionLibrary) -> list[tuple[int, int, int]]:
    count = len(captured.program.graph)
    return [(index, 1, int(variant)) for index in range(count) for variant in library.variants(index) if variant]


def schedule_of(captured: Captured, library: RegionLibrary) -> Schedule:
    graph = captured.program.graph
    chosen = {operator: variant for operator, _, variant in everything(captured, library)}
    return dataclasses.replace(sequential(graph), variant=tuple(chosen.get(index, 0) for index in range(len(graph))))


def outputs(captured: Captured, library: RegionLibrary) -> list[torch.Tensor]:
    programs = WidePrograms(captured.program, captured.constants, regions=library)
    plan = make_plan(captured.program.graph, schedule_of(captured, library))
    return programs.for_plan(plan).run(random_inputs(captured.program, 3))


@pytest.fixture
def ahead() -> Iterator[Callable[[int], list[int]]]:
    """Starts processes for a CPU ahead; their ids."""

    def start(count: int) -> list[int]:
        start_ahead("cpu", count)
        return [compiler.process.pid for _, compiler in compilers._ahead]

    yield start
    end_ahead()


def lives(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_other_processes_compile_what_this_one_would_and_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: Callable[[int], list[int]]
) -> None:
    captured = capture(Two().eval(), (torch.randn(16, 16),), lowering=Lowering.FUSED)
    alone = RegionLibrary(captured.program, CPU, "scope", RegionStore(tmp_path / "alone"))
    wanted = everything(captured, alone)
    alone.prepare(wanted, workers=1)
    assert alone.compiled == 0
    expected = outputs(captured, alone)
    beats: list[int] = []
    shared = RegionLibrary(captured.program, CPU, "scope", RegionStore(tmp_path / "shared"))
    # One that was started before there was anything to compile is the first.
    started: list[str] = []
    start = compilers.start_compiler

    def counted(kind: str, plugin: Path | None) -> compilers.Compiler | None:
        started.append(kind)
        return start(kind, plugin)

    monkeypatch.setattr(region_pool, "start_compiler", counted)
    pids = ahead(1)
    assert ahead(2) == pids
    shared.prepare(wanted, lambda: beats.append(1), workers=2)
    assert started == ["cpu"]
    assert not any(map(lives, pids))
    assert beats
    assert (shared.compiled, shared.reused, shared.processes) == (alone.compiled, 0, 2)
    assert shared.compiled < len(wanted)  # equal regions are compiled once
    assert compare(outputs(captured, shared), expected).bitwise
    assert shared.compiled == alone.compiled  # nothing was left for this process
    assert shared.refusals == alone.refusals == ()
    assert len(list((tmp_path / "shared").iterdir())) == shared.compiled
    # Again: all of it from the store, and no process is started.
    again = RegionLibrary(captured.program, CPU, "scope", RegionStore(tmp_path / "shared"))
    again.prepare(wanted, workers=2)
    assert again.processes == 1
    assert compare(outputs(captured, again), expected).bitwise
    assert (again.compiled, again.reused) == (0, shared.compiled)


def misbehaving(tmp_path: Path, **bodies: str) -> Path:
    """A plugin that compiles nothing: it makes up the text of every piece, and runs a body for the one with an operator of that name."""
    path = tmp_path / "plugin.py"
    path.write_text(
        "import os, signal, time\n"
        "from autosched.runtime.inductor import settings as inductor_settings\n"
        "from autosched.runtime.regions import compile as region_compile\n"
        "inductor_settings.settings_digest = lambda kind: 'agreed'\n"
        "def compile(piece, *args, **kwargs):\n"
        f"    for name, body in {bodies!r}.items():\n"
        "        if any('aten::' + name in call.target for call in piece.calls):\n"
        "            exec(body)\n"
        "    return region_compile.Code('def call(args):\\n    return args\\n', None)\n"
        "region_compile.compile_piece = compile\n"
    )
    return path


@pytest.mark.parametrize(
    ("bodies", "reasons"),
    [
        (
            {"exp": "os.kill(os.getpid(), signal.SIGSEGV)", "relu": "raise RuntimeError('the compiler fell over')"},
            {"exp": "killed by SIGSEGV", "relu": "the compiler fell over"},
        ),
        ({"exp": "time.sleep(1000)", "relu": "os._exit(3)"}, {"exp": "no result within 5 s", "relu": "ended with status 3"}),
    ],
    ids=["crash and error", "hang and exit"],
)
def test_a_process_that_is_lost_costs_its_region_alone(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bodies: dict[str, str], reasons: dict[str, str]
) -> None:
    apart = functools.partial(compile_apart, plugin=misbehaving(tmp_path, **bodies), limit_s=5.0)
    monkeypatch.setattr(regions, "compile_apart", apart)
    monkeypatch.setattr(regions, "settings_digest", lambda kind: "agreed")
    monkeypatch.setattr(regions, "compile_piece", lambda *args, **kwargs: pytest.fail("this process compiles what failed in another"))
    library = RegionLibrary(captured.program, CPU, "scope", RegionStore(tmp_path / "store"))
    wanted = everything(captured, library)
    library.prepare(wanted, workers=2)
    found = [library.kernel(*item) for item in wanted]
    targets = {item.operator: [call.target for call in captured.program.graph.operators[item.operator].calls] for item in library.refusals}
    assert len(library.refusals) == len(reasons)
    for name, reason in reasons.items():
        (refusal,) = (item for item in library.refusals if any(f"aten::{name}" in target for target in targets[item.operator]))
        assert reason in refusal.reason
    assert sum(isinstance(item, Refused) for item in found) == len(reasons)
    assert library.compiled == len(list((tmp_path / "store").iterdir())) > 1


def test_a_compiler_that_hangs_at_one_region_after_another_is_given_up(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = dict.fromkeys(("sigmoid", "tanh", "relu", "exp"), "time.sleep(1000)")
    apart = functools.partial(compile_apart, plugin=misbehaving(tmp_path, **bodies), limit_s=2.0)
    monkeypatch.setattr(regions, "compile_apart", apart)
    monkeypatch.setattr(regions, "settings_digest", lambda kind: "agreed")
    library = RegionLibrary(captured.program, CPU, "scope", RegionStore(tmp_path / "store"))
    wanted = everything(captured, library)
    library.prepare(wanted, workers=2)
    # Nor does this process compile them.
    reasons = [made.reason if isinstance(made := library.kernel(*item), Refused) else "compiled" for item in wanted]
    assert set(reasons) == {
        "the process that compiled it was lost: no result within 2 s",
        "given up after 2 regions in a row had no result within 2 s",
    }


def test_where_the_settings_are_others_no_process_helps(captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = misbehaving(tmp_path)
    monkeypatch.setattr(regions, "compile_apart", functools.partial(compile_apart, plugin=plugin))
    monkeypatch.setattr(regions, "settings_digest", lambda kind: "of this process")
    asked: list[object] = []

    def compile_here(piece: object, *args: object, **kwargs: object) -> Refused:
        asked.append(piece)
        return Refused("compiled here")

    monkeypatch.setattr(regions, "compile_piece", compile_here)
    library = RegionLibrary(captured.program, CPU, "scope", RegionStore(tmp_path / "store"))
    wanted = everything(captured, library)
    library.prepare(wanted, workers=2)
    assert library.compiled == len(asked) == 0
    found = [library.kernel(*item) for item in wanted]
    assert {item.reason for item in found if isinstance(item, Refused)} == {"compiled here"}
    assert len(asked) < len(found)


def test_processes_that_were_started_ahead_end_where_there_is_nothing_to_compile(
    captured: Captured, monkeypatch: pytest.MonkeyPatch, ahead: Callable[[int], list[int]]
) -> None:
    library = RegionLibrary(captured.program, CPU, "scope", None)
    pids = ahead(2)
    assert all(map(lives, pids))
    library.prepare([(0, 1, Variant.CALLS)])
    assert not any(map(lives, pids))
    # Nor are those of use that are for another kind of device, or write where this process does not look.
    start_ahead("cuda", 1)
    assert not take_ahead("cpu", 1)
    monkeypatch.setattr(compilers, "inductor_moved", lambda: True)
    pids = ahead(1)
    assert not take_ahead("cpu", 1)
    assert not any(map(lives, pids))


def fake_opening(lock: Path) -> Opening:
    return Opening("", "cpu", "", (), os.fsencode(lock))


def jobs(count: int) -> list[Job]:
    return [Job(number, 0, 0, 1, int(Variant.COMPILED)) for number in range(count)]


@pytest.mark.parametrize(("where", "name"), [(compilers.subprocess, "Popen"), (compilers.os, "pipe"), (region_pool, "Scratch")])
def test_processes_that_do_not_start_leave_the_jobs_to_whoever_asked(where: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(where, name, refuse)
    made = list(compile_apart(fake_opening, jobs(3), 2))
    assert [(item.job.number, item.source, item.refused) for item in made] == [(0, "", ""), (1, "", ""), (2, "", "")]


def test_a_folder_for_temporary_files_whose_name_is_no_utf_8_is_as_good(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = RegionLibrary(captured.program, CPU, "scope", None)
    home = tmp_path / "\udcff"
    home.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    told: list[Opening] = []

    class Reading(region_pool._Pool):
        def _start(self) -> bool:
            told.append(decode_json(self._opening_file.read_bytes(), Opening))
            return False

    monkeypatch.setattr(region_pool, "_Pool", Reading)
    assert len(list(compile_apart(library._opening, jobs(3), 1))) == 3
    assert Path(os.fsdecode(told[0].lock_file)).parent.parent == home


def test_what_is_not_compiled_in_time_is_nobodys_fault(tmp_path: Path) -> None:
    plugin = misbehaving(tmp_path)
    made = list(compile_apart(fake_opening, jobs(3), 2, total_s=0.0, plugin=plugin))
    assert [(item.job.number, item.source, item.refused) for item in made] == [(0, "", ""), (1, "", ""), (2, "", "")]


def test_processes_end_when_the_one_that_asked_stops_listening(captured: Captured, tmp_path: Path) -> None:
    library = RegionLibrary(captured.program, CPU, "scope", None)
    pids: list[int] = []
    start = region_pool._Pool._start

    class Counting(region_pool._Pool):
        def _start(self) -> bool:
            started = start(self)
            pids.append(self._workers[-1].process.pid)
            return started

    found: Sequence[Job] = list(library._jobs(everything(captured, library)).values())
    opening_file = tmp_path / "opening.json"
    opening_file.write_bytes(b"{}")
    pool = Counting(opening_file, "cpu", list(found), 2, 60.0, None)
    running = pool.run(lambda: None, math.inf)
    answers: Callable[[], object] = functools.partial(next, running, None)
    answers()
    pool.close()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_number_of_processes_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_pool, "usable_cores", lambda: 16)
    monkeypatch.setattr(region_pool, "_free_host_bytes", lambda: 1 << 40)
    monkeypatch.delenv("AUTOSCHED_COMPILE_WORKERS", raising=False)
    assert [worker_count(count) for count in (0, 1, 3, 4, 10, 1000)] == [1, 1, 1, 2, 5, 16]
    assert worker_count(1000, free_device_bytes=5 << 30) == 2
    assert worker_count(1000, free_device_bytes=0) == 1
    monkeypatch.setenv("AUTOSCHED_COMPILE_WORKERS", "3")
    assert worker_count(1000) == 3
    monkeypatch.setenv("AUTOSCHED_COMPILE_WORKERS", "0")
    with pytest.raises(UsageError, match="AUTOSCHED_COMPILE_WORKERS"):
        worker_count(1000)
    monkeypatch.delenv("AUTOSCHED_COMPILE_WORKERS")
    monkeypatch.setattr(region_pool, "usable_cores", lambda: 1)
    assert worker_count(1000) == 1
    ahead: list[tuple[str, int]] = []
    monkeypatch.setattr(region_pool, "start_ahead", lambda kind, count: ahead.append((kind, count)))
    for count in (1, 2, 4, 16):
        monkeypatch.setattr(region_pool, "usable_cores", lambda count=count: count)
        begin_ahead("cuda")
    assert ahead == [("cuda", 0), ("cuda", 0), ("cuda", 2), ("cuda", 8)]
    monkeypatch.setattr(region_pool, "usable_cores", lambda: 8)
    monkeypatch.setattr(region_pool, "_free_host_bytes", lambda: 1 << 20)
    assert worker_count(1000) == 1
    monkeypatch.setenv("AUTOSCHED_COMPILE_WORKERS", "3")
    assert worker_count(1000) == 3
    assert worker_count(1000, free_device_bytes=5 << 30) == 2


_HOLDER = """
import os, sys
from autosched.runtime.inductor.turns import turns
with turns(os.fsencode(sys.argv[1]))():
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_the_device_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "turn"
    lock.touch()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        descriptor = os.open(lock, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        other.kill()  # whoever dies with it has it no more
    # A kernel that is timed while its region is checked: both ask for the turn.
    with turns(os.fsencode(lock))(), turns(os.fsencode(lock))():
        pass
    descriptor = os.open(lock, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_kernels_are_timed_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime import benchmarking

    within: list[str] = []

    class Timer:
        def benchmark_gpu(self, what: str) -> float:
            within.append(what)
            return 1.0

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        within.append("begin")
        yield
        within.append("end")

    assert callable(getattr(type(benchmarking.benchmarker), "benchmark_gpu", None))  # else regions of a GPU are compiled one by one
    monkeypatch.setattr(benchmarking, "benchmarker", Timer())
    assert wait_for_turns(turn)
    assert benchmarking.benchmarker.benchmark_gpu("a kernel") == 1.0
    assert within == ["begin", "a kernel", "end"]
    monkeypatch.setattr(benchmarking, "benchmarker", object())
    assert not wait_for_turns(turn)
