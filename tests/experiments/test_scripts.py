"""Every experiment starts as its page says: by its file, from anywhere, with nothing of the working directory on Python's path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.forked import run_forked

_FOLDER = Path(__file__).resolve().parents[2] / "experiments"
SCRIPTS = sorted(path for path in _FOLDER.rglob("*.py") if '__name__ == "__main__"' in path.read_text())
# As a fresh interpreter would: nothing of the checkout is found that the script does not put on the path, or has been imported.
_START = """
import runpy, sys
root, script = sys.argv[1:]
sys.path.remove(root)
for name in [name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(root)]:
    del sys.modules[name]
sys.argv = [script, "--help"]
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(_FOLDER).as_posix())
def test_it_says_what_it_takes(script: Path, tmp_path: Path) -> None:
    done = run_forked(_START, str(_FOLDER.parent), str(script), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert not list(tmp_path.iterdir())
