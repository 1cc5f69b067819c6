"""The suite's calls: what is asked for, what counts as done, and when a call stops."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosched.core.errors import DeviceMissing
from autosched.core.records import DeviceKey
from autosched.zoo import names
from experiments import suite as runs
from experiments.calls import LEFT, Call
from experiments.h200 import suite
from experiments.h200.suite import BATCHED, CLAIMED, CONTROLS, FURTHER, Case, cases, finished
from experiments.tables_recorded import device_name


def test_the_whole_suite_is_what_is_to_be_measured() -> None:
    whole = list(cases())
    models = {*CLAIMED, *CONTROLS, *FURTHER}
    assert len(models) == 15
    assert len(whole) == 2 * (15 + 2 * 3)
    assert {case.batch for case in whole if case.model in BATCHED} == {1, 4, 16}
    assert {case.dtype for case in whole} == {"float32", "bfloat16"}
    assert len({case.file for case in whole}) == len(whole)
    assert whole[0] == Case("torchvision:googlenet", 1, "float32")
    assert models <= {entry.name for entry in names()}
    assert list(cases(["autosched:toy"], [2], ["bfloat16"])) == [Case("autosched:toy", 2, "bfloat16")]


LATE = [
    {"name": "compiled", "failure": None},
    {"name": "max_autotune_combo", "failure": None},
    {"name": "max_autotune", "failure": {"kind": "timeout", "detail": "no progress for 8 s"}},
]


def result(
    folder: Path, case: Case, error: dict[str, Any] | None = None, limit_s: int = 100, rows: list[dict[str, Any]] | None = None
) -> None:
    report = {"error": error} if error else {"verdict": "kept", "strategies": rows or []}
    environment = {"taken": "2026-11-27T08:19:40+00:00", "commit": "685cf4059"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / case.file).write_text(json.dumps({"environment": environment, "run": {"limit_s": limit_s}, "report": report}))


def test_a_run_that_only_ran_out_of_time_is_tried_again_with_all_of_it(tmp_path: Path) -> None:
    case, call = Case("autosched:toy", 1, "float32"), Call(500.0, spare_s=0.0)
    assert not finished(case, [tmp_path], call)
    result(tmp_path, case, {"message": "no result within 100 s", "exit_code": -1}, limit_s=100)
    assert not finished(case, [tmp_path], call)
    result(tmp_path, case, {"message": "no result within 490 s", "exit_code": -1}, limit_s=490)
    assert finished(case, [tmp_path], call)
    result(tmp_path, case, {"message": "unsupported", "exit_code": 2})
    assert finished(case, [tmp_path / "other", tmp_path], call)
    assert not finished(case, [tmp_path], call, failures=False)


def test_a_failure_is_named_and_run_again_when_asked(
    called: Callable[..., tuple[int, Called]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("a:1", "a:2", "--batches", "1", "--dtypes", "float32")
    result(tmp_path / "done", Case("a:1", 1, "float32"), {"message": "unsupported", "exit_code": 2})
    assert called(50.0, *asked, "--list") == (LEFT, [])
    assert capsys.readouterr().out.split() == ["failed", "a_1_b1_float32.json", "left", "a_2_b1_float32.json"]
    code, made = called(50.0, *asked)
    assert (code, [name for name, _ in made]) == (1, ["a_2_b1_float32.json"])
    assert "failed: a_1_b1_float32.json; --retry" in capsys.readouterr().out
    # What has not been tried comes before what has failed once.
    code, made = called(50.0, *asked, "--batches", "1", "2", "--retry")
    assert (code, [name for name, _ in made]) == (0, ["a_1_b2_float32.json", "a_2_b2_float32.json", "a_1_b1_float32.json"])
    assert "failed" not in capsys.readouterr().out


Called = list[tuple[str, float]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Called]]:
    """Runs the script with runs that pretend to take ``took_s`` each, and whose compilers need ``needs_s``."""

    def call(took_s: float, *arguments: str, needs_s: float = 0.0) -> tuple[int, Called]:
        made: Called = []
        clock = [0.0]

        def fake(run: runs.Run, target: Path, timeout_s: float, extra: dict[str, str] | None = None, *, keep: bool) -> dict[str, Any]:
            assert keep
            made.append((target.name, timeout_s))
            assert extra is not None
            # With every compiler as slow as it may be, the run still ends in time, or it could not in any case.
            total_s = float(extra["AUTOSCHED_COMPILE_TOTAL_S"])
            assert total_s == 10.0 or total_s + 60.0 < timeout_s - 100.0
            clock[0] += took_s
            over = took_s > timeout_s
            error = {"message": "late", "exit_code": -1} if over else None
            rows = LATE if total_s < needs_s else []
            result(target.parent, Case(run.model, run.batch or 1, run.dtype or ""), error, limit_s=round(timeout_s), rows=rows)
            return {"took_s": took_s, "report": {"error": error} if over else {"verdict": "kept", "strategies": rows}}

        monkeypatch.setattr(suite, "record", fake)
        monkeypatch.setattr("time.monotonic", lambda: clock[0])
        monkeypatch.setattr(sys, "argv", ["suite.py", "--out", str(tmp_path / "out"), "--done", str(tmp_path / "done"), *arguments])
        return suite.main(), made

    return call


def test_a_call_stops_before_a_run_that_would_not_fit_and_the_next_goes_on(called: Callable[..., tuple[int, Called]]) -> None:
    asked = ("a:1", "a:2", "a:3", "a:4", "--batches", "1", "--dtypes", "float32", "--deadline", "520")
    code, made = called(200.0, *asked)
    assert (code, [name for name, _ in made]) == (LEFT, ["a_1_b1_float32.json", "a_2_b1_float32.json"])
    assert made[1][1] == pytest.approx(512.0 - 200.0)
    code, made = called(200.0, *asked)
    assert (code, [name for name, _ in made]) == (0, ["a_3_b1_float32.json", "a_4_b1_float32.json"])
    assert called(200.0, *asked) == (0, [])


def test_what_is_not_measured_again_is_named(
    called: Callable[..., tuple[int, Called]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever pays for a device took it for measured."""
    asked = ("a:1", "a:2", "a:3", "--batches", "1", "--dtypes", "float32")
    result(tmp_path / "done", Case("a:1", 1, "float32"))
    result(tmp_path / "done", Case("a:3", 1, "float32"), {"message": "unsupported", "exit_code": 2})
    code, made = called(50.0, *asked)
    assert (code, [name for name, _ in made]) == (1, ["a_2_b1_float32.json"])
    assert "not measured again: a_1_b1_float32.json (2026-11-27, commit 685cf4059); " in capsys.readouterr().out
    assert called(50.0, "a:4", *asked[3:])[0] == 0
    assert "again" not in capsys.readouterr().out


