"""Of several processes one has the turn, whoever ends lets go of it, and nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from autosched.search.compiled.turns import turn

_HOLD = """
import sys, time
from pathlib import Path
from autosched.search.compiled.turns import turn

with turn(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
    Path(sys.argv[1]).with_suffix(".done").touch()
"""


def _holder(file: Path, hold_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(file), str(hold_s)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_waits_for_the_first(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "evaluate.turn"
    with _holder(file, 0.5), turn(file):
        assert file.with_suffix(".done").exists()


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "evaluate.turn"
    with _holder(file, 600.0) as process:
        process.kill()
        begin = time.monotonic()
        with turn(file):
            assert time.monotonic() - begin < 30.0


def test_nobody_waits_longer_than_said(tmp_path: Path) -> None:
    file = tmp_path / "evaluate.turn"
    with _holder(file, 600.0) as process:
        with turn(file, most_s=0.1):
            assert process.poll() is None
        process.kill()


def test_without_a_folder_everybody_has_the_turn(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with turn(tmp_path / "file" / "evaluate.turn"), turn(tmp_path / "file" / "evaluate.turn"):
        assert not (tmp_path / "file").is_dir()
