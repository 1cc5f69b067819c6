"""What a GPU was doing while a sample was taken."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from autosched.core.records import Contamination
from autosched.runtime.cuda.key import pci_bus_id

# NVML's share is that of a window of a sixth of a second to a second, depending on the product (NVML API reference, nvmlUtilization_t).
_WINDOW_S = 1.2
_WINDOWS = 2


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What all processes use of a GPU. ``busy`` is the share (0 to 1) of the last moments in which any kernel ran."""

    busy: float
    held_bytes: int
    memory_bytes: int


class GpuMeter:
    """The clock beside each sample, through NVML where nvidia-ml-py is installed; reads only, changes nothing.

    Args:
        index: which visible GPU, as CUDA counts.
    """

    def __init__(self, index: int = 0) -> None:
        self._handle: Any = None
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id(index))
            self._nvml = pynvml
        except Exception:  # NVML raises errors of its own for every way a machine can lack it
            self._handle = None

    def read(self) -> Contamination:
        """The multiprocessors' clock now; other processes' share of a GPU is not something NVML tells."""
        if self._handle is None:
            return Contamination()
        try:
            clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
        except Exception:
            return Contamination()
        return Contamination(clock_mhz=float(clock))

    def use(self) -> GpuUse | None:
        """What is used of the GPU now, by whomever; ``None`` where NVML does not tell (of a slice of a GPU, for example)."""
        if self._handle is None:
            return None
        try:
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except Exception:
            return None
        return GpuUse(busy / 100.0, int(memory.used), int(memory.total))

    def others_share(self) -> float | None:
        """Share (0 to 1) of the time in which other processes' kernels run; ``None`` where NVML does not tell.

        Only while none of this job runs: NVML tells no process's kernels from another's. Returns at once where none has run lately; else
        what ran before the call is waited for, and the quieter of two windows counts: a moment's work says nothing of an hour.
        """
        now = self.use()
        if now is None or now.busy == 0.0:
            return None if now is None else 0.0
        share = 1.0
        for _ in range(_WINDOWS):
            time.sleep(_WINDOW_S)
            now = self.use()
            if now is None:
                return None
            share = min(share, now.busy)
            if share == 0.0:
                break
        return share
