"""The main job on a real model and the real CPU device: tune, save, check, load, bench, trace; and a job that is cut off and goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

import autosched
from autosched import pipeline, zoo
from autosched.config import cache_dir
from autosched.core.errors import UsageError
from tests.conformance.caches import own_cache
from tests.conformance.command import run
from tests.conformance.waiting import wait_until

# A loaded machine may be called unstable (exit code 3); everything else must hold all the same.
SAID_SOMETHING = (0, 3)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> pipeline.Tuned:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path_factory.mktemp("cache")))
        toy = zoo.load("autosched:toy")
        return autosched.tune(toy.model, toy.args, toy.kwargs, device="cpu", effort="quick", budget_s=4, name=toy.name)


@pytest.fixture(scope="module")
def bundle(tuned: pipeline.Tuned, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "toy.autosched"
    report = tuned.save(path)
    assert report.bundle == str(path)
    return path


def test_the_report_is_complete_and_consistent(tuned: pipeline.Tuned) -> None:
    report = tuned.report
    rows = {row.name: row for row in report.strategies}
    assert {"sequential", "sequential_wide", "eager_1"} <= rows.keys() or torch.get_num_threads() == 1
    # On a busy machine the budget may end before all are measured; those without a row are named.
    assert all(name in rows or any(re.search(rf"\b{name}\b", note) for note in report.notes) for name in ("critical_path", "beam", "opara"))
    # Every second of the budget is some stage's; the last one has the end of the processes besides.
    assert sum(stage.seconds for stage in report.stages if stage.in_budget) >= 0.9 * report.search_s
    chosen = rows[report.chosen]
    assert chosen.measured_us is not None
    assert chosen.ci_us is not None
    assert chosen.ci_us[0] <= chosen.measured_us <= chosen.ci_us[1]
    assert not any(row.name == report.chosen and row.failure for row in report.strategies)
    # Nothing is kept that is slower than the best sequential schedule measured beside it, beyond what its interval allows.
    assert report.ratio_high <= 1.0
    assert all(
        row.max_abs_error is not None and row.max_abs_error < 1e-4 for row in report.strategies if row.measured_us and row.predicted_us
    )
    assert report.verdict in tuned.summary()
    # The raw times behind the figures; a file does without them.
    assert [item.again for item in report.rounds] == [False] * (len(report.rounds) - 1) + [True]
    for item in report.rounds:
        assert item.again or rows[item.name].measured_us == pytest.approx(median(item.times_us), abs=0.01)
    assert tuned.bundle.evidence.report.rounds == ()


def test_a_saved_schedule_loads_and_computes_what_the_model_computes(bundle: Path) -> None:
    toy = zoo.load("autosched:toy")
    fast = autosched.load(bundle, toy.model, strict=True)
    with torch.inference_mode():
        torch.testing.assert_close(fast(*toy.args, **toy.kwargs), toy.model(*toy.args, **toy.kwargs), rtol=1e-4, atol=1e-5)


def test_check_bench_and_trace_work_on_it(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline.check(bundle, zoo.load("autosched:toy").model).verdict == "exact"
    code = run("bench", str(bundle), "--rounds", "8", "--json")
    said = capsys.readouterr()
    assert code in SAID_SOMETHING, said.err
    if code == 0:
        result = json.loads(said.out)
        assert result["ci_us"][0] <= result["tuned_us"] <= result["ci_us"][1]
        assert result["sequential_us"] > 0
    timeline = tmp_path / "t.json"
    assert run("trace", str(bundle), "-o", str(timeline), "--json") == 0
    events = json.loads(timeline.read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) >= json.loads(capsys.readouterr().out)["operators"]


def test_a_schedule_of_another_model_runs_that_model_as_it_came(bundle: Path) -> None:
    other = zoo.load("autosched:moe")
    with pytest.warns(UserWarning, match="without a schedule"):
        same = autosched.load(bundle, other.model)
    with torch.inference_mode():
        torch.testing.assert_close(same(*other.args, **other.kwargs), other.model(*other.args, **other.kwargs))
    with pytest.raises(autosched.AutoschedError):
        autosched.load(bundle, other.model, strict=True)


def test_an_interrupted_job_keeps_its_measurements_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {**os.environ, "AUTOSCHED_CACHE": own_cache(tmp_path)}
    asked = ["tune", "autosched:toy", "--device", "cpu", "--effort", "quick", "--lowering", "rewritten", "--budget"]
    command = [sys.executable, "-P", "-m", "autosched", *asked, "30s"]
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journals: list[Path] = []

    def measured() -> bool:
        assert job.poll() is None, job.stderr.read() if job.stderr else ""
        journals[:] = tmp_path.glob("measurements/*.jsonl")
        return bool(journals) and journals[0].stat().st_size > 0

    assert wait_until(measured, within_s=600.0)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=300)
    assert job.returncode == 130
    assert "the same command continues" in said
    assert "Traceback" not in said
    kept = journals[0].read_text().splitlines()
    assert kept
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path))
    code = run(*asked, "2s", "--json")
    assert code in SAID_SOMETHING, capsys.readouterr().err
    assert journals[0].read_text().splitlines()[: len(kept)] == kept  # nothing was measured again, and nothing lost


def test_a_cache_that_cannot_be_written_costs_a_warning_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    occupied = tmp_path / "a_file"
    occupied.write_text("not a folder")
    monkeypatch.setenv("AUTOSCHED_CACHE", str(occupied))
    toy = zoo.load("autosched:toy")
    report = pipeline.compare(
        toy.model, toy.args, toy.kwargs, device="cpu", budget_s=1, strategies=["sequential"], compiled=False, lowering="rewritten"
    )
    assert any(row.name == "sequential" and row.measured_us for row in report.strategies)
    assert "measurements are not kept" in caplog.text


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"


@pytest.mark.parametrize(
    "unknown",
    [RuntimeError("no home"), "~/.cache/autosched", "/dev/null/.cache/autosched"],
    ids=["an error", "a folder called ~", "below what is no folder"],
)
def test_a_user_without_a_home_folder_has_a_cache_all_the_same(
    unknown: RuntimeError | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usual(*args: object, **options: object) -> str:
        if isinstance(unknown, RuntimeError):
            raise unknown
        return unknown

    monkeypatch.delenv("AUTOSCHED_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_dir", usual)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_dir() == tmp_path / f"autosched-{os.getuid()}"


def test_a_home_folder_that_cannot_be_written_is_none_unless_there_is_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, temporary = tmp_path / "nonexistent" / ".cache" / "autosched", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.delenv("AUTOSCHED_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *args, **options: str(usual))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert cache_dir() == usual
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # as for everyone but root
    assert cache_dir() == temporary / f"autosched-{os.getuid()}"
    usual.mkdir(parents=True)
    assert cache_dir() == usual


def test_where_no_file_can_be_written_at_all_a_cache_is_named_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that can only be read, and no home folder: loading a schedule there, which keeps nothing, was a traceback."""

    def none_at_all() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.delenv("AUTOSCHED_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *args, **options: "~/.cache/autosched")
    monkeypatch.setattr("tempfile.gettempdir", none_at_all)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)  # none outside the test's own
    assert cache_dir() == Path(f"/tmp/autosched-{os.getuid()}")


def test_a_cache_among_temporary_files_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSCHED_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *args, **options: "~/.cache/autosched")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert stat.S_IMODE(cache_dir().stat().st_mode) == 0o700
    # Made by somebody else before, it is no reason not to load: what is kept there is looked at before it is used.
    cache_dir().chmod(0o777)
    assert cache_dir() == tmp_path / f"autosched-{os.getuid()}"


def test_a_cache_in_a_home_folder_that_is_not_there_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", "~nobody-of-that-name/cache")
    with pytest.raises(UsageError, match="AUTOSCHED_CACHE is '~nobody-of-that-name/cache'"):
        cache_dir()
