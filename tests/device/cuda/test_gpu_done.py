"""GPU tests in several runs: what has passed is not asked again, what breaks a process costs nothing else, a status says what is left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.conformance.forked import run_forked

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
LEFT = 10  # as experiments/calls.py has it
_HEAD = """
import os, signal, time, pytest, torch
pytestmark = pytest.mark.gpu

def wish(name):
    return name in os.environ.get("WISHES", "").split()
"""
_PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


class Runs:
    """One file of tests that pretend to need a GPU, run again and again."""

    def __init__(self, folder: Path, tests: str) -> None:
        self.file, self.done = folder / "test_pretended.py", folder / "kept" / "done.jsonl"
        self.file.write_text(_HEAD + tests)

    def run(self, *wishes: str, budget_s: float = 100.0, done: bool = True, device: bool = True, only: str = "") -> tuple[int, str]:
        command = ["-v", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "-m", "gpu"]
        command += ["-p", "pytest_timeout", "-p", "tests.conftest", "-p", "tests.gpu.conftest", "--gpu-budget", str(budget_s)]
        command += [only] if only else []
        command += ["--gpu-rehearsal"] if device else []
        command += ["--gpu-done", str(self.done)] if done else []
        # Other plugins take longer to import than all that a run does.
        environment = {**os.environ, "WISHES": " ".join(wishes), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        ended = run_forked(_PYTEST, *command, str(self.file), environment=environment, folder=ROOT)
        return ended.returncode, ended.stdout + ended.stderr

    def events(self) -> list[tuple[str, str]]:
        """Names of tests, and what became of them, in order; without what only begins."""
        lines = [json.loads(line) for line in self.done.read_text().splitlines()]
        return [(line["test"].rpartition("::")[2], line["outcome"]) for line in lines if line["outcome"] != "begun"]


def test_what_has_passed_is_left_out_and_what_failed_comes_last(tmp_path: Path) -> None:
    runs = Runs(tmp_path, "def test_a(): assert not wish('fails'), 'a reason'\ndef test_b(): pass\ndef test_c(): pytest.skip('no')\n")
    assert runs.run("fails")[0] == 1
    assert runs.events() == [("test_a", "failed"), ("test_b", "passed"), ("test_c", "skipped")]
    assert "AssertionError: a reason" in runs.done.read_text()
    runs.file.write_text(runs.file.read_text() + "def test_d(): pass\n")
    code, said = runs.run()
    assert code == 0, said
    assert runs.events()[3:] == [("test_d", "passed"), ("test_a", "passed")]
    # Nothing to do is no failure.
    assert runs.run()[0] == 0
    assert len(runs.events()) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_where_no_device_answers_nothing_is_done(tmp_path: Path) -> None:
    runs = Runs(tmp_path, "def test_a(): pass\n")
    assert runs.run(device=False)[0] == LEFT
    assert runs.events() == [("test_a", "no device")]
    # What only looks at names has nothing to do either.
    assert runs.run(device=False, only="--collect-only")[0] == 0
    assert runs.run()[0] == 0
    assert runs.events()[1:] == [("test_a", "passed")]


def test_a_run_whose_time_is_over_stops_and_the_next_one_goes_on(tmp_path: Path) -> None:
    runs = Runs(tmp_path, "def test_a(): assert not wish('fails')\ndef test_b(): time.sleep(0.3)\ndef test_c(): pass\n")
    code, said = runs.run(budget_s=0.2)
    assert (code, runs.events()) == (LEFT, [("test_a", "passed"), ("test_b", "passed")]), said
    assert "the GPU budget of 0 s is spent; run again to go on" in said
    assert runs.run(budget_s=0.2)[0] == 0
    assert runs.events()[2:] == [("test_c", "passed")]


def test_what_fails_for_want_of_time_is_not_done(tmp_path: Path) -> None:
    runs = Runs(tmp_path, "def test_a():\n time.sleep(0.3)\n assert not wish('late')\n")
    assert runs.run("late", budget_s=0.1)[0] == LEFT
    assert runs.run()[0] == 0


def test_a_process_that_dies_costs_one_test(tmp_path: Path) -> None:
    runs = Runs(tmp_path, "def test_a(): wish('dies') and os.kill(os.getpid(), signal.SIGKILL)\ndef test_b(): pass\n")
    assert runs.run("dies")[0] == -signal.SIGKILL
    assert runs.run("dies")[0] == -signal.SIGKILL
    assert runs.events() == [("test_b", "passed")]
    assert runs.run()[0] == 0


_STUCK = """
def test_a():
    if wish('stuck'):
        # As the driver's code does that is waited for.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(600)
def test_b(): pass
"""


def test_one_that_waits_for_the_device_for_ever_costs_its_own_time(tmp_path: Path) -> None:
    runs = Runs(tmp_path, _STUCK)
    (tmp_path / "conftest.py").write_text("import tests.gpu.conftest as plan\nplan._GRACE_S = plan._STUCK_S = 0.5\n")
    assert runs.run("stuck", budget_s=2.0)[0] == -signal.SIGKILL
    assert runs.run("stuck", budget_s=2.0)[0] == -signal.SIGKILL
    assert runs.events() == [("test_b", "passed")]


_BROKEN = """
def test_a(monkeypatch):
    if wish('breaks'):
        def refuse():
            raise RuntimeError('an illegal memory access was encountered\\nmore')
        torch.cuda.is_initialized, torch.cuda.synchronize = (lambda: True), refuse
        assert False
def test_b(): pass
"""


def test_a_device_that_no_longer_answers_ends_the_run_instead_of_failing_the_rest(tmp_path: Path) -> None:
    runs = Runs(tmp_path, _BROKEN)
    code, said = runs.run("breaks")
    assert (code, runs.events()) == (LEFT, [("test_a", "failed")])
    assert "the device no longer answers in this process: an illegal memory access was encountered" in said
    assert runs.run("breaks")[0] == 1
    assert runs.events()[1:] == [("test_b", "passed"), ("test_a", "failed")]
    # By hand, too.
    code, said = runs.run("breaks", done=False)
    assert code == pytest.ExitCode.INTERRUPTED
    assert "1 failed" in said.splitlines()[-1]
