"""Baselines that are no schedules: eager in this process, compiled in another."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from autosched import zoo
from autosched.core.records import Failure, FailureKind
from autosched.device.baselines import EagerBaseline
from autosched.device.compiled_baseline import CompiledBaseline, ModelSource, from_zoo
from autosched.device.cpu_measure import LONG_RUN_US, warmed_us


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return torch.relu(self.linear(x)) * scale


@pytest.fixture
def call() -> tuple[Small, tuple[torch.Tensor], dict[str, float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Small().eval()
    x = torch.randn(4, 8)
    with torch.no_grad():
        return model, (x,), {"scale": 2.0}, [model(x, scale=2.0)]


def test_eager_uses_its_threads_and_gives_them_back() -> None:
    seen: list[tuple[int, bool]] = []

    class Watch(torch.nn.Module):
        def forward(self) -> None:
            seen.append((torch.get_num_threads(), torch.is_inference_mode_enabled()))

    before = torch.get_num_threads()
    baseline = EagerBaseline(Watch(), (), None, threads=before + 1, min_block_us=50.0)
    assert all(isinstance(baseline.round_us(), float) for _ in range(3))
    assert set(seen) == {(before + 1, True)}
    assert torch.get_num_threads() == before
    assert baseline.name == f"eager_{before + 1}"


@pytest.mark.parametrize(("takes_us", "asked"), [(10.0, [1, 1000]), (LONG_RUN_US / 2, [1, 1]), (LONG_RUN_US, [1]), (60e6, [1])])
def test_a_run_is_made_twice_only_where_the_first_would_not_count(takes_us: float, asked: list[int]) -> None:
    made: list[int] = []

    def runs_us(count: int) -> float:
        made.append(count)
        return takes_us + count

    block_us = warmed_us(runs_us, lambda first_us: max(1, math.ceil(11_000.0 / first_us)))
    assert made == asked
    assert block_us == takes_us + asked[-1]


def test_an_eager_model_that_raises_is_a_failure_for_good() -> None:
    calls: list[int] = []

    class Bad(torch.nn.Module):
        def forward(self) -> None:
            calls.append(1)
            raise ValueError("not today")

    baseline = EagerBaseline(Bad(), (), None, threads=1)
    found = baseline.round_us()
    assert isinstance(found, Failure)
    assert "not today" in found.detail
    assert baseline.round_us() == found
    assert calls == [1]


def test_an_interrupt_is_no_failure() -> None:
    class Interrupted(torch.nn.Module):
        def forward(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EagerBaseline(Interrupted(), (), None, threads=1).round_us()


@pytest.mark.slow
def test_compiled_runs_the_models_own_call_where_its_source_is_not_there(
    call: tuple[Small, tuple[torch.Tensor], dict[str, float], list[torch.Tensor]],
) -> None:
    model, args, kwargs, references = call
    source = ModelSource("tests.no_such_module:make")
    baseline = CompiledBaseline(source, args, kwargs, references, threads=1, model=model, timeout_s=200)
    try:
        failure = baseline.prepare()
        if failure is not None and failure.kind is FailureKind.UNAVAILABLE:
            pytest.skip(failure.detail)
        assert failure is None
        assert baseline.max_abs_error is not None
        assert baseline.max_abs_error < 1e-4
        first = baseline.round_us()
        assert isinstance(first, float), first
        assert first > 0
        assert isinstance(baseline.round_us(), float)
        os.kill(baseline._worker.pid or 0, signal.SIGKILL)
        while baseline._worker.pid is not None:
            time.sleep(0.01)
        lost = baseline.round_us()
        assert isinstance(lost, Failure)
        assert "ended while it waited" in lost.detail
        assert baseline.round_us() == lost
    finally:
        baseline.close()


HEAD = "import os, signal, time\nimport autosched.device.worker_compile as it\n"
PLUGINS = {
    "no compiler": HEAD + "it.shutil.which = lambda name: None\n",
    "killed": HEAD + "it._load_model = lambda request: os.kill(os.getpid(), signal.SIGKILL)\n",
    "hangs": HEAD + "it._load_model = lambda request: time.sleep(1000)\n",
}


ANOTHER_MODEL = f"""{HEAD}
load = it._load_model
def with_weights_of_its_own(request):
    model = load(request)
    if not request.source.endswith(".pt2"):
        it.torch.nn.init.normal_(next(model.parameters()))
    return model
