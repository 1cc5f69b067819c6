"""The session's calls: what is run in which order, for how long, and what is kept of a call that is stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosched.core.errors import DeviceMissing
from autosched.core.records import DeviceKey
from experiments import calls
from experiments.calls import LEFT
from experiments.h200 import session
from experiments.h200.archive import Archive
from experiments.h200.session import Step
from experiments.h200.suite import CLAIMED, CONTROLS

ROOT = Path(__file__).resolve().parents[2]
Made = list[tuple[str, float]]


class Rig:
    """A session of steps that pretend: each takes what it is told to of its limit and ends with the status it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.made: Made = []
        self.environment: dict[str, str] = {}
        self.now = 0.0
        self.answers: dict[str, list[tuple[float, int | None]]] = {}
        self._patch, self.out = monkeypatch, out
        self.gpu = "NVIDIA H100 80GB HBM3"
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr(session, "run_logged", self._run)
        monkeypatch.setattr(session, "cuda_device_key", lambda: DeviceKey("cuda", self.gpu, ()))

    def _run(
        self, command: list[str], limit_s: float, log: Path, *, environment: dict[str, str], meanwhile: Callable[[], None]
    ) -> int | None:
        name, self.environment = log.stem, environment
        self.made.append((name, limit_s))
        queue = self.answers.get(name, [])
        takes_s, status = queue.pop(0) if queue else (1.0, 0)
        self.now += min(takes_s, limit_s)
        return None if takes_s > limit_s else status

    def call(self, plan: list[Step], *arguments: str) -> tuple[int, Made]:
        self.made = []
        self._patch.setattr(session, "steps", lambda opara: plan)
        self._patch.setattr(sys, "argv", ["session.py", "--out", str(self.out), *arguments])
        return session.main(), [(name, round(limit_s)) for name, limit_s in self.made]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    return Rig(monkeypatch, tmp_path / "out")


def step(name: str, plan_s: float = 100.0, least_s: float = 10.0, *, required: bool = False) -> Step:
    return Step(name, ("-c", "pass", "{seconds}", "{out}"), plan_s, least_s, required=required)


def test_three_calls_do_everything_in_order(rig: Rig) -> None:
    plan = [step("a"), step("b", 300.0, 200.0), step("c"), step("d")]
    rig.answers = {"a": [(80.0, 0)], "b": [(290.0, LEFT)], "c": [(90.0, 0)], "d": [(50.0, 0), (50.0, 0)]}
    # b does not fit behind a, so that c and d go before it.
    assert rig.call(plan, "--seconds", "245") == (LEFT, [("a", 100), ("c", 100), ("d", 70)])
    assert rig.call(plan, "--seconds", "305") == (LEFT, [("b", 300)])
    # Its plan is used up; now it gets what is left over.
    rig.answers["b"] = [(30.0, 0)]
    assert rig.call(plan, "--seconds", "305") == (0, [("b", 300)])
    assert rig.call(plan, "--seconds", "305") == (0, [])


def test_what_is_not_done_with_its_share_waits_until_the_others_have_had_theirs(rig: Rig) -> None:
    plan = [step("a", 100.0), step("b", 100.0)]
    rig.answers = {"a": [(500.0, 0), (20.0, LEFT)], "b": [(30.0, 0)]}
    assert rig.call(plan, "--seconds", "205") == (LEFT, [("a", 100), ("b", 100), ("a", 70)])


def test_what_doctor_finds_on_the_machine_is_no_failure_of_the_session(rig: Rig) -> None:
    plan = [item for item in session.steps() if item.name == "doctor"]
    for found, status in ((3, 0), (5, 0), (1, 1)):
        rig.out = rig.out.with_name(f"found {found}")
        rig.answers = {"doctor": [(5.0, found)]}
        assert rig.call(plan) == (status, [("doctor", 60)])


