"""Constants so small that Inductor writes their numbers into its code: new numbers are new code, whether or not anything was prepared."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.pipeline.inductor_capture import capture_inductor
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.load import load
from tests.conformance.bundles import evidence_for

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")


class Normalised(nn.Module):
    """Every tensor it has is small."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3, 0.4]))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x - self.mean) / self.temperature)


_CHANGES: dict[str, Callable[[Normalised], object]] = {
    "buffer in place": lambda model: model.mean.mul_(3.0),
    "parameter in place": lambda model: model.temperature.mul_(3.0),
    "state loaded": lambda model: model.load_state_dict({"mean": torch.ones(4), "temperature": torch.tensor(0.5)}),
    "past all counts": lambda model: model.mean.data.mul_(3.0),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_new_numbers_of_small_constants_are_never_missed(name: str) -> None:
    model, x = Normalised().eval(), torch.randn(2, 4)
    captured = capture_inductor(model, (x,))
    assert isinstance(captured, Captured), captured
    program = captured.program
    # Nothing but the code has them, so that nothing else would tell.
    assert program.prologue == ()
    device = cpu_device_key()
    evidence = evidence_for(len(program.graph), device, program.graph.hash)
    schedule = sequential(program.graph, width=torch.get_num_threads())
    loaded = load(encode_bundle(make_bundle(program, schedule, evidence, {}, device, software_key())), model, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))
        _CHANGES[name](model)
        torch.testing.assert_close(loaded(x), model(x))
    assert loaded.report().calls == 2