def as_it_is(self, model, args, kwargs, lowering):
    self._call = lambda: model(*args, **kwargs)
    return self._call()
it._load_model, it._missing_compiler, it._Service._compile_and_run = with_weights_of_its_own, lambda: None, as_it_is
"""


def test_a_source_that_makes_other_weights_gives_way_to_the_model_itself(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(ANOTHER_MODEL)
    made = zoo.load("autosched:toy")
    with torch.no_grad():
        references = [made.model(*made.args)]
    source = from_zoo("autosched:toy")
    alone = CompiledBaseline(source, made.args, {}, references, threads=1, plugin=plugin)
    failure = alone.prepare()
    alone.close()
    assert failure is not None
    assert failure.kind is FailureKind.MISMATCH
    baseline = CompiledBaseline(source, made.args, {}, references, threads=1, model=made.model, plugin=plugin)
    try:
        assert baseline.prepare() is None
        assert baseline.max_abs_error is not None
        assert baseline.max_abs_error < 1e-3
    finally:
        baseline.close()


@dataclass
class Memory:
    """An argument that PyTorch does not take apart, as a cache of transformers."""

    rows: torch.Tensor


class Answer(NamedTuple):
    """As an output of transformers: only who imports its module knows it."""

    first: torch.Tensor
    second: list[torch.Tensor]


class Remembering(Small):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0, memory: Memory | None = None) -> Answer:  # type: ignore[override]
        assert memory is not None
        return Answer(super().forward(x, scale=scale), [memory.rows + x, x * 2])


def test_a_model_whose_call_and_answer_are_objects_is_brought_there_by_its_leaves(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(ANOTHER_MODEL)
    torch.manual_seed(0)
    model, x, memory = Remembering().eval(), torch.randn(4, 8), Memory(torch.randn(4, 8))
    with torch.no_grad():
        first, second = model(x, scale=2.0, memory=memory)
    baseline = CompiledBaseline(None, (x,), {"memory": memory, "scale": 2.0}, [first, *second], threads=1, model=model, plugin=plugin)
    try:
        assert baseline.prepare() is None
        assert baseline.max_abs_error is not None
        assert baseline.max_abs_error < 1e-5
    finally:
        baseline.close()
    # Asking for the baseline has left the model's own call as it was.
    with torch.no_grad():
        assert torch.equal(model(x, scale=2.0, memory=memory).first, first)


@pytest.mark.parametrize(
    ("fault", "kind"), [("no compiler", FailureKind.UNAVAILABLE), ("killed", FailureKind.CRASH), ("hangs", FailureKind.TIMEOUT)]
)
def test_a_compiler_that_fails_is_a_failure_for_good(
    call: tuple[Small, tuple[torch.Tensor], dict[str, float], list[torch.Tensor]], tmp_path: Path, fault: str, kind: FailureKind
) -> None:
    _, args, kwargs, references = call
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGINS[fault])
    baseline = CompiledBaseline(
        from_zoo("autosched:toy"), args, kwargs, references, threads=1, timeout_s=2.0 if fault == "hangs" else 60.0, plugin=plugin
    )
    found = baseline.round_us()
    assert isinstance(found, Failure)
    assert found.kind is kind
    assert baseline.round_us() == found
    assert baseline._worker.pid is None
    baseline.close()


def test_what_cannot_travel_is_unavailable(call: tuple[Small, tuple[torch.Tensor], dict[str, float], list[torch.Tensor]]) -> None:
    _, args, _, references = call
    baseline = CompiledBaseline(ModelSource("model.pt2"), args, {"lock": object()}, references, threads=1)
    found = baseline.round_us()
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.UNAVAILABLE
    baseline.close()


@pytest.fixture(autouse=True)
def _no_child_left() -> Iterator[None]:
    before = _children()
    yield
    assert _children() <= before


def _children() -> set[str]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(path.read_text().split()) if path.exists() else set()
