"""A baseline's process on the CPU: the real conversation, with the double's streams and no graph."""

from __future__ import annotations

import torch

from autosched.device.cuda.baseline_main import BaselineService
from autosched.device.worker_child import Channel
from tests.conformance.cpu_cuda import CpuCuda

_DOUBLE = CpuCuda()


class LosesTheDevice(torch.nn.Module):
    """A model after whose call the double answers nothing any more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` is not looked at."""
        _DOUBLE.lost = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(_DOUBLE.lost)


def main() -> None:
    channel = Channel()
    channel.serve(BaselineService(channel, device_of=lambda index: "cpu", backend_of=lambda device: _DOUBLE).handle)
