"""A machine with two GPUs: what is served on the second never touches the first. Run under run.py --devices 2, skipped elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

TWO = torch.cuda.is_available() and torch.cuda.get_device_name().startswith("Emulated") and torch.cuda.device_count() > 1
pytestmark = pytest.mark.skipif(not TWO, reason="needs two emulated devices: use run.py --devices 2")


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
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))


def tuned(lowering: str) -> bytes:
    import autosched

    model = Net().eval()
    return autosched.tune(model, (torch.randn(4, 8),), device="cuda", effort="quick", budget_s=8, lowering=lowering).to_bytes()


def loaded(data: bytes) -> Callable[..., torch.Tensor]:
    import autosched

    served: Callable[..., torch.Tensor] = autosched.load(data, Net().eval().to("cuda:1"), strict=True)
    return served


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("lowering", ["aten", "fused", "inductor"])
def test_what_was_tuned_on_the_first_is_served_on_the_second(lowering: str) -> None:
    data = tuned(lowering)
    torch.cuda.set_device(0)
    before = torch.cuda.memory_allocated(0)
    served = loaded(data)
    inputs = torch.randn(4, 8, device="cuda:1")
    assert torch.allclose(served(inputs), Net().to("cuda:1")(inputs), atol=1e-5)
    assert served(inputs).device == torch.device("cuda:1")
    # The device that is current is the caller's affair.
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before
