"""The CPU as a device: lanes are threads, an operator is one-thread or wide, and everything is measured in a killable process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autosched.core.program import Program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.variants import WHOLE
from autosched.device.cpu_session import CpuSession, new_worker
from autosched.device.early import EarlyWorker
from autosched.device.host import physical_cores, whole_widths, widths_within
from autosched.runtime.host_key import cpu_device_key, software_key

if TYPE_CHECKING:
    import torch


class CpuDevice(EarlyWorker):
    """See ``base.Device``.

    Args:
        seed: of the inputs that timings use, and of the order of measurements.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        # Both now: a job goes by the cores that there were when it began.
        self._cores, self._key = physical_cores(), cpu_device_key()
        super().__init__(new_worker)

    @property
    def key(self) -> DeviceKey:
        """The key that a loader on this machine computes too: processor model, usable cores, vector instructions, caches."""
        return self._key

    @property
    def software(self) -> SoftwareKey:
        """As a loader computes it."""
        return software_key()

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths worth measuring: powers of two up to the physical cores, and all of them."""
        return widths_within(self._cores)

    def open(self, program: Program, constants: Mapping[int, torch.Tensor], *, timeout_s: float) -> CpuSession:
        """As ``base.Device.open``. Nothing starts before the first request; a CPU is never missing."""
        return CpuSession(
            program,
            constants,
            timeout_s=timeout_s,
            max_lanes=self._cores,
            widths=whole_widths(self._cores) if program.lowering in WHOLE else self.widths,
            seed=self._seed,
            worker=self.take_early(timeout_s),
        )
