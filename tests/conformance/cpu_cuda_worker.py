"""The CUDA device's own measuring process, on the double with real CPU tensors."""

from __future__ import annotations

from autosched.device.cuda import worker_main
from tests.conformance.cpu_cuda import CpuCuda, on_the_double


def main() -> None:
    with on_the_double(worker_main, CpuCuda()):
        worker_main.main()
