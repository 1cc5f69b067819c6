"""A CUDA GPU as a device: lanes are streams, a schedule is one CUDA Graph, and everything is measured in a killable process."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autosched.core.program import Program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.device.cuda.facts import gpu_facts, require_cuda_build
from autosched.device.cuda.screen import require_capturable
from autosched.device.cuda.session import CudaSession
from autosched.device.cuda.settings import current_settings

if TYPE_CHECKING:
    import torch

# Rises when what a record of this device means changes.
CUDA_SCHEMA = 1


class CudaDevice:
    """See ``base.Device``.

    Args:
        seed: of the inputs that timings use, and of the order of measurements.
        index: which of the visible GPUs.

    Raises:
        DeviceMissing: saying what is missing (a CUDA build of PyTorch, the driver, a GPU) and what to do.
    """

    def __init__(self, *, seed: int = 0, index: int = 0) -> None:
        require_cuda_build()
        self._seed = seed
        self._index = index
        self._facts = gpu_facts(index)

    @property
    def key(self) -> DeviceKey:
        """Name, compute capability, multiprocessors, caches, memory (in GiB), bus width, ECC, MIG, integrated."""
        return DeviceKey("cuda", self._facts.name, tuple(sorted(self._facts.details().items())))

    @property
    def software(self) -> SoftwareKey:
        """Versions of PyTorch, the CUDA runtime, cuDNN, Triton and the driver, and the schema of our records."""
        import torch

        cudnn: Any = torch.backends.cudnn
        versions = {
            "torch": str(torch.__version__),
            "torch_git": str(torch.version.git_version or "unknown"),
            "cuda_runtime": str(torch.version.cuda),
            "cudnn": str(cudnn.version()),
            "triton": _version("triton"),
            "cuda_driver": self._facts.driver,
            "python": ".".join(str(part) for part in sys.version_info[:2]),
            "autosched_cuda_schema": str(CUDA_SCHEMA),
        }
        return SoftwareKey(tuple(sorted(versions.items())))

    def open(self, program: Program, constants: Mapping[int, torch.Tensor], *, timeout_s: float) -> CudaSession:
        """As ``base.Device.open``. Nothing starts before the first request.

        Raises:
            UnsupportedGraph: naming an operator that cannot run inside a CUDA graph, with its line in the model.
        """
        require_capturable(program.graph)
        return CudaSession(program, constants, timeout_s=timeout_s, settings=current_settings(self._index), seed=self._seed)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
