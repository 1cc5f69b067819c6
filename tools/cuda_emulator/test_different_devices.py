"""A machine with two GPUs that differ: nothing of the one is taken for the other. Run under run.py --device h200,l4, skipped elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

EMULATED = torch.cuda.is_available() and torch.cuda.get_device_name().startswith("Emulated") and torch.cuda.device_count() > 1
DIFFERENT = EMULATED and torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1)
pytestmark = pytest.mark.skipif(not DIFFERENT, reason="needs two emulated devices that differ: use run.py --device h200,l4")


class Net(torch.nn.Module):
    """Two branches and pointwise work."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[batch, 8]``."""
        return torch.tanh(self.left(x)) * 2 + torch.relu(self.right(x))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    monkeypatch.setenv("AUTOSCHED_COMPILE_TOTAL_S", "60")  # what torch.compile would take is not the question
    torch.cuda.set_device(0)
    return tmp_path


def tuned(lowering: str, device: str, home: str = "cpu") -> Any:
    import autosched

    model = Net().eval().to(home)
    return autosched.tune(model, (torch.randn(4, 8, device=home),), device=device, effort="quick", budget_s=8, lowering=lowering)


@pytest.mark.parametrize("lowering", ["aten", "fused", "inductor"])
def test_a_schedule_is_for_the_gpu_that_it_was_measured_on(lowering: str, kept: Path) -> None:
    import autosched

    second = tuned(lowering, "cuda:1")
    data = second.to_bytes()
    assert second.bundle.key.device.name == torch.cuda.get_device_name(1)
    served = autosched.load(data, Net().eval().to("cuda:1"), strict=True)
    x = torch.randn(4, 8, device="cuda:1")
    assert torch.allclose(served(x), Net().to("cuda:1")(x), atol=1e-5)
    with pytest.raises(autosched.AutoschedError, match="device name: Emulated L4"):
        autosched.load(data, Net().eval().to("cuda:0"), strict=True)
    first = tuned(lowering, "cuda:0")
    assert first.bundle.key.device != second.bundle.key.device
    # A journal for each, and runs for each; what is measured of compiled variants is nobody's to learn from.
    assert len(list((kept / "measurements").glob("*.jsonl"))) == 2
    assert len(list((kept / "runs").glob("*"))) == (0 if lowering == "fused" else 2)
    x = torch.randn(4, 8, device="cuda:0")
    assert torch.allclose(autosched.load(first.to_bytes(), Net().eval().to("cuda:0"), strict=True)(x), Net().to("cuda:0")(x), atol=1e-5)


@pytest.mark.usefixtures("kept")
def test_a_model_that_is_elsewhere_is_measured_where_one_says_and_the_report_says_so() -> None:
    report = tuned("aten", "cuda:1", home="cuda:0").report
    assert report.device.name == torch.cuda.get_device_name(1)
    assert any("another kind of GPU (Emulated L4" in note for note in report.notes)


def test_bench_finds_the_gpu_that_a_file_is_for(kept: Path) -> None:
    from autosched import pipeline

    path = kept / "net.autosched"
    tuned("aten", "cuda:1").save(path)
    assert pipeline.check(path).verdict == "exact"
    assert pipeline.check(path, device="cuda:0").verdict == "incompatible"
    assert pipeline.bench(path, Net().eval(), rounds=5).device == torch.cuda.get_device_name(1)


@pytest.mark.usefixtures("kept")
def test_a_process_that_has_changed_what_is_visible_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver was asked before; whoever is started now sees another GPU under the same number."""
    import autosched

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(autosched.AutoschedError, match="cuda:0 is another GPU in the measuring process than in this one"):
        tuned("aten", "cuda:0")
    with pytest.raises(autosched.AutoschedError, match="no cuda:1: this process sees 1 GPU"):
        tuned("aten", "cuda:1")
