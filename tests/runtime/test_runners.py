"""A schedule runs only where the calling thread has as many cores as an operator has threads, whatever it had when the file was loaded."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from autosched.core import forks
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle
from autosched.runtime import binding, runners
from autosched.runtime.guard import FallbackWarning, LoadedModel
from autosched.runtime.load import load
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.forked import run_forked
from tests.conformance.graphs import TwoBranches, two_branches_inputs, two_branches_program


def _file(model: TwoBranches, width: int) -> bytes:
    graph = two_branches_program(model)[0].graph
    return encode_bundle(two_branches_bundle(model, schedule=sequential(graph, width=width)))


def _loaded(*, width: int, strict: bool) -> LoadedModel:
    model = TwoBranches().eval()
    return load(_file(model, width), model, strict=strict)


def _call(fast: LoadedModel) -> None:
    args, kwargs = two_branches_inputs()
    expected = fast.model(*args, **kwargs)["sum"]
    torch.testing.assert_close(fast(*args, **kwargs)["sum"], expected)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many the thread has that asks."""
    found = {"mine": 2}
    monkeypatch.setattr(binding, "usable_cores", lambda: 2)
    # So that each thread runs its calls.
    monkeypatch.setattr(runners, "usable_cores", lambda: 4)
    monkeypatch.setattr(runners, "cores_of_thread", lambda: found["mine"])
    monkeypatch.setattr(runners, "_cores", runners._Cores())
    return found


def test_a_thread_with_too_few_cores_runs_the_model_and_others_the_schedule(cores: dict[str, int]) -> None:
    fast = _loaded(width=2, strict=False)
    _call(fast)
    cores["mine"] = 1
    with ThreadPoolExecutor(1) as pool, pytest.warns(FallbackWarning, match="has 2 threads, and the thread that calls may run on 1 of"):
        pool.submit(_call, fast).result()
    _call(fast)
    assert fast.report().calls == 2
    assert fast.report().scheduled


def test_operators_of_one_thread_ask_for_one_core(cores: dict[str, int]) -> None:
    fast = _loaded(width=1, strict=True)
    cores["mine"] = 1
    _call(fast)
    assert fast.report().calls == 1


def test_after_a_fork_cores_are_counted_again(cores: dict[str, int]) -> None:
    fast = _loaded(width=2, strict=False)
    _call(fast)
    cores["mine"] = 1
    _call(fast)
    forks.tell_all()
    with pytest.warns(FallbackWarning, match="may run on 1 of the cores"):
        _call(fast)
    assert fast.report().calls == 2


_PINNED = """
import os, sys, time, warnings
import torch
warnings.simplefilter("ignore")
import autosched
from tests.conformance.graphs import TwoBranches, two_branches_inputs

torch.manual_seed(0)
model = TwoBranches().eval()
args, kwargs = two_branches_inputs()
fast = autosched.load(open(sys.argv[1], "rb").read(), model)
fast(*args, **kwargs)
child = os.fork()
if child == 0:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    fast(*args, **kwargs)
    os._exit(fast.report().calls)
assert fast.report().calls == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
print("stepped aside")
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores to pin to one")
def test_a_forked_process_that_is_pinned_to_one_core_runs_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = tmp_path / "two.autosched"
    file.write_bytes(_file(TwoBranches().eval(), width=2))
    said = run_forked(_PINNED, str(file), timeout_s=200)
    assert said.stdout == "stepped aside\n", said.stderr
