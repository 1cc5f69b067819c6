"""Another Python process that has this package: it imports from where this one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PARENT = """
import subprocess, sys
sys.path.append(sys.argv[1])
from autosched.core.python_command import python_command
child = python_command("print(sys.argv[1] in sys.path, sys.flags.no_user_site); import autosched", sys.argv[2])
subprocess.run(child, check=True)
"""


@pytest.mark.parametrize(("flag", "said"), [("-P", "True 0"), ("-I", "False 1"), ("-E", "False 0"), ("-s", "True 1")])
def test_what_this_interpreter_ignores_another_one_ignores(flag: str, said: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONNOUSERSITE"} | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, flag, "-c", _PARENT, str(_ROOT), str(tmp_path)]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip() == said
