"""What a GPU is, as keys that bundles and records carry; read from the driver without creating a context.

The process that tunes must never own a context, and a server must know whether a bundle fits before it makes one.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autosched.config import cuda_environment
from autosched.core.errors import DeviceError, DeviceMissing, UsageError
from autosched.core.records import DeviceKey, SoftwareKey

# Rises when what a record of a CUDA device means changes.
CUDA_SCHEMA = 2

# CUdevice_attribute numbers, from the CUDA driver's header.
_ATTRIBUTES = {
    "sm_count": 16,
    "integrated": 18,
    "ecc": 32,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "threads_per_sm": 39,
    "compute_major": 75,
    "compute_minor": 76,
    "shared_bytes_per_sm": 81,
    "registers_per_sm": 82,
}


_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: also where CUDA_VISIBLE_DEVICES hides all of them
_CLOCK_KHZ = 13  # an attribute too, and no part of a device key: it only says how long a kernel that counts cycles takes
_FASTEST_MHZ = 4000.0

# The functions of Python take a GPU unless they are told otherwise.
_OR_CPU = "or use --device cpu (in Python device='cpu')"


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What a schedule's speed on a GPU depends on. ``attributes`` are ``(name, value)`` as the driver names them."""

    name: str
    memory_bytes: int
    attributes: tuple[tuple[str, int], ...]
    driver: str

    def attribute(self, name: str) -> int:
        """One attribute, 0 if the driver did not tell."""
        return dict(self.attributes).get(name, 0)

    def details(self) -> dict[str, str]:
        """The fields of a device key: compute capability, multiprocessors, caches, memory (in GiB), bus, ECC, MIG, integrated.

        Not the UUID, nor the index: two GPUs of one model are one device to a schedule.
        """
        found = {name: str(value) for name, value in self.attributes if not name.startswith("compute_")}
        found["compute_capability"] = f"{self.attribute('compute_major')}.{self.attribute('compute_minor')}"
        # The last MiBs differ between machines with what the driver keeps for itself.
        found["memory_gib"] = str(round(self.memory_bytes / 2**30))
        found["mig"] = self.name.partition("MIG ")[2] or "none"
        return found


def gpu_count() -> int:
    """How many GPUs the driver shows this process, which ``CUDA_VISIBLE_DEVICES`` may have limited.

    Raises:
        DeviceMissing: if there is no driver, or it does not start.
    """
    library = driver_library()
    count = ctypes.c_int()
    if (code := library.cuInit(0)) == _NO_DEVICE:
        return 0
    if code != 0:
        raise DeviceMissing(f"the NVIDIA driver does not start (cuInit gave {_in_words(library, code)}); check 'nvidia-smi', {_OR_CPU}")
    library.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def _in_words(library: Any, code: int) -> str:
    """An error of the driver, with what it says of it: 'nvidia-smi' knows nothing of a fabric manager that does not run, for example."""
    words = ctypes.c_char_p()
    told = library.cuGetErrorString(code, ctypes.byref(words)) == 0
    return f"error {code}: {words.value.decode(errors='replace')}" if told and words.value else f"error {code}"


@lru_cache(maxsize=64)
def gpu_facts(index: int = 0) -> GpuFacts:
    """Ask the driver about visible GPU ``index``.

    Raises:
        DeviceMissing: saying what is missing (the driver, a GPU, a CUDA build of PyTorch) and what to do.
        DeviceError: if the driver is too old for this PyTorch.
        UsageError: if there are GPUs, but fewer than that.
    """
    library, count = driver_library(), gpu_count()
    if count == 0:
        raise DeviceMissing(f"the NVIDIA driver sees 0 GPUs; expected at least 1. Check CUDA_VISIBLE_DEVICES, {_OR_CPU}")
    if index >= count:
        known = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UsageError(
            f"there is no cuda:{index}: this process sees {count} GPU{'s' if count > 1 else ''}; expected {known}. "
            "'autosched doctor' lists them; CUDA_VISIBLE_DEVICES may hide others."
        )
    handle, total, version = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int()
    name = ctypes.create_string_buffer(128)
    library.cuDeviceGet(ctypes.byref(handle), index)
    library.cuDeviceGetName(name, 128, handle)
    library.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
    library.cuDriverGetVersion(ctypes.byref(version))
    attributes = []
    for field, number in _ATTRIBUTES.items():
        value = ctypes.c_int()
        if library.cuDeviceGetAttribute(ctypes.byref(value), number, handle) == 0:
            attributes.append((field, value.value))
    driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
    found = GpuFacts(name.value.decode(errors="replace"), total.value, tuple(attributes), driver)
    _require_driver(found)
    return found