def test_what_failed_is_not_run_again_unless_asked_and_is_said(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [step("a"), step("b")]
    rig.answers = {"a": [(5.0, 3), (5.0, 0)]}
    assert rig.call(plan) == (1, [("a", 100), ("b", 100)])
    assert "a failed, b done" in capsys.readouterr().out
    assert rig.call(plan) == (1, [])
    assert rig.call(plan, "--retry") == (0, [("a", 100)])


def test_a_step_is_told_to_do_again_what_failed_in_it_also_where_it_is_not_done(real: Callable[..., int], tmp_path: Path) -> None:
    """A step goes on where it was stopped, and would take what failed there for an answer."""
    code = "import sys; sys.exit(10 if '--retry' not in sys.argv else 0)"
    assert real(code, "--smoke", "--seconds", "20") == LEFT
    assert real(code, "--smoke", "--seconds", "20", "--retry") == 0


def test_tests_whose_process_was_broken_go_on_at_once_in_another(rig: Rig) -> None:
    plan = [Step("a", ("-c", "pass"), 100.0, 20.0, restarts=2), step("b")]
    rig.answers = {"a": [(5.0, LEFT), (5.0, -11), (70.0, LEFT), (5.0, 0)]}
    # What is left of its own time after the third would not do; what is left over after the others does.
    assert rig.call(plan, "--seconds", "505") == (0, [("a", 100), ("a", 95), ("a", 90), ("b", 100), ("a", 419)])


def test_what_a_signal_ended_is_left_and_says_more(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [step("a"), step("b", 500.0)]
    rig.answers = {"a": [(5.0, -9), (5.0, -11), (5.0, 0)]}
    # At most once more in this call, after everything else.
    assert [name for name, _ in rig.call(plan)[1]] == ["a", "b", "a"]
    assert "a left, b done" in capsys.readouterr().out
    assert rig.call(plan)[0] == 0


def test_without_a_device_nothing_else_is_run_and_every_call_asks(rig: Rig) -> None:
    plan = [step("device", 40.0, 5.0, required=True), step("a")]
    rig.answers = {"device": [(3.0, 1)]}
    assert rig.call(plan) == (1, [("device", 40)])
    assert rig.call(plan) == (0, [("device", 40), ("a", 100)])
    assert rig.call(plan) == (0, [("device", 40)])


def test_a_machine_that_says_little_memory_is_free_compiles_several_at_a_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSCHED_COMPILE_WORKERS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16))
    rig.call([step("a")])
    assert rig.environment["AUTOSCHED_COMPILE_WORKERS"] == "8"
    monkeypatch.setenv("AUTOSCHED_COMPILE_WORKERS", "5")
    rig.call([step("b")])
    assert rig.environment["AUTOSCHED_COMPILE_WORKERS"] == "5"


def test_a_step_that_ends_the_whole_session_has_had_its_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(command: list[str], limit_s: float, log: Path, *, meanwhile: Callable[[], None], **_: object) -> int:
        raise KeyboardInterrupt

    plan = [step("a"), step("b")]
    with monkeypatch.context() as patch:
        patch.setattr(session, "run_logged", killed)
        with pytest.raises(KeyboardInterrupt):
            rig.call(plan)
    assert json.loads((rig.out / "h100" / "session.json").read_text())["steps"]["a"] == {"state": "left", "took_s": 100.0}
    assert rig.call(plan, "--seconds", "120") == (0, [("b", 100), ("a", 114)])