def test_a_result_that_was_cut_off_on_its_way_is_measured_again(called: Callable[..., tuple[int, Called]], tmp_path: Path) -> None:
    asked = ("a:1", "a:2", "--batches", "1", "--dtypes", "float32")
    for name in ("a:1", "a:2"):
        result(tmp_path / "out", Case(name, 1, "float32"), None)
    cut = tmp_path / "out" / "a_1_b1_float32.json"
    cut.write_bytes(cut.read_bytes()[:-9])
    code, made = called(50.0, *asked)
    assert (code, [name for name, _ in made]) == (0, ["a_1_b1_float32.json"])
    assert called(50.0, *asked) == (0, [])


def test_a_model_whose_compilers_were_slow_keeps_no_other_from_its_turn(called: Callable[..., tuple[int, Called]]) -> None:
    asked = ("a:1", "a:2", "--batches", "1", "--dtypes", "float32", "--deadline", "520")
    code, made = called(250.0, *asked)
    assert (code, [limit_s for _, limit_s in made]) == (0, [512.0, 262.0])


def test_a_run_that_was_cut_short_comes_first_next_time(called: Callable[..., tuple[int, Called]]) -> None:
    asked = ("a:1", "a:2", "--batches", "1", "--dtypes", "float32", "--expect", "50")
    code, made = called(400.0, *asked)
    assert (code, len(made)) == (LEFT, 1)
    code, made = called(600.0, *asked)  # longer than any call: it is given up with the whole window
    assert (code, [name for name, _ in made]) == (1, ["a_2_b1_float32.json"])


