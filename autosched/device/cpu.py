"""The CPU as a device: lanes are threads, an operator is one-thread or wide, and everything is measured in a killable process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autosched.core.program import Program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.device.cpu_session import CpuSession
from autosched.device.host import host_facts

if TYPE_CHECKING:
    import torch

# Rises when what a record of this device means changes.
CPU_SCHEMA = 1


class CpuDevice:
    """See ``base.Device``.

    Args:
        seed: of the inputs that timings use, and of the order of measurements.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._facts = host_facts()

    @property
    def key(self) -> DeviceKey:
        """Processor model, architecture, usable physical cores, caches and memory (rounded down to GiB)."""
        facts = self._facts
        details = {
            "architecture": facts.architecture,
            "cores": str(facts.cores),
            "memory_gib": str(facts.memory_bytes >> 30),
            **{f"cache_{name}_bytes": str(size) for name, size in facts.caches_bytes},
        }
        return DeviceKey("cpu", facts.name, tuple(sorted(details.items())))

    @property
    def software(self) -> SoftwareKey:
        """Versions of PyTorch and Python, the libraries PyTorch was built with, and the schema of our records."""
        import torch

        versions = {
            "torch": str(torch.__version__),
            "torch_git": str(torch.version.git_version or "unknown"),
            "python": ".".join(str(part) for part in sys.version_info[:3]),
            "mkldnn": str(torch.backends.mkldnn.is_available()),  # type: ignore[no-untyped-call]
            "mkl": str(torch.backends.mkl.is_available()),  # type: ignore[no-untyped-call]
            "openmp": str(torch.backends.openmp.is_available()),  # type: ignore[no-untyped-call]
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "autosched_cpu_schema": str(CPU_SCHEMA),
        }
        return SoftwareKey(tuple(sorted(versions.items())))

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths worth measuring: powers of two up to the cores, and all cores."""
        cores = self._facts.cores
        return tuple(sorted({1 << power for power in range(cores.bit_length()) if 1 << power <= cores} | {cores}))

    def open(self, program: Program, constants: Mapping[int, torch.Tensor], *, timeout_s: float) -> CpuSession:
        """As ``base.Device.open``. Nothing starts before the first request; a CPU is never missing."""
        return CpuSession(program, constants, timeout_s=timeout_s, max_lanes=self._facts.cores, widths=self.widths, seed=self._seed)
