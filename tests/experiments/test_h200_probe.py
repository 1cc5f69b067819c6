"""The probes' calls: what is asked again, what waits for the next call, and that no rehearsal stands in a device's place."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosched.core.records import Failure
from autosched.core.schedule import Schedule
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.runner import GraphRunner
from experiments.calls import LEFT, Ended
from experiments.h200 import probe
from tests.conformance.fake_cuda import FakeCuda

Call = Callable[..., tuple[int, list[tuple[str, float]]]]
ANSWER = {"answer": "yes", "data": {}}
FAILED = {"answer": "not answered", "data": {}, "failed": True}


@pytest.fixture
def found() -> dict[str, Any]:
    """What each probe answers; ``None``: nothing within its time."""
    return {}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: dict[str, Any]) -> Call:
    """Runs the script with probes that pretend to take ``took_s`` each."""

    def call(took_s: float, *arguments: str) -> tuple[int, list[tuple[str, float]]]:
        made: list[tuple[str, float]] = []
        clock = [0.0]

        def ask(name: str, limit_s: float, smoke: bool) -> dict[str, Any] | None:
            made.append((name, limit_s))
            clock[0] += min(took_s, limit_s)
            return None if took_s > limit_s else found.get(name, ANSWER)

        monkeypatch.setattr(probe, "_run", ask)
        monkeypatch.setattr(probe, "_machine", lambda smoke: {"smoke": smoke, "gpu": "H200, 580, 12 C", "versions": {}, "commit": "c"})
        monkeypatch.setattr("time.monotonic", lambda: clock[0])
        monkeypatch.setattr(sys, "argv", ["probe.py", "--out", str(tmp_path), *arguments])
        return probe.main(), made

    return call


def test_a_call_goes_on_where_the_last_one_ended(called: Call, tmp_path: Path) -> None:
    names = list(probe.PROBES)
    code, made = called(50.0, "--deadline", "128")
    assert (code, [name for name, _ in made]) == (LEFT, names[:3])
    assert made[2][1] == pytest.approx(20.0)  # cut short: the third is asked again with all its time
    known = json.loads((tmp_path / "probes.json").read_text())["probes"]
    assert list(known) == names[:2]
    assert known["P1"]["commit"] == "c"
    code, made = called(1.0)
    assert (code, [name for name, _ in made]) == (0, names[2:])
    assert list(json.loads((tmp_path / "probes.json").read_text())["probes"]) == names
    assert called(1.0) == (0, [])


def test_what_failed_is_asked_again_only_if_wished(called: Call, found: dict[str, Any]) -> None:
    found["P4"] = FAILED
    assert called(1.0)[0] == 1
    assert called(1.0) == (1, [])
    del found["P4"]
    assert called(1.0, "--retry") == (0, [("P4", 75.0)])
    assert called(1.0, "--only", "P6", "P1") == (0, [("P6", 75.0), ("P1", 75.0)])


def test_a_probe_that_takes_all_its_time_has_failed_and_the_others_go_on(called: Call) -> None:
    code, made = called(100.0, "--deadline", "300")
    assert code == LEFT
    assert len(made) == 4
    code, made = called(1.0)
    assert (code, made[0][0]) == (1, list(probe.PROBES)[3])


def test_answers_of_another_machine_stay(called: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called(1.0)
    before = (tmp_path / "probes.json").read_text()
    with pytest.raises(SystemExit):
        called(1.0, "--smoke")
    assert "has the answers of another machine" in capsys.readouterr().err
    assert (tmp_path / "probes.json").read_text() == before
    # Temperatures and clocks make no other machine, nor does the last number of the driver.
    mine = probe._identity({"smoke": False, "gpu": "H200, 580.159.03, 12 C"})
    assert mine == probe._identity({"smoke": False, "gpu": "H200, 580.159.04, 40 C"})
    assert mine != probe._identity({"smoke": False, "gpu": "H200, 590.48.01, 12 C"})
    assert mine != probe._identity({"smoke": False, "gpu": "H100, 580.159.03, 12 C"})
    assert mine != probe._identity({"smoke": False, "gpu": ""})


def test_a_process_that_breaks_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "run_to_end", lambda *given, **options: Ended(-6, "", "illegal address", 1.0))
    found = probe._run("P1", 10.0, False)
    assert found is not None
    assert found["failed"]
    assert "illegal address" in found["data"]["last_words"]
    monkeypatch.setattr(probe, "run_to_end", lambda *given, **options: Ended(None, "", "", 10.0))
    assert probe._run("P1", 10.0, False) is None


@pytest.mark.parametrize(
    ("created", "starts", "expected"),
    [
        ([0, 1, 2, 3], [10, 20, 30, 40], 1.0),
        ([3, 1, 0, 2], [10, 30, 40, 20], -1.0),
        ([0, 1, 2, 3], [20, 40, 10, 30], 0.0),
        ([2, 3, 0, 1], [1024, 1024, 0, 0], 0.8**0.5),  # a clock that ticks once while two start
        ([0, 1, 2, 3], [0, 0, 0, 0], 0.0),
    ],
)
def test_starts_in_one_tick_of_a_clock_tell_no_order(
    monkeypatch: pytest.MonkeyPatch, created: list[float], starts: list[float], expected: float
) -> None:
    monkeypatch.syspath_prepend(str(Path(probe.__file__).parent))
    import probe_bench

    assert probe_bench.rank_correlation(created, starts) == pytest.approx(expected)
    assert probe_bench.rank_correlation(starts, created) == pytest.approx(expected)


@pytest.mark.parametrize(("replays", "held_us"), [(20, 20 * 2 * 100.0), (1000, 50_000.0)])
def test_the_device_is_held_back_until_a_block_is_launched(monkeypatch: pytest.MonkeyPatch, replays: int, held_us: float) -> None:
    """Of a graph that takes less than its launch, the time was the host's."""
    monkeypatch.syspath_prepend(str(Path(probe.__file__).parent))
    import probe_bench

    now_s: list[float] = [0.0]
    done: list[str | float] = []

    class Slow(FakeCuda):
        def replay(self, graph: Any) -> None:
            now_s[0] += 100e-6
            done.append("replay")
            super().replay(graph)

        def sleep(self, time_us: float) -> None:
            done.append(time_us)
            super().sleep(time_us)

        def record(self, event: Any, stream: Any) -> None:
            done.append("record")
            super().record(event, stream)

    cuda = Slow()
    bench = probe_bench.Bench(cuda, GraphCapturer(cuda, reader=cuda), True, None, pytest.fail)
    graph, _ = bench.capture(bench.lanes(1), cuda.touch)
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    done.clear()
    assert bench.replay_us(graph, replays, 1) == [1.0]
    assert done == ["replay", pytest.approx(held_us), "record", *["replay"] * replays, "record"]