def test_a_model_whose_compilers_had_too_little_is_measured_again_when_there_is_more(
    called: Callable[..., tuple[int, Called]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("a:1", "a:2", "a:3", "--batches", "1", "--dtypes", "float32")
    # The first had all that this call could give it; nobody waits for the second's compilers, but they have a minute.
    code, made = called(140.0, *asked, "--deadline", "420", needs_s=250.0)
    assert (code, made) == (LEFT, [("a_1_b1_float32.json", 412.0), ("a_2_b1_float32.json", 272.0)])
    assert "kept; no time for max_autotune" in capsys.readouterr().out
    # A longer call takes up what has no times at all first, then what lacks some, with all of a call's time each.
    code, made = called(400.0, *asked, "--deadline", "520", needs_s=250.0)
    assert (code, [name for name, _ in made]) == (LEFT, ["a_3_b1_float32.json"])
    code, made = called(400.0, *asked, "--deadline", "520", needs_s=250.0)
    assert (code, [name for name, _ in made]) == (LEFT, ["a_1_b1_float32.json"])
    code, made = called(400.0, *asked, "--deadline", "520", needs_s=400.0)
    assert (code, [name for name, _ in made]) == (0, ["a_2_b1_float32.json"])
    # However late they are, a whole call is all there is.
    assert called(400.0, *asked, "--deadline", "520", needs_s=400.0) == (0, [])


def test_a_model_that_was_measured_without_some_compilers_is_measured_again_with_them(
    called: Callable[..., tuple[int, Called]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AUTOSCHED_COMPILE_MODES", raising=False)
    monkeypatch.setattr(suite.os, "environ", {**suite.os.environ})
    asked = ("a:1", "a:2", "--batches", "1", "--dtypes", "float32")
    result(tmp_path / "done", Case("a:1", 1, "float32"), rows=[{"name": "eager", "failure": None}, {"name": "compiled", "failure": None}])
    code, made = called(50.0, *asked)
    assert (code, [name for name, _ in made]) == (0, ["a_2_b1_float32.json", "a_1_b1_float32.json"])
    assert called(50.0, "a:3", *asked[2:], "--modes", "compiled")[0] == 0
    (tmp_path / "out" / "a_1_b1_float32.json").unlink()
    assert suite.os.environ["AUTOSCHED_COMPILE_MODES"] == "compiled"
    assert called(50.0, *asked, "--modes", "compiled") == (0, [])
    assert called(50.0, *asked, "--modes", "compiled,max_autotune")[1][0][0] == "a_1_b1_float32.json"


def test_times_of_an_earlier_run_stay_where_a_longer_one_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, target = Case("a:1", 1, "float32"), tmp_path / "a_1_b1_float32.json"
    result(tmp_path, case, limit_s=300, rows=LATE)
    reports: list[dict[str, Any]] = [{"error": {"message": "late", "exit_code": -1}}, {"verdict": "kept", "strategies": []}]
    monkeypatch.setattr(runs, "environment", dict)
    monkeypatch.setattr(runs, "measure", lambda *given: reports.pop(0))
    run = runs.Run("a:1", "cuda")
    assert "error" in runs.record(run, target, 490.0, keep=True)["report"]
    found = json.loads(target.read_text())
    assert (found["report"]["strategies"], found["run"]["limit_s"], found["again"]["message"]) == (LATE, 490, "late")
    assert finished(case, [tmp_path], Call(500.0, spare_s=0.0))
    assert not finished(case, [tmp_path], Call(900.0, spare_s=0.0))
    runs.record(run, target, 490.0, keep=True)
    assert json.loads(target.read_text())["report"] == {"verdict": "kept", "strategies": []}
    # Whoever measures anew without that wish is told what came out.
    reports.append({"error": {"message": "it broke", "exit_code": 1}})
    runs.record(run, target, 490.0)
    assert "error" in json.loads(target.read_text())["report"]


def test_smoke_never_lands_among_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(sys, "argv", ["suite.py", "--smoke"])
    with pytest.raises(SystemExit) as stopped:
        suite.main()
    assert stopped.value.code == 2
    assert "--out" in capsys.readouterr().err


def test_a_gpu_is_named_where_no_tool_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its tables stood below the processor's name."""

    def key(device: str) -> DeviceKey:
        return DeviceKey(device, "NVIDIA H100 80GB HBM3" if device == "cuda" else "a processor", ())

    monkeypatch.setattr(runs, "_said", lambda command: "")
    monkeypatch.setattr(runs, "key_of", key)
    found = runs.environment()
    assert (found["gpu"], found["cpu"]) == ("NVIDIA H100 80GB HBM3", "a processor")
    for folder, name in (("h100", "NVIDIA H100 80GB HBM3"), ("cpu_a_processor_2", "a processor")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "load.json").write_text(json.dumps({"environment": found}))
        assert device_name(tmp_path / folder) == name

    def missing(device: str) -> DeviceKey:
        if device == "cuda":
            raise DeviceMissing("there is no NVIDIA driver here")
        return key(device)

    monkeypatch.setattr(runs, "key_of", missing)
    assert runs.environment()["gpu"] == ""


def test_a_run_without_an_answer_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    late = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(runs.Run, "command", lambda self: late)
    assert runs.measure(runs.Run("m", "cpu"), 0.3)["error"]["exit_code"] == -1
    stuck = "import sys, time; print('waits for a lock', file=sys.stderr, flush=True); time.sleep(60)"
    monkeypatch.setattr(runs.Run, "command", lambda self: [sys.executable, "-c", stuck])
    found = runs.measure(runs.Run("m", "cpu"), 3.0)
    assert found["error"] == {"message": "no result within 3 s", "exit_code": -1, "last_words": "waits for a lock\n"}
    monkeypatch.setattr(runs.Run, "command", lambda self: [sys.executable, "-c", "import sys; sys.exit('it broke')"])
    found = runs.measure(runs.Run("m", "cpu"), 60.0)
    assert found["error"]["exit_code"] == 1
    assert "it broke" in runs.outcome(found)
