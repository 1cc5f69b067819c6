"""The bodies of the GPU tests run here too, on the double with CPU tensors: what is misspelt is found before anybody pays for a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conformance.forked import run_forked

ROOT = Path(__file__).resolve().parents[3]


_PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
_OPTIONS = ("-q", "-p", "no:cacheprovider", "--show-capture=no", "-m", "gpu")


def rehearse(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the GPU tests, in a process of their own: their options are the whole run's."""
    done = run_forked(_PYTEST, *_OPTIONS, *arguments, folder=ROOT)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_body_that_can_be_rehearsed_passes() -> None:
    # The file on the device as a whole asks the same of the same sessions as the models' does, and costs as much again.
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")) if path.stem != "test_gpu_device"]
    command = [sys.executable, "-P", "-m", "pytest", *_OPTIONS, *files, "--gpu-rehearsal", "--gpu-budget", "3000"]
    # Not forked: PyTorch reads the number of threads when it is imported.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None
    assert int(passed.group(1)) >= 28, said[-1000:]


def test_what_does_not_fit_the_budget_fails_and_says_so_at_once() -> None:
    code, said = rehearse("tests/gpu/test_gpu_fuzz.py", "tests/gpu/test_gpu_models.py", "--gpu-rehearsal", "--gpu-budget", "0")
    assert code == 1
    why = "not run: the GPU budget of 0 s is spent"
    # A run that is ended by force has no summary.
    assert said.index(why) < said.index("= ERRORS =")
    errors = re.search(r"(\d+) errors", said)
    assert errors is not None
    assert int(errors.group(1)) > 10
    # No model was opened for them: that is where all but one of them are skipped in a rehearsal.
    assert "skipped" not in said.splitlines()[-1]


def test_without_a_gpu_they_skip_and_say_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, said = rehearse("tests/gpu/test_gpu_fuzz.py", "-rs")
    assert code == 0, said
    assert "needs a CUDA device" in said
    assert "10 skipped" in said
