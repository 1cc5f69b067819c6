"""A process that the suite forks is one of its own, and ends as one that was started."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.conformance.forked import run_forked

_TELLS = """
import json, os, sys, torch
print(json.dumps([__name__, sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()]))
print("an error", file=sys.stderr)
sys.exit(3)
"""


def test_it_has_its_own_arguments_environment_folder_and_output(tmp_path: Path) -> None:
    ended = [run_forked(_TELLS, "a", "b c", environment={"WORD": "said"}, folder=tmp_path) for _ in range(2)]
    told = [json.loads(each.stdout) for each in ended]
    assert [each[:4] for each in told] == [["__main__", ["a", "b c"], {"WORD": "said"}, str(tmp_path)]] * 2
    assert len({os.getpid(), *(each[4] for each in told)}) == 3
    assert [(each.returncode, each.stderr) for each in ended] == [(3, "an error\n")] * 2


def test_what_one_changes_another_does_not_find() -> None:
    assert run_forked("import os, torch; torch.set_num_threads(7); os.environ['LEFT'] = '1'").returncode == 0
    found = run_forked("import os, torch; print(torch.get_num_threads(), 'LEFT' in os.environ)").stdout.split()
    assert found[0] != "7"
    assert found[1] == "False"


def test_how_it_ended_is_said() -> None:
    assert run_forked("import atexit; atexit.register(print, 'left')").stdout == "left\n"
    raised = run_forked("assert False, 'a reason'")
    assert raised.returncode == 1
    assert raised.stderr.endswith("AssertionError: a reason\n")
    assert run_forked("import os, signal; os.kill(os.getpid(), signal.SIGTERM)").returncode == -signal.SIGTERM
    assert run_forked("import time; time.sleep(600)", timeout_s=0.2).returncode == -signal.SIGKILL
