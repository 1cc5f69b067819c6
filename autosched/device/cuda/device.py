"""A CUDA GPU as a device: lanes are streams, a schedule is one CUDA Graph, and everything is measured in a killable process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autosched.core.program import Program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.device.cuda.screen import require_capturable
from autosched.device.cuda.session import CudaSession, new_cuda_worker
from autosched.device.cuda.settings import current_settings
from autosched.device.early import EarlyWorker
from autosched.runtime.cuda_key import cuda_device_key, cuda_software_key, require_cuda_build

if TYPE_CHECKING:
    import torch


class CudaDevice(EarlyWorker):
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
        self._key = cuda_device_key(index)
        super().__init__(new_cuda_worker)

    @property
    def key(self) -> DeviceKey:
        """As ``runtime.cuda_key.cuda_device_key``."""
        return self._key

    @property
    def software(self) -> SoftwareKey:
        """As ``runtime.cuda_key.cuda_software_key``."""
        return cuda_software_key(self._index)

    def open(self, program: Program, constants: Mapping[int, torch.Tensor], *, timeout_s: float) -> CudaSession:
        """As ``base.Device.open``. Nothing starts before the first request.

        Raises:
            UnsupportedGraph: naming an operator that cannot run inside a CUDA graph, with its line in the model.
        """
        require_capturable(program.graph)
        return CudaSession(
            program,
            constants,
            timeout_s=timeout_s,
            settings=current_settings(self._index),
            seed=self._seed,
            worker=self.take_early(timeout_s),
        )
