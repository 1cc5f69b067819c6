"""A baseline's process on the CPU: the real conversation, with the double's streams and no graph."""

from __future__ import annotations

from autosched.device.cuda.baseline_main import BaselineService
from autosched.device.worker_child import Channel
from tests.conformance.cpu_cuda import CpuCuda


def main() -> None:
    channel = Channel()
    channel.serve(BaselineService(channel, device_of=lambda index: "cpu", backend_of=lambda device: CpuCuda()).handle)
