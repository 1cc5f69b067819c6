"""Compiling ahead: each part a process, and kernels that are timed one at a time."""

from __future__ import annotations

import fcntl
import json
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from autosched.core.variants import Lowering
from autosched.device.cuda.baselines import MODES
from autosched.pipeline import preparing
from autosched.pipeline.baselines import Rivals
from autosched.pipeline.judge import External
from autosched.pipeline.preparing import NotHad
from experiments.calls import LEFT
from experiments.h200 import ahead

_TURNS = Path(ahead.__file__).resolve().parent / "turns"


def _main(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ahead.py", *options])
    return ahead.main()


def test_every_part_of_every_model_is_compiled_the_longest_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[str] = []

    def run(command: list[str], limit_s: float, log: Path, *, environment: dict[str, str]) -> int | None:
        begun.append(log.stem)
        assert environment["PYTHONPATH"].startswith(str(_TURNS))
        assert Path(environment["AHEAD_TURNS"]).is_file()
        return {"b_fused": 1, "a_inductor": None}.get(log.stem, 0)

    monkeypatch.setattr(ahead, "run_logged", run)
    assert _main(monkeypatch, "a", "b", "--out", str(tmp_path), "--jobs", "1") == LEFT
    assert begun == ["a_max_autotune", "b_max_autotune", "a_fused", "b_fused", "a_inductor", "b_inductor"]
    parts = json.loads((tmp_path / "ahead.json").read_text())["parts"]
    assert [(name, row["status"]) for name, row in parts.items() if row["status"] != 0] == [("b_fused", 1), ("a_inductor", None)]


def test_what_is_chosen_by_nothing_is_kept_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    folders: list[str] = []

    def run(command: list[str], limit_s: float, log: Path, *, environment: dict[str, str]) -> int:
        assert environment["AHEAD_TURNS"] == "untimed"
        folders.extend(environment[name] for name in ("AUTOSCHED_CACHE", "TORCHINDUCTOR_CACHE_DIR"))
        Path(folders[-1]).mkdir(parents=True)
        return 0

    monkeypatch.setattr(ahead, "run_logged", run)
    assert _main(monkeypatch, "a", "--out", str(tmp_path), "--untimed") == 0
    assert len(set(folders)) == 2 * len(ahead.PARTS)
    assert not any(Path(folder).exists() for folder in folders)
    monkeypatch.delenv("TRITON_CACHE_DIR")
    with pytest.raises(SystemExit):
        _main(monkeypatch, "a", "--out", str(tmp_path), "--untimed")


def test_nothing_is_begun_that_has_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ahead, "run_logged", lambda *_, **__: pytest.fail("begun"))
    assert _main(monkeypatch, "a", "--out", str(tmp_path), "--deadline", "12") == LEFT


def test_a_kernel_is_timed_while_no_other_process_has_the_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    turn = tmp_path / "turn"
    turn.touch()
    monkeypatch.setenv("AHEAD_TURNS", str(turn))
    in_turn: Any = runpy.run_path(str(_TURNS / "sitecustomize.py"))["_in_turn"]
    inner = in_turn(lambda run: (run(), 7.0)[1])
    timed, ran = in_turn(inner), threading.Event()  # one timer may call another
    with turn.open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=timed, args=(ran.set,), daemon=True)
        thread.start()
        assert not ran.wait(0.2)
    assert ran.wait(20.0)
    thread.join(20.0)
    assert timed(lambda: None) == 7.0
    with turn.open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_processes_find_the_file_and_what_it_hides(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.hidden = True")
    code = (
        "import sys; from torch._inductor.runtime.benchmarking import InductorBenchmarker as timer; ran = []\n"
        "assert sys.hidden\n"
        "print(timer.benchmark_gpu(timer(), lambda: ran.append(1)), len(ran))"
    )
    environment = {"PYTHONPATH": f"{_TURNS}:{tmp_path}:{':'.join(sys.path)}", "AHEAD_TURNS": "untimed", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.split() == ["0.01", "1"], done.stderr


def test_a_model_is_compiled_as_a_job_would(tmp_path: Path) -> None:
    ahead_part = ahead.Part("autosched:toy", Lowering.FUSED)
    assert ahead_part.name == "autosched_toy_fused"
    ahead.compile_part(ahead_part, "cpu")


@pytest.mark.parametrize("lowering", [Lowering.MAX_AUTOTUNE, Lowering.INDUCTOR])
def test_a_whole_model_is_compiled_as_a_baseline_and_then_as_a_lowering(lowering: Lowering, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their compilers, which take a minute each."""
    asked: list[object] = []

    def ready(rivals: Rivals, *call: object) -> list[External]:
        asked.append(rivals._modes)
        return [External("eager", lambda: 1.0)]

    def prepared(wanted: Lowering, *call: object) -> NotHad:
        asked.append(wanted)
        return NotHad("asked for")

    monkeypatch.setenv("AUTOSCHED_COMPILE_MODES", "")
    monkeypatch.setattr(Rivals, "ready", ready)
    monkeypatch.setattr(preparing, "prepare", prepared)
    with pytest.raises(SystemExit, match="asked for"):
        ahead.compile_part(ahead.Part("autosched:toy", lowering), "cpu")
    assert asked == [[kind for kind, mode in MODES.items() if mode is lowering], lowering]
