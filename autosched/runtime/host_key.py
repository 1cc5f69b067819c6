"""What this machine is, as keys that bundles and records carry: the processor, the versions, and the settings that change numerics."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch

import autosched
from autosched.config import cpu_environment
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.runtime.cores import usable_cores
from autosched.runtime.cuda.switches import attention_kernels, depthwise_kernel, half_precision, products_library
from autosched.runtime.float32 import convolutions_rounded, cpu_roundings, matmul_precision, round_convolutions, set_cpu_roundings
from autosched.runtime.kept_memory import memory_kept
from autosched.runtime.native.build import engine_here

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


LOW_PRECISION = "low_precision"
"""The detail of a CPU's key that bundles have since PyTorch was first run on a processor with instructions for matrices."""

# What oneDNN and Inductor choose kernels by, beside the width of vectors; as ``torch.cpu.get_capabilities`` names them.
_FOR_PRODUCTS = (
    "amx_bf16", "amx_fp16", "amx_int8", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_ne_convert", "avx_vnni", "avx_vnni_int8",
    "bf16", "dot", "fp16_arith", "i8mm", "sve_bf16", "sme", "sme2",
)  # fmt: skip

# By the numbers of their designer and of the design. One that is not here is called by its numbers.
_ARM_CORES = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x41", "0xd85"): "Cortex-X925",
    ("0x41", "0xd87"): "Cortex-A725",
    ("0x41", "0xd8e"): "Neoverse-N3",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}


def cpu_device_key() -> DeviceKey:
    """The processor as a schedule sees it: model, usable cores, vector instructions, cache sizes, instructions for products in few bits.

    Usable cores are what the affinity mask and the container's quota leave, not what the machine has: a schedule tuned for
    eight cores is a different one on two. Virtual machines give processors of several generations one name, so what decides which kernels
    are chosen is named too.
    """
    # Which cores are usable may change as long as the process lives: a server's processes are pinned after they were forked.
    return _key_with_cores(usable_cores())


@lru_cache(maxsize=1)
def processor_digest() -> str:
    """Of what is known of the processor, however many of its cores this process may use: what is compiled for it depends on that.

    More than schedules ask for: of two machines with one cache folder and one key, a hypervisor may have taken some instructions from one.
    """
    key = cpu_device_key()
    instructions = sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)
    known = key.name, [item for item in key.details if item[0] != "cores"], instructions
    return hashlib.sha256(msgspec.json.encode(known)).hexdigest()


@lru_cache
def _key_with_cores(cores: int) -> DeviceKey:
    details = {
        "architecture": platform.machine(),
        "cores": str(cores),
        "vector": str(torch.backends.cpu.get_cpu_capability()),
        **{f"cache_{level}": size for level, size in _cache_sizes().items()},
        **({LOW_PRECISION: found} if (found := " ".join(_low_precision())) else {}),
    }
    return DeviceKey("cpu", _processor_name(), tuple(sorted(details.items())))


def software_key() -> SoftwareKey:
    """Versions that decide which kernels run on a CPU, what they compute, and how fast: what runs the lanes, and whether memory is kept."""
    return compiler_key().on(engine_here()).keeping_memory(memory_kept())


def compiler_key() -> SoftwareKey:
    """What of it compiled code depends on."""
    versions = {
        "autosched": autosched.__version__,
        "torch": str(torch.__version__),
        "torch_git": str(torch.version.git_version),
        "mkldnn": "yes" if torch.backends.mkldnn.is_available() else "no",  # type: ignore[no-untyped-call]
        "mkl": "yes" if torch.backends.mkl.is_available() else "no",  # type: ignore[no-untyped-call]
        "openmp": "yes" if torch.backends.openmp.is_available() else "no",  # type: ignore[no-untyped-call]
        "system": sys.platform,
        **dict(cpu_environment()),
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
        settings.update(cpu_roundings())
    if kind == "cuda":
        settings["cudnn_benchmark"] = str(torch.backends.cudnn.benchmark)
        settings["cudnn_tf32"] = str(convolutions_rounded())
        settings["attention"] = ", ".join(attention_kernels())
        settings["half_precision"] = ", ".join(half_precision())
        if depthwise_kernel():
            settings["depthwise_kernel"] = depthwise_kernel()
        if products_library():
            settings["products_library"] = products_library()
    return tuple(sorted(settings.items()))


def apply_numerics(numerics: Sequence[tuple[str, str]]) -> None:
    """Set those of another process's :func:`numerics_key` that a process can simply set; what stays different shows in its own."""
    wanted = dict(numerics)
    torch.set_default_dtype(getattr(torch, wanted["default_dtype"]))
    torch.use_deterministic_algorithms(wanted["deterministic"] == "True")
    torch.set_float32_matmul_precision(wanted["float32_matmul_precision"])
    backends: Any = torch.backends
    if "mkldnn_enabled" in wanted:
        backends.mkldnn.enabled = wanted["mkldnn_enabled"] == "True"
        set_cpu_roundings(wanted)
    if "cudnn_benchmark" in wanted:
        backends.cudnn.benchmark = wanted["cudnn_benchmark"] == "True"
        round_convolutions(allowed=wanted["cudnn_tf32"] == "True")


def _processor_name() -> str:
    try:
        fields = [tuple(part.strip() for part in line.partition(":")[::2]) for line in _CPUINFO.read_text().splitlines()]
    except OSError:
        fields = []
    named = next((value for field, value in fields if field == "model name"), "")
    return named or _arm_cores(fields) or platform.processor() or platform.machine() or "unknown"


def _arm_cores(fields: Sequence[tuple[str, ...]]) -> str:
    """Names of the kinds of cores, for which Linux has two numbers each on AArch64, and no name; empty where it says nothing of the sort.

    One of another kind is another processor: without this all of them would be ``aarch64``, and code for one may end on an instruction
    that another has not.
    """
    numbers = [value for field, value in fields if field in ("CPU implementer", "CPU part")]
    kinds = {(maker, part) for maker, part in zip(numbers[::2], numbers[1::2], strict=False)}
    return " + ".join(sorted(_ARM_CORES.get((maker, part), f"implementer {maker} part {part}") for maker, part in kinds))


def _low_precision() -> list[str]:
    """Names of the instructions for factors of sixteen and eight bits that PyTorch finds here, sorted."""
    found = torch.cpu.get_capabilities()
    return sorted(name for name in _FOR_PRODUCTS if found.get(name))


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
