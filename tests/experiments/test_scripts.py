"""Every experiment starts as its page says: by its file, from anywhere, with nothing of the working directory on Python's path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.h200 import session

_FOLDER = Path(__file__).resolve().parents[2] / "experiments"
SCRIPTS = sorted(path for path in _FOLDER.rglob("*.py") if '__name__ == "__main__"' in path.read_text())
# One process for all of them, in which each starts as in a fresh one: nothing of the checkout is found that the script itself does not put
# on the path, and none of the experiments has been imported.
_START = """
import contextlib, io, json, runpy, sys, traceback
root = sys.argv[1]
path, ends = [entry for entry in sys.path if entry != root], []
for command in json.load(sys.stdin):
    sys.argv, sys.path[:] = [*command, "--help"], path
    for name in [name for name in sys.modules if name.partition(".")[0] == "experiments"]:
        del sys.modules[name]
    code = None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        except Exception:
            code = traceback.format_exc()
    ends.append((code, said.getvalue()))
print(json.dumps(ends))
"""


def _helps(commands: list[list[str]], folder: Path) -> list[str]:
    command = [sys.executable, "-P", "-c", _START, str(_FOLDER.parent)]
    done = subprocess.run(command, input=json.dumps(commands), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends: list[tuple[Any, str]] = json.loads(done.stdout)
    assert [(words[0], code) for words, (code, _) in zip(commands, ends, strict=True) if code != 0] == [], done.stderr
    return [said for _, said in ends]


@pytest.mark.slow
def test_each_says_what_it_takes_and_takes_what_the_session_gives_it(tmp_path: Path) -> None:
    steps = [item for item in session.steps(tmp_path / "clone") if item.command[0].endswith(".py")]
    given = [[word.format(out=tmp_path / "out", seconds=77) for word in item.command] for item in steps]
    helps = _helps([*([str(script)] for script in SCRIPTS), *given], tmp_path)
    assert all("usage:" in said for said in helps)
    assert not list(tmp_path.iterdir())
    assert [script.name for script, said in zip(SCRIPTS, helps, strict=False) if "--smoke" not in said] == ["add_runs.py", "tables.py"]
    for item, words, said in zip(steps, given, helps[len(SCRIPTS) :], strict=True):
        # argparse shortens names by itself: an option that was renamed would pass by --help alone.
        assert all(word in said for word in (*words, *item.retry) if word.startswith("--"))
        # What takes a failure for an answer must be told not to.
        assert ("--retry" in said) == bool(item.retry)
