"""What this machine is, as keys that bundles and records carry: the processor, the versions, and the settings that change numerics."""

from __future__ import annotations

import os
import platform
import sys
from functools import lru_cache
from pathlib import Path

import torch

import autosched
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.runtime.cpu_quota import quota_cores
from autosched.runtime.cuda_switches import attention_kernels, half_precision
from autosched.runtime.float32 import convolutions_rounded, matmul_precision

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@lru_cache(maxsize=1)
def cpu_device_key() -> DeviceKey:
    """The processor as a schedule sees it: model, usable cores, vector instructions, cache sizes.

    Usable cores are what the affinity mask and the container's quota leave, not what the machine has: a schedule tuned for
    eight cores is a different one on two.
    """
    details = {
        "architecture": platform.machine(),
        "cores": str(usable_cores()),
        "vector": str(torch.backends.cpu.get_cpu_capability()),
        **{f"cache_{level}": size for level, size in _cache_sizes().items()},
    }
    return DeviceKey("cpu", _processor_name(), tuple(sorted(details.items())))


def software_key() -> SoftwareKey:
    """Versions that decide which kernels run on a CPU and what they compute."""
    versions = {
        "autosched": autosched.__version__,
        "torch": str(torch.__version__),
        "torch_git": str(torch.version.git_version),
        "mkldnn": "yes" if torch.backends.mkldnn.is_available() else "no",  # type: ignore[no-untyped-call]
        "mkl": "yes" if torch.backends.mkl.is_available() else "no",  # type: ignore[no-untyped-call]
        "openmp": "yes" if torch.backends.openmp.is_available() else "no",  # type: ignore[no-untyped-call]
        "system": sys.platform,
    }
    return SoftwareKey(tuple(sorted(versions.items())))


def numerics_key(kind: str = "cpu") -> tuple[tuple[str, str], ...]:
    """Process-wide settings that change what operators compute, as sorted ``(name, value)`` pairs.

    Args:
        kind: device kind; settings that only matter on CUDA are left out elsewhere.
    """
    settings = {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "float32_matmul_precision": matmul_precision(kind),
    }
    if kind in ("cpu", "cuda"):
        settings["autocast"] = str(torch.is_autocast_enabled(kind))
    if kind == "cpu":
        settings["mkldnn_enabled"] = str(bool(torch.backends.mkldnn.enabled))
    if kind == "cuda":
        settings["cudnn_benchmark"] = str(torch.backends.cudnn.benchmark)
        settings["cudnn_tf32"] = str(convolutions_rounded())
        settings["attention"] = ", ".join(attention_kernels())
        settings["half_precision"] = ", ".join(half_precision())
    return tuple(sorted(settings.items()))


def usable_cores() -> int:
    """Cores this process may really use: the smaller of its affinity mask and its container's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = quota_cores()
    return max(1, cores if quota is None else min(cores, int(quota)))


def _processor_name() -> str:
    try:
        for line in _CPUINFO.read_text().splitlines():
            field, _, value = line.partition(":")
            if field.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _cache_sizes() -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            found[f"l{level}"] = size
    return found
