"""Calls after a pause: what is timed, what is said of it, and that nothing of the process is changed. Times of statements are made up."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from autosched.cli.printing import emit
from autosched.core.errors import IncompatibleArtifact, UsageError
from autosched.export.bundle import write_bundle
from autosched.pipeline import call_times
from autosched.pipeline.benching import BenchShapes
from autosched.pipeline.call_times import Contestant, PausedCalls, as_it_comes, bench_paused, paused_calls_us
from autosched.runtime.guard import LoadedModel
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches


def test_each_call_comes_after_a_pause_with_its_own_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []
    monkeypatch.setattr(time, "sleep", happened.append)
    before = torch.get_num_threads()
    contestants = {
        name: Contestant(lambda name=name: happened.append((name, torch.get_num_threads())), threads)  # type: ignore[misc]
        for name, threads in (("one", 1), ("two", 2))
    }
    columns = paused_calls_us(contestants, 20.0, 7, 0)
    assert {name: len(column) for name, column in columns.items()} == {"one": 7, "two": 7}
    assert all(taken > 0 for column in columns.values() for taken in column)
    assert happened[::2] == [0.02] * 24  # warm-ups are paused as well
    assert {*happened[1::2]} == {("one", 1), ("two", 2)}
    assert torch.get_num_threads() == before


def test_threads_are_as_before_when_a_call_fails() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        paused_calls_us({"it": Contestant(fail, before + 1)}, 0.0, 1, 0)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("eager_us", "beyond"), [((3000.0, 2000.0), True), ((1010.0, 4000.0), False)])
def test_the_faster_way_to_run_the_model_is_what_is_compared_with(
    eager_us: tuple[float, float], beyond: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = {
        "tuned": [1000.0 + place for place in range(100)],
        "tuned again": [1020.0 + place for place in range(100)],
        "eager_1": [eager_us[0] + place for place in range(100)],
        "eager_2": [eager_us[1] + place for place in range(100)],
    }
    monkeypatch.setattr(call_times, "paused_calls_us", lambda *given: made_up)
    model = TwoBranches().eval()
    found = bench_paused(write_bundle(tmp_path / "a.autosched", two_branches_bundle(model)), model, 20.0)
    assert isinstance(found, PausedCalls)
    assert found.eager.name == ("eager_1" if eager_us[0] < eager_us[1] else "eager_2")
    assert found.eager.median_us == pytest.approx(min(eager_us) + 49.5)
    assert (found.tuned.p90_us, found.tuned.p99_us) == (pytest.approx(1089.1), pytest.approx(1098.01))
    assert found.eager_beyond_noise is beyond
    assert ("no difference beyond the noise floor" in found.summary()) is not beyond
    assert "after 20 ms of nothing" in found.summary()


def test_a_loaded_model_is_really_called(tmp_path: Path) -> None:
    model = TwoBranches().eval()
    found = bench_paused(write_bundle(tmp_path / "a.autosched", two_branches_bundle(model)), model, 0.0, calls=5)
    assert isinstance(found, PausedCalls)
    assert found.calls == 5
    assert 0 < found.tuned.median_us <= found.tuned.p90_us <= found.tuned.p99_us


@pytest.mark.parametrize("pause", [-1.0, float("nan"), 1e9])
def test_a_pause_that_is_none_is_refused(pause: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the pause is"):
        bench_paused(tmp_path / "none.autosched", TwoBranches().eval(), pause)


def test_another_model_is_refused(tmp_path: Path) -> None:
    file = write_bundle(tmp_path / "a.autosched", two_branches_bundle(TwoBranches().eval()))
    with pytest.raises(IncompatibleArtifact):
        bench_paused(file, torch.nn.Linear(3, 3).eval(), 0.0)


def test_of_several_shapes_each_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = TwoBranches().eval()
    bundles = [two_branches_bundle(model, rows=rows) for rows in (4, 8)]
    found = bench_paused(write_bundle(tmp_path / "a.autosched", *bundles), model, 0.0, calls=5)
    assert isinstance(found, BenchShapes)
    assert [result.calls for result in found.shapes] == [5, 5]
    assert len({result.shape for result in found.shapes}) == 2
    assert found.summary() == "\n".join(result.summary() for result in found.shapes)
    emit(found)
    assert [shape["pause_ms"] for shape in json.loads(capsys.readouterr().out)["shapes"]] == [0.0, 0.0]


def test_of_a_file_of_several_shapes_only_what_is_asked_for_is_made_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoBranches().eval()
    loaded: list[LoadedModel] = []
    original = call_times.load
    monkeypatch.setattr(call_times, "load", lambda *given, **named: loaded.append(original(*given, **named)) or loaded[0])
    bundles = [two_branches_bundle(model, rows=rows) for rows in (4, 8, 16)]
    found = bench_paused(write_bundle(tmp_path / "a.autosched", *bundles), model, 0.0, calls=5, shape="8x8")
    assert isinstance(found, PausedCalls)
    (fast,) = loaded
    assert [shape.ready for shape in fast.report().shapes] == [False, True, False]
    assert fast.report().calls == 2 * (5 + 5)


def test_eager_mode_on_a_gpu_is_one_row_without_a_number_of_threads() -> None:
    assert as_it_comes("cuda", 16) == {"eager": 16}
    assert as_it_comes("cpu", 2) == {"eager_1": 1, "eager_2": 2}
    assert as_it_comes("cpu", 1) == {"eager_1": 1}
