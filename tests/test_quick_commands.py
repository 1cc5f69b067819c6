"""Commands that only look something up answer at once: they import neither PyTorch nor the tuning stack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "numba", "pandas", "xgboost", "autosched.pipeline")
COMMANDS = ("tune", "compare", "collect", "train", "evaluate", "bench", "check", "trace", "report", "models", "doctor", "cache")


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], *([command, "--help"] for command in COMMANDS), ["models"], ["cache"], ["cache", "clear", "--yes"]],
    ids=" ".join,
)
def test_what_looks_something_up_imports_nothing_heavy(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    (cache / "measurements").mkdir(parents=True)
    (cache / "measurements" / f"{'0' * 24}.jsonl").write_text("{}")
    monkeypatch.setenv("AUTOSCHED_CACHE", str(cache))
    code = (
        "import json, sys\nfrom autosched.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as stopped:\n    code = stopped.code\n"
        f"print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stderr) == [0, []]
    assert done.stdout