def test_each_capture_whose_pace_is_told_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pool, a later capture would be given the blocks that the first has freed by its end."""
    monkeypatch.syspath_prepend(str(Path(probe.__file__).parent))
    import probe_bench
    import probe_pace

    class Watched(CudaMeasurer):
        def capture(self, schedule: Schedule, **options: Any) -> GraphRunner | Failure:
            made = super().capture(schedule, **options)
            assert isinstance(made, GraphRunner)
            pools.append(made.pool)
            return made

    pools: list[Any] = []
    monkeypatch.setattr(probe_bench, "CudaMeasurer", Watched)
    monkeypatch.setattr(probe_pace, "_PAUSES_S", (0.0,))
    answer, _ = probe_pace.p16(probe_bench.smoke_bench())
    assert "blocks of 2 captures" in answer
    assert len(set(pools)) == 2


def test_kernels_of_one_name_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(probe.__file__).parent))
    import probe_products

    found = probe_products.by_name([("gelu", 2.0), ("sgemm", 40.0), ("norm", 3.0), ("sgemm", 41.5), ("gelu", 2.25)])
    assert found == [
        {"name": "sgemm", "count": 2, "total_us": 81.5},
        {"name": "gelu", "count": 2, "total_us": 4.25},
        {"name": "norm", "count": 1, "total_us": 3.0},
    ]


def test_every_probe_has_a_question_and_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(probe.__file__).parent))
    import probe_questions

    assert probe_questions.ANSWERS.keys() == probe.PROBES.keys()
    assert probe.PROBES.keys() >= probe_questions.ON_THE_DOUBLE


@pytest.mark.slow
def test_probes_are_rehearsed_on_the_double(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(probe.__file__)), "--smoke", "--only", "P1", "P9", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "probes.json").read_text())["probes"]
    assert found.keys() == {"P1", "P9"}
    for answer in found.values():
        assert not answer.get("failed"), answer
        assert answer["source"].startswith("smoke")
