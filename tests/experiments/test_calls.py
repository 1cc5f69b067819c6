"""Calls of limited time: when a run is begun, what ends with its call, and files that are never half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from autosched.core.records import Failure, FailureKind
from autosched.core.report import StrategyRow
from autosched.core.variants import Lowering
from autosched.device.cuda.baselines import BaselineKind
from autosched.pipeline.adopting import TORCH_COMPILE
from experiments import calls
from experiments.calls import Call, another_s, compile_total_s, late_baselines, read_json, run_logged, run_to_end, write_json

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_is_begun_while_one_like_the_longest_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(calls.time, "monotonic", lambda: now[0])
    call = Call(100.0, spare_s=0.0, expect_s=1000.0)
    assert call.fits()  # the first has all the time there is
    now[0] = 40.0
    assert not call.fits()
    call.took(40.0)
    assert call.fits()
    now[0] = 60.0
    assert call.left_s == 40.0
    assert not call.fits()
    assert Call(float("inf")).fits()


def test_slow_compilers_leave_time_for_measuring() -> None:
    assert 60.0 + compile_total_s(512.0, 60.0) < 512.0 - 100.0
    assert compile_total_s(100.0, 60.0) > 0.0


def test_a_further_comparison_is_begun_with_a_minute_for_its_compilers() -> None:
    for took_s in (50.0, 500.0):
        assert compile_total_s(another_s(took_s, 60.0, compiled=True), 60.0) >= 60.0
    assert another_s(50.0, 60.0, compiled=False) == 50.0
    assert another_s(500.0, 60.0, compiled=False) < 200.0


def test_every_baseline_with_a_time_limit_is_known() -> None:
    limited = [*map(str, BaselineKind), TORCH_COMPILE, Lowering.MAX_AUTOTUNE.value]
    why = [Failure(FailureKind.TIMEOUT, "no progress for 8 s"), Failure(FailureKind.CRASH, "it broke"), None]
    names = [*limited, "portfolio"]
    rows = [StrategyRow(name, False, *[None] * 7, failure) for failure in why for name in names]  # type: ignore[arg-type]
    report = {"strategies": msgspec.to_builtins(rows)}
    assert late_baselines(report) == limited
    assert late_baselines({"error": {"message": "broken"}}) == []


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "folder" / "found.json"
    write_json(target, {"a": 1})

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calls.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json(target, {"a": 2})
    assert json.loads(target.read_text()) == {"a": 1}
    assert list(tmp_path.glob("folder/*.json")) == [target]


@pytest.mark.parametrize("kept", [0, 7, -2])
def test_a_file_that_was_cut_off_on_its_way_counts_for_nothing(tmp_path: Path, kept: int, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "a.json"
    assert read_json(target) is None
    write_json(target, {"answer": 42})
    assert read_json(target) == {"answer": 42}
    target.write_bytes(target.read_bytes()[:kept])
    assert read_json(target) is None
    assert f"{target} cannot be read" in capsys.readouterr().err


def test_what_a_process_prints_and_how_it_ends(tmp_path: Path) -> None:
    code = "import sys, os; print(os.environ['WORD'], os.getcwd()); print('why', file=sys.stderr); sys.exit(3)"
    ended = run_to_end([sys.executable, "-c", code], 60.0, environment={**os.environ, "WORD": "said"}, folder=tmp_path)
    assert (ended.status, ended.out.split(), ended.err.split()) == (3, ["said", str(tmp_path)], ["why"])
    late = run_to_end([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"], 0.01)
    assert late.status is None
    log = tmp_path / "logs" / "step.log"
    assert run_logged([sys.executable, "-c", code.replace("sys.exit(3)", "")], 60.0, log, environment={**os.environ, "WORD": "a"}) == 0
    assert run_logged([sys.executable, "-c", code], 60.0, log, environment={**os.environ, "WORD": "b"}) == 3
    assert log.read_text().count("why") == 2


def test_one_can_look_at_what_a_process_has_done_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_LOOK_S", 0.05)
    log = tmp_path / "step.log"
    seen: list[str] = []
    code = "import time; print('so far', flush=True); time.sleep(600)"
    assert run_logged([sys.executable, "-c", code], 3.0, log, meanwhile=lambda: seen.append(log.read_text())) is None
    assert seen[-1] == "so far\n"
    assert run_logged([sys.executable, "-c", "raise SystemExit(3)"], 60.0, log, meanwhile=lambda: None) == 3


def test_nobody_waits_for_what_a_process_leaves_behind_and_it_ends() -> None:
    leaves = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    ended = run_to_end([sys.executable, "-c", leaves], 60.0)
    assert ended.status == 0
    assert gone(int(ended.out))


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_nobody_waits_for_a_process_that_cannot_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one cannot that a driver holds in the kernel."""
    held: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(calls.os, "killpg", lambda group, how: held.append(group))
        patch.setattr(calls, "_DYING_S", 0.1)
        assert run_logged([sys.executable, "-c", "import time; time.sleep(600)"], 0.1, tmp_path / "step.log") is None
    os.killpg(held[0], signal.SIGKILL)
    os.waitpid(held[0], 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child learns of its parent's death later")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_call_runs_ends_with_it_however_it_ends(how: signal.Signals) -> None:
    inner = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    outer = (
        f"import sys, pathlib; sys.path.append({str(ROOT)!r})\nfrom experiments.calls import run_logged\n"
        f"run_logged([sys.executable, '-c', {inner!r}], 600.0, pathlib.Path('/dev/stdout'))"
    )
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(how)
        process.wait()
        assert gone(child)


def gone(process: int) -> bool:
    """Whether it ends (a killed process that nobody has waited for yet counts)."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] if sys.platform == "linux" else ""
            os.kill(process, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False
