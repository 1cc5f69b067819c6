"""A machine with two GPUs: each is tuned for and served on without touching the other. Run under run.py --devices 2, skipped elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

EMULATED = torch.cuda.is_available() and torch.cuda.get_device_name().startswith("Emulated") and torch.cuda.device_count() > 1
ALIKE = EMULATED and torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1)
pytestmark = pytest.mark.skipif(not ALIKE, reason="needs two emulated devices that are alike: use run.py --devices 2")


class Net(torch.nn.Module):
    """Two branches, so that there is something to schedule, and pointwise work, so that something is compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[batch, 8]``."""
        return torch.tanh(self.left(x)) * 2 + torch.relu(self.right(x))


def test_each_device_has_its_own_streams_and_memory() -> None:
    first, second = (torch.ones(4, device=f"cuda:{index}") for index in range(2))
    assert (first.device.index, second.device.index) == (0, 1)
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream):
        made = second * 2
    torch.cuda.synchronize(1)
    assert made.tolist() == [2.0] * 4
    assert torch.cuda.current_device() == 0


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    monkeypatch.setenv("AUTOSCHED_COMPILE_TOTAL_S", "60")  # what torch.compile would take is not the question
    torch.cuda.set_device(0)
    yield tmp_path
    # The device that is current is the caller's affair.
    assert torch.cuda.current_device() == 0


def tuned(lowering: str, device: str, model: torch.nn.Module | None = None) -> Any:
    import autosched

    model = model or Net().eval()
    example = torch.randn(4, 8, device=next(model.parameters()).device)
    return autosched.tune(model, (example,), device=device, effort="quick", budget_s=8, lowering=lowering)


def assert_served(data: bytes, home: str) -> None:
    import autosched

    first = torch.cuda.memory_allocated(0)
    served: Callable[..., torch.Tensor] = autosched.load(data, Net().eval().to(home), strict=True)
    inputs = torch.randn(4, 8, device=home)
    assert torch.allclose(served(inputs), Net().to(home)(inputs), atol=1e-5)
    assert served(inputs).device == torch.device(home)
    assert home == "cuda:0" or torch.cuda.memory_allocated(0) == first


@pytest.mark.usefixtures("kept")
def test_what_was_tuned_on_the_first_is_served_on_the_second() -> None:
    assert_served(tuned("inductor", "cuda").to_bytes(), "cuda:1")


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("lowering", ["aten", "fused", "inductor"])
def test_what_was_tuned_on_the_second_is_served_on_both(lowering: str) -> None:
    first = torch.cuda.memory_allocated(0)
    made = tuned(lowering, "cuda:1")
    assert not any("the model is on" in note for note in made.report.notes)
    assert torch.cuda.memory_allocated(0) == first
    for home in ("cuda:1", "cuda:0"):
        assert_served(made.to_bytes(), home)


@pytest.mark.usefixtures("kept")
def test_a_model_on_the_second_stays_there_and_is_measured_where_one_says() -> None:
    model = Net().eval().to("cuda:1")
    there = tuned("aten", "cuda", model)
    moved = tuned("aten", "cuda:0", model)
    assert not any("the model is on" in note for note in there.report.notes)
    assert any("the model is on cuda:1; a copy of its weights was measured on cuda:0" in note for note in moved.report.notes)
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda:1")}
    assert_served(moved.to_bytes(), "cuda:1")


PLUGIN = """
import torch

def wrap_kernel(index, kernel):
    def run(slots):
        kernel(slots)
        homes = {str(item.device) for item in slots if isinstance(item, torch.Tensor)}
        assert homes == {"cuda:1"}, homes
        assert torch.cuda.current_device() == 1
        assert not torch._C._cuda_hasPrimaryContext(0), "a context of some hundred MiB on a GPU that others use"
    return run
"""


@pytest.mark.usefixtures("kept")
def test_the_measuring_process_makes_no_context_on_the_first(tmp_path: Path) -> None:
    from autosched.capture.export import capture
    from autosched.core.records import Failure
    from autosched.device.cuda.session import CudaSession
    from autosched.device.cuda.settings import current_settings

    (tmp_path / "plugin.py").write_text(PLUGIN)
    captured = capture(Net().eval(), (torch.randn(4, 8),), target="cuda")
    session = CudaSession(
        captured.program, captured.constants, timeout_s=120.0, settings=current_settings(1), plugin=tmp_path / "plugin.py"
    )
    try:
        rows = session.solo([1], repeats=3)
    finally:
        session.close()
    assert [row[0].detail for row in rows if isinstance(row[0], Failure)] == []


@pytest.mark.usefixtures("kept")
def test_compile_tunes_and_runs_where_the_model_is() -> None:
    import autosched
    from autosched import plugin

    model, x = Net().eval().to("cuda:1"), torch.randn(4, 8, device="cuda:1")
    with torch.no_grad():
        fast = autosched.compile(model, (x,), tune="quick", budget_s=8, device="cuda:1", strict=True)
        assert fast.report().scheduled
        assert torch.allclose(fast(x), model(x), atol=1e-5)
        # Found in the cache by a model on the other GPU, which is alike.
        other = torch.compile(Net().eval().to("cuda:0"), backend=plugin.autosched, options={"strict": True})
        assert torch.allclose(other(x.to("cuda:0")), model(x).to("cuda:0"), atol=1e-5)
        with pytest.raises(autosched.AutoschedError, match="device is 'cuda:0', but the model is on cuda:1"):
            autosched.compile(model, (x,), device="cuda:0", strict=True)
    torch._dynamo.reset()


class Plain(torch.nn.Module):
    """No parameters to say where it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[batch, 8]``."""
        return torch.softmax(x @ x.t(), -1) + torch.sigmoid(x @ x.t())


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("home", ["cuda:0", "cuda:1"])
def test_a_model_without_parameters_runs_on_a_schedule_too(home: str) -> None:
    import autosched

    x = torch.randn(8, 8, device=home)
    with torch.no_grad():
        fast = autosched.compile(Plain().eval(), (x,), tune="quick", budget_s=8, strict=True)
        assert fast.report().scheduled
        assert torch.allclose(fast(x), Plain()(x), atol=1e-5)
        assert fast.report().calls == 1
        assert fast.report().stepped_aside == ()


def exit_code(*words: str) -> object:
    """Of a command."""
    from autosched.cli import main

    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code


def test_the_commands_take_it(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str, codes: tuple[int, ...] = (0,)) -> Any:
        assert exit_code(*words, "--json") in codes
        return json.loads(capsys.readouterr().out)

    # 3: other work keeps the processor busy, which is nothing to GPUs that take no time.
    findings = {item["what"]: item["detail"] for item in printed("doctor", codes=(0, 3))["findings"]}
    assert findings["cuda"] == "2 GPUs"
    assert {"cuda:0", "cuda:1", "cost model, cuda"} <= findings.keys()
    file = str(kept / "toy.autosched")
    printed("tune", "autosched:toy", "--device", "cuda:1", "--budget", "8s", "--lowering", "aten", "-o", file)
    assert printed("bench", file, "--device", "cuda:1", "--rounds", "5")["tuned_us"] > 0
    assert printed("check", file)["verdict"] == "exact"
    runs = str(kept / "collected")
    sizes = ("--pairs", "4", "--groups", "0", "--schedules", "0")
    assert printed("collect", "autosched:toy", "-o", runs, "--device", "cuda:1", "--budget", "60s", *sizes)["solo_rows"] > 0
    assert exit_code("tune", "autosched:toy", "--device", "cuda:2") == 2
    assert "no cuda:2: this process sees 2 GPUs" in capsys.readouterr().err
