"""A CUDA GPU as a device: lanes are streams, a schedule is one CUDA Graph, and everything is measured in a killable process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autosched.core.program import Program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.device.cuda.meter import GpuMeter
from autosched.device.cuda.screen import require_capturable
from autosched.device.cuda.session import CudaSession, new_cuda_worker
from autosched.device.cuda.settings import current_settings
from autosched.device.early import EarlyWorker
from autosched.runtime.cuda.key import cuda_device_key, cuda_software_key, gpu_count, require_cuda_build, require_kernels
from autosched.runtime.current_device import current_index

if TYPE_CHECKING:
    import torch


class CudaDevice(EarlyWorker):
    """See ``base.Device``.

    Args:
        seed: of the inputs that timings use, and of the order of measurements.
        index: which of the visible GPUs; by default the one that PyTorch's calls go to where they name none.

    The measuring processes see the same GPUs as this one, and make theirs the current one. Were all others hidden from them, the GPU would
    have another index there than here: in code that was compiled for it, and in a model that names it.

    Raises:
        DeviceMissing: saying what is missing (a CUDA build of PyTorch, the driver, a GPU) and what to do.
        DeviceError: if this PyTorch cannot use the GPU, because the driver is too old for it, or the GPU.
        UsageError: if there are fewer GPUs, saying how many.
    """

    def __init__(self, *, seed: int = 0, index: int | None = None) -> None:
        require_cuda_build()
        self._seed = seed
        self._index = current_index() if index is None else index
        self._key = cuda_device_key(self._index)
        require_kernels(self._index)
        super().__init__(new_cuda_worker, compiling_for=self._key.kind)

    @property
    def index(self) -> int:
        """As ``base.OneOfSeveral.index``."""
        return self._index

    @property
    def count(self) -> int:
        """As ``base.OneOfSeveral.count``."""
        return gpu_count()

    @property
    def key(self) -> DeviceKey:
        """As ``runtime.cuda.key.cuda_device_key``."""
        return self._key

    @property
    def software(self) -> SoftwareKey:
        """As ``runtime.cuda.key.cuda_software_key``."""
        return cuda_software_key(self._index)

    def other_work(self) -> float | None:
        """As ``base.TellsOtherWork.other_work``, through NVML, which needs no context on the GPU."""
        return GpuMeter(self._index).others_share()

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
            settings=current_settings(self._index, self._key),
            seed=self._seed,
            worker=self.take_early(timeout_s),
        )
