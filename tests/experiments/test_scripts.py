"""Every experiment starts as its page says: by its file, from anywhere, with nothing of the working directory on Python's path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).resolve().parents[2] / "experiments"
SCRIPTS = sorted(path for path in _FOLDER.rglob("*.py") if '__name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(_FOLDER).as_posix())
def test_it_says_what_it_takes(script: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, str(script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert not list(tmp_path.iterdir())