def test_a_step_that_is_stopped_from_outside_is_charged_for_what_it_took(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = tmp_path / "all.tar.gz"

    def stopped(command: list[str], limit_s: float, log: Path, *, meanwhile: Callable[[], None], **_: object) -> int:
        (rig.out / "h100" / "row.json").write_text("{}")
        rig.now += 30.0
        meanwhile()
        raise KeyboardInterrupt

    plan = [step("a"), step("b")]
    with monkeypatch.context() as patch:
        patch.setattr(session, "run_logged", stopped)
        with pytest.raises(KeyboardInterrupt):
            rig.call(plan, "--archive", str(archive))
    # Another machine knows as much as this one.
    rig.out = tmp_path / "elsewhere"
    assert rig.call(plan, "--archive", str(archive)) == (0, [("a", 70), ("b", 100)])
    assert (rig.out / "h100" / "row.json").exists()


def test_the_list_and_names_of_steps(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [step("a"), step("b")]
    assert rig.call(plan, "--only", "b") == (0, [("b", 100)])
    capsys.readouterr()
    assert rig.call(plan, "--list") == (LEFT, [])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["left", "a"], ["done", "b"]]
    with pytest.raises(SystemExit):
        rig.call(plan, "--only", "nothing")
    assert "there is no step nothing; expected some of a, b" in capsys.readouterr().err


def test_each_gpu_and_a_rehearsal_have_folders_of_their_own(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert rig.call([step("a")], "--smoke")[1] == [("a", 100)]
    assert rig.call([step("a")])[1] == [("a", 100)]
    rig.gpu = "NVIDIA H200"
    assert rig.call([step("a"), step("b")], "--only", "a")[1] == [("a", 100)]
    assert sorted(path.name for path in rig.out.iterdir()) == ["h100", "h200", "rehearsal"]
    capsys.readouterr()
    assert rig.call([step("a"), step("b")], "--list") == (LEFT, [])
    assert [(line.split()[1], line.split()[-1]) for line in capsys.readouterr().out.splitlines()[:3:2]] == [("a", "h100"), ("a", "h200")]


def test_without_a_gpu_nothing_is_run(rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> DeviceKey:
        raise DeviceMissing("there is no NVIDIA driver here")

    monkeypatch.setattr(session, "cuda_device_key", missing)
    assert rig.call([step("a")]) == (1, [])
    assert "nothing is run: there is no NVIDIA driver here" in capsys.readouterr().out
    assert rig.call([step("a")], "--list") == (LEFT, [])


def test_another_machine_goes_on_from_the_archive(rig: Rig, tmp_path: Path) -> None:
    archive = tmp_path / "kept" / "session.tar.gz"
    plan = [step("a"), step("b")]
    rig.answers = {"a": [(90.0, 0)]}
    (rig.out / "h100" / "runs").mkdir(parents=True)
    (rig.out / "h100" / "runs" / "part").write_text("rows")
    assert rig.call(plan, "--seconds", "100", "--archive", str(archive)) == (LEFT, [("a", 95)])
    rig.out = tmp_path / "elsewhere"
    assert rig.call(plan, "--archive", str(archive)) == (0, [("b", 100)])
    assert (rig.out / "h100" / "runs" / "part").read_text() == "rows"
    assert "a" in {path.stem for path in (rig.out / "h100" / "logs").iterdir()}
    # Where there is something already, that is gone on with.
    rig.answers = {"c": [(1.0, 0)]}
    assert rig.call([*plan, step("c")], "--archive", str(archive)) == (0, [("c", 100)])
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]


def test_a_machine_that_is_taken_away_while_the_archive_is_unpacked_loses_nothing(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What says that steps are done is there when their results are: else they would never be made again."""
    archive, plan = tmp_path / "session.tar.gz", [step("a"), step("b")]
    for place in ("h100/data/rows", "h100/z/rows", "a/rows", "z/rows"):
        (rig.out / place).parent.mkdir(parents=True, exist_ok=True)
        (rig.out / place).write_text("rows")
    assert rig.call(plan, "--archive", str(archive))[0] == 0
    whole, copy = {path.relative_to(rig.out) for path in rig.out.rglob("*") if path.is_file()}, shutil.copy2
    for most in range(1, len(whole)):
        rig.out = tmp_path / f"elsewhere-{most}"
        copied: list[object] = []

        def taken_away(source: str, target: str, copied: list[object] = copied, most: int = most, **options: Any) -> object:
            copied.append(target)
            if len(copied) > most:
                raise KeyboardInterrupt
            return copy(source, target, **options)

        with monkeypatch.context() as patch:
            patch.setattr(shutil.copytree, "__defaults__", (False, None, taken_away, False, False))
            with pytest.raises(KeyboardInterrupt):
                rig.call(plan, "--archive", str(archive))
        assert not list(rig.out.glob("*/session.json"))
        assert rig.call(plan, "--archive", str(archive))[0] == 0
        assert {path.relative_to(rig.out) for path in rig.out.rglob("*") if path.is_file()} >= whole


def test_a_diary_that_cannot_be_read_has_every_step_run_again(rig: Rig) -> None:
    plan = [step("a"), step("b")]
    assert rig.call(plan)[0] == 0
    diary = rig.out / "h100" / "session.json"
    diary.write_bytes(diary.read_bytes()[:20])
    assert rig.call(plan) == (0, [("a", 100), ("b", 100)])


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A session of real processes."""

    def call(code: str, *arguments: str) -> int:
        plan = [Step("a", ("-c", code, "{out}", "{seconds}"), 60.0, 1.0, retry=("--retry",))]
        monkeypatch.setattr(session, "steps", lambda opara: plan)
        monkeypatch.setattr(sys, "argv", ["session.py", "--out", str(tmp_path / "out"), *arguments])
        return session.main()

    return call


def test_a_command_gets_its_folder_and_seconds_and_its_words_are_logged(
    real: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert real("import sys; print(sys.argv[1:]); print('oh', file=sys.stderr)", "--seconds", "100", "--smoke") == 0
    folder = tmp_path / "out" / "rehearsal"
    log = (folder / "logs" / "a.log").read_text()
    assert str([str(folder), "48", "--smoke"]) in log
    assert log.rstrip().endswith("oh")
    assert "at most 60 s" in log
    assert capsys.readouterr().out.splitlines()[1:3] == [f"    {[str(folder), '48', '--smoke']}", "    oh"]


def test_commands_run_the_checkouts_code_whatever_is_installed(
    real: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel may be of another commit than figures say, or be missing; and no other folder of the checkout may hide a package's name."""
    (tmp_path / "site" / "autosched").mkdir(parents=True)
    (tmp_path / "site" / "autosched" / "__init__.py").write_text("raise ImportError('the wheel of another commit')")
    (tmp_path / "site" / "its_dependency.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    code = (
        "import sys; from pathlib import Path; import autosched, its_dependency, autosched.search.portfolio; "
        f"assert Path(autosched.__file__).resolve().parents[1] == Path({str(ROOT)!r}), autosched.__file__; "
        f"assert {str(ROOT)!r} not in sys.path, sys.path"
    )
    assert real(code, "--smoke") == 0, (tmp_path / "out" / "rehearsal" / "logs" / "a.log").read_text()


def test_what_a_command_said_before_it_was_ended_is_logged(
    real: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    code = "import shutil, time; print('as far as this, in', shutil.get_terminal_size().columns); time.sleep(60)"
    assert real(code, "--smoke", "--seconds", "8") == LEFT
    # In fewer columns pytest names what failed and leaves out why.
    assert (tmp_path / "out" / "rehearsal" / "logs" / "a.log").read_text().endswith("as far as this, in 200\n")


def test_whoever_is_told_to_end_packs_what_its_step_said(tmp_path: Path) -> None:
    archive = tmp_path / "all.tar.gz"
    code = (
        f"import sys; sys.path.append({str(ROOT)!r})\nfrom experiments.h200 import session\n"
        "words = \"import time; print('as far as this'); time.sleep(600)\"\n"
        "session.steps = lambda opara: [session.Step('a', ('-c', words), 600.0, 1.0, smoke=())]\n"
        f"sys.argv = ['session.py', '--smoke', '--out', {str(tmp_path / 'out')!r}, '--archive', {str(archive)!r}]\n"
        "raise SystemExit(session.main())"
    )
    log = tmp_path / "out" / "rehearsal" / "logs" / "a.log"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        for _ in range(600):
            if log.exists() and log.read_text().endswith("as far as this\n"):
                break
            time.sleep(0.1)
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
    with tarfile.open(archive) as file:
        said = file.extractfile("rehearsal/logs/a.log")
        assert said is not None
        assert said.read().endswith(b"as far as this\n")


def test_what_jobs_leave_to_each_other_is_kept_by_commit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSCHED_CACHE", raising=False)
    monkeypatch.setattr(session, "commit", lambda: "0123456789abcdef")
    rig.call([step("a")])
    assert rig.environment["AUTOSCHED_CACHE"] == str(rig.out / "h100" / "cache" / "012345678")
    monkeypatch.setenv("AUTOSCHED_CACHE", "/elsewhere")
    rig.call([step("b")])
    assert rig.environment["AUTOSCHED_CACHE"] == "/elsewhere"


_UNTIL_PACKED = """
import pathlib, sys, tarfile, time
out = pathlib.Path(sys.argv[1])
archive = out.parents[1] / "kept" / "all.tar.gz"
(out / "row.json").write_text("{}")
for _ in range(300):
    time.sleep(0.1)
    if archive.exists() and "rehearsal/row.json" in tarfile.open(archive).getnames():
        sys.exit(0)
sys.exit(3)
"""


def test_the_archive_has_a_result_while_its_step_still_runs(
    real: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_LOOK_S", 0.1)
    assert real(_UNTIL_PACKED, "--smoke", "--archive", str(tmp_path / "kept" / "all.tar.gz")) == 0


def test_an_archive_is_written_anew_for_results_and_not_for_logs(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    target = tmp_path / "all.tar.gz"
    archive = Archive(tmp_path / "whole", target, {"diary.json"})
    (tmp_path / "whole" / "a.json").write_text("{}")
    archive.look()
    before = target.stat().st_mtime_ns
    (tmp_path / "whole" / "a.log").write_text("words")
    (tmp_path / "whole" / "diary.json").write_text("{}")
    archive.look()
    assert target.stat().st_mtime_ns == before
    (tmp_path / "whole" / "b.json").write_text("{}")
    archive.look()
    assert target.stat().st_mtime_ns > before


def test_an_archive_has_what_jobs_leave_to_each_other_but_no_compiled_code(tmp_path: Path) -> None:
    cache, target = tmp_path / "whole" / "h100" / "cache" / "0123abcde", tmp_path / "all.tar.gz"
    archive = Archive(tmp_path / "whole", target)
    for name in ("measurements", "runs", "regions", "native"):
        (cache / name).mkdir(parents=True)
        (cache / name / "one").touch()
    archive.look()
    with tarfile.open(target) as file:
        assert sorted(name.split("/")[-2] for name in file.getnames() if name.endswith("one")) == ["measurements", "runs"]
    before = target.stat().st_mtime_ns
    (cache / "regions" / "two").touch()
    archive.look()
    assert target.stat().st_mtime_ns == before


def test_an_archive_that_cannot_be_written_ends_nothing(rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").touch()
    assert rig.call([step("a"), step("b")], "--archive", str(tmp_path / "kept" / "all.tar.gz")) == (0, [("a", 100), ("b", 100)])
    assert "all.tar.gz is as it was" in capsys.readouterr().out


def test_an_archive_that_was_cut_off_on_its_way_is_put_aside(rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "all.tar.gz"
    (rig.out / "h100").mkdir(parents=True)
    (rig.out / "h100" / "row.json").write_bytes(os.urandom(100_000))
    rig.call([step("a")], "--archive", str(archive))
    whole = archive.read_bytes()
    for cut in (whole[: len(whole) // 2], b"", b"not an archive"):
        rig.out = rig.out.with_name(rig.out.name + "_")
        archive.write_bytes(cut)
        assert rig.call([step("a"), step("b")], "--archive", str(archive)) == (0, [("a", 100), ("b", 100)])
        assert "everything is begun anew" in capsys.readouterr().out
        assert archive.with_name("all.tar.gz.unreadable").read_bytes() == cut
        assert not (rig.out / "h100" / "row.json").exists()


def test_an_archive_stays_where_a_file_goes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    target = tmp_path / "all.tar.gz"
    archive = Archive(tmp_path / "whole", target)
    (tmp_path / "whole" / "a.json").write_text("{}")
    archive.look()
    before = target.read_bytes()
    (tmp_path / "whole" / "b.json").write_text("{}")

    def gone(file: tarfile.TarFile, name: Path, arcname: str, **_: object) -> None:
        raise FileNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "add", gone)
        archive.look()
    assert target.read_bytes() == before
    archive.look()
    assert target.read_bytes() != before


def test_the_plan_is_in_order_and_has_every_test_once(tmp_path: Path) -> None:
    plan = session.steps(tmp_path / "clone")
    names = [item.name for item in plan]
    # What must hold, then figures, then questions; nothing but the lack of a GPU keeps the rest from its turn.
    assert names[:7] == ["device", "doctor", "tests", "googlenet", "defaults", "probes", "rewritten"]
    assert [item.name for item in plan if item.required] == ["device"]
    assert len(set(names)) == len(names)
    assert "opara" not in [item.name for item in session.steps()]
    # All of them, none twice.
    assert [word for item in plan for word in item.command if "tests/gpu" in word] == [str(ROOT / "tests" / "gpu")]
    assert all(item.plan_s >= item.least_s or item.plan_s == 0.0 for item in plan)
    # Up to the suite they fill three calls of nine minutes and no more than a fourth; what comes behind is dropped first.
    counted = [item.plan_s for item in plan[: names.index("suite") + 1]]
    assert 3 * 535 <= sum(counted) < 4 * 535


def test_the_page_has_every_step_in_order_with_its_seconds() -> None:
    page = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| [^|]+ \| (\d+|what is left) \|", page, re.MULTILINE)
    said = [(name, int(seconds) if seconds.isdigit() else 0) for name, seconds in rows]
    assert said == [(f"`{item.name}`", int(item.plan_s)) for item in session.steps(ROOT)]


def test_a_models_compilers_have_time_in_whatever_step_begins_with_it() -> None:
    plan = {item.name: item for item in session.steps()}
    for name, budget_s, compilers_s in (("defaults", 40.0, 60.0), ("suite", 60.0, 60.0), ("googlenet", 60.0, 200.0)):
        assert calls.compile_total_s(plan[name].least_s - plan[name].margin_s, budget_s) >= compilers_s
    defaults, googlenet, suite = ([word for word in plan[name].command if ":" in word] for name in ("defaults", "googlenet", "suite"))
    assert defaults == googlenet == ["torchvision:googlenet"]
    assert len(set(suite)) == len(suite)
    assert set(CLAIMED) | set(CONTROLS) == {*suite, *defaults}


def test_googlenet_has_times_in_the_first_call_and_nearly_all_of_the_second(rig: Rig) -> None:
    """What is left of its half hour when a third call comes may not be enough for a model that begins then."""
    plan = session.steps()
    rig.answers = {
        "device": [(40.0, 0), (15.0, 0), (15.0, 0)],
        "doctor": [(15.0, 0)],
        "tests": [(160.0, 0)],
        "defaults": [(200.0, 0)],
        "googlenet": [(430.0, 0)],
        "probes": [(300.0, 0)] * 3,
    }
    assert rig.call(plan) == (LEFT, [("device", 180), ("doctor", 60), ("tests", 230), ("defaults", 280), ("probes", 120)])
    assert rig.call(plan) == (LEFT, [("device", 180), ("googlenet", 500), ("probes", 90)])
    # As slow as a cold disk makes it, the first thing of the second call.
    rig.out = rig.out.with_name("cold")
    rig.answers = {"device": [(175.0, 0), (60.0, 0)], "doctor": [(30.0, 0)], "tests": [(160.0, 0)], "probes": [(300.0, LEFT)]}
    assert rig.call(plan)[1][3:] == [("probes", 170)]
    assert rig.call(plan)[1][:2] == [("device", 180), ("googlenet", 475)]


def test_two_calls_of_seven_minutes_have_tests_a_model_probes_and_pairs(rig: Rig) -> None:
    plan = session.steps()
    rig.answers = {
        "device": [(25.0, 0), (25.0, 0)],
        "doctor": [(10.0, 0)],
        "tests": [(110.0, 0)],
        "defaults": [(265.0, LEFT)],
        "probes": [(200.0, 0)],
        "rewritten": [(170.0, 0)],
    }
    assert [name for name, _ in rig.call(plan, "--seconds", "420")[1]] == ["device", "doctor", "tests", "defaults"]
    assert [name for name, _ in rig.call(plan, "--seconds", "420")[1]] == ["device", "probes", "rewritten"]


def test_a_test_that_hangs_leaves_time_for_the_others_of_its_step() -> None:
    """Its process is ended, and another must start within what is left of the step's own seconds."""
    from tests.gpu import conftest

    tests = next(item for item in session.steps() if item.name == "tests")
    starting_s = 20.0
    assert tests.plan_s - starting_s - conftest._LONGEST_S - conftest._STUCK_S >= tests.least_s


def test_what_it_starts_is_little(tmp_path: Path) -> None:
    """It must not hold memory of the device, nor take the time that its steps should have."""
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); import experiments.h200.session; "
        "assert not {'torch', 'pandas', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