def _require_driver(found: GpuFacts) -> None:
    """What PyTorch says only when it starts, which is in the measuring process, and only in a warning.

    A driver serves the runtimes of its own major version and of earlier ones (CUDA Compatibility, minor version compatibility).
    """
    import torch

    built_for = torch.version.cuda
    if built_for is not None and int(found.driver.split(".")[0]) < int(built_for.split(".")[0]):
        raise DeviceError(
            f"{found.name}: its driver is too old for this PyTorch: it is for CUDA {found.driver}, torch {torch.__version__} for CUDA "
            f"{built_for}. Install a newer driver, or a build of torch for CUDA {found.driver} or older, {_OR_CPU}"
        )


def require_kernels(index: int = 0) -> None:
    """Check that this PyTorch has kernels for visible GPU ``index``: newer builds have none for older GPUs.

    Raises:
        DeviceError: if it has none.
        DeviceMissing, UsageError: as :func:`gpu_facts`.
    """
    import torch

    found, least = gpu_facts(index), _least_capability()
    if 0 < 10 * found.attribute("compute_major") + found.attribute("compute_minor") < least:
        raise DeviceError(
            f"{found.name}: torch {torch.__version__} has no kernels for its compute capability of "
            f"{found.attribute('compute_major')}.{found.attribute('compute_minor')}; expected at least {least // 10}.{least % 10}. "
            f"Install a build of torch for an older CUDA, {_OR_CPU}"
        )


def _least_capability() -> int:
    """Ten times the lowest compute capability that this PyTorch has kernels for; 0 if it does not say."""
    import torch

    # As torch.cuda.get_arch_list reads it, which asks for a GPU first.
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)() or ""
    return min((int(number) for number in re.findall(r"\b(?:sm|compute)_([0-9]+)", flags)), default=0)


def pci_bus_id(index: int = 0) -> str:
    """Where visible GPU ``index`` is plugged in, such as ``0000:3b:00.0``: the name by which NVML and CUDA mean the same one.

    Their numbers differ: NVML knows nothing of ``CUDA_VISIBLE_DEVICES``, and CUDA begins with the fastest GPU unless told otherwise. A
    slice of a GPU has its GPU's place.

    Raises:
        DeviceMissing: as :func:`gpu_facts`, or if the driver does not tell.
    """
    gpu_facts(index)
    library, handle = driver_library(), ctypes.c_int()
    place = ctypes.create_string_buffer(32)
    library.cuDeviceGet(ctypes.byref(handle), index)
    if (code := library.cuDeviceGetPCIBusId(place, 32, handle)) != 0:
        raise DeviceMissing(f"the NVIDIA driver does not say where GPU {index} is (error {code}); check 'nvidia-smi', {_OR_CPU}")
    return place.value.decode()


def fastest_clock_mhz(index: int = 0) -> float:
    """The highest clock of the multiprocessors of visible GPU ``index``; where the driver does not tell, one that no GPU reaches.

    Raises:
        DeviceMissing: as :func:`gpu_facts`.
    """
    gpu_facts(index)
    library, handle, value = driver_library(), ctypes.c_int(), ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(handle), index)
    told = library.cuDeviceGetAttribute(ctypes.byref(value), _CLOCK_KHZ, handle) == 0 and value.value > 0
    return value.value / 1e3 if told else _FASTEST_MHZ


def require_cuda_build() -> None:
    """Check the parts that are missing most often, in the order in which they are found missing.

    Raises:
        DeviceMissing: naming the first one.
    """
    import torch

    if torch.version.cuda is None:
        raise DeviceMissing(
            f"torch {torch.__version__} is built without CUDA; install a CUDA build of it (and an NVIDIA driver), "
            f"{_OR_CPU}; 'autosched doctor' says what else is missing"
        )
    gpu_facts()


def driver_library() -> Any:
    """The NVIDIA driver's own library; nothing is started.

    Raises:
        DeviceMissing: if there is none.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DeviceMissing(f"CUDA: there is no NVIDIA driver here ({name} cannot be loaded); install one, {_OR_CPU}") from error


def cuda_device_key(index: int = 0) -> DeviceKey:
    """Name, compute capability, multiprocessors, caches, memory (in GiB), bus width, ECC, MIG, integrated.

    Raises:
        DeviceMissing: as :func:`gpu_facts`.
    """
    found = gpu_facts(index)
    return DeviceKey("cuda", found.name, tuple(sorted(found.details().items())))


def cuda_software_key(index: int = 0) -> SoftwareKey:
    """Versions of PyTorch, the CUDA runtime, cuDNN, Triton and the driver, the variables CUDA reads, and the schema of our records.

    Raises:
        DeviceMissing: as :func:`gpu_facts`.
    """
    import torch

    cudnn: Any = torch.backends.cudnn
    versions = {
        "torch": str(torch.__version__),
        "torch_git": str(torch.version.git_version or "unknown"),
        "cuda_runtime": str(torch.version.cuda),
        "cudnn": str(cudnn.version()),
        "triton": _version("triton"),
        "cuda_driver": gpu_facts(index).driver,
        "python": ".".join(str(part) for part in sys.version_info[:2]),
        "autosched_cuda_schema": str(CUDA_SCHEMA),
        **dict(cuda_environment()),
    }
    return SoftwareKey(tuple(sorted(versions.items())))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
