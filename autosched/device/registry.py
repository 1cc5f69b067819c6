"""Which devices there are, by name."""

from __future__ import annotations

from autosched.core.errors import UnknownName, UsageError
from autosched.core.registry import Registry
from autosched.device.base import Device

DEVICES: Registry[type[Device]] = Registry("device", "autosched.runners")
DEVICES.add("cpu", "autosched.device.cpu:CpuDevice")
DEVICES.add("cuda", "autosched.device.cuda.device:CudaDevice")


def device_named(name: str) -> Device:
    """The device called ``name``; ``auto`` is CUDA where there is a GPU, else the CPU.

    Raises:
        UnknownName: listing the known names.
        DeviceMissing: if this machine does not have it.
        UsageError: if what a plugin brings is no device.
    """
    resolved = resolve_auto(name)
    if resolved not in DEVICES.names():
        index = "; a GPU is chosen by the variable CUDA_VISIBLE_DEVICES" if resolved.startswith("cuda:") else ""
        known = ", ".join([*DEVICES.names(), "auto"])
        raise UnknownName(f"unknown device {name!r}; expected {known}, or replay:DIR for recorded runs{index}")
    made = DEVICES.get(resolved)()
    # Not by asking for them: a device that is not there may raise.
    if missing := sorted({"key", "software", "open"} - set(dir(made))):
        raise UsageError(
            f"device {resolved!r} is a {type(made).__name__} without {', '.join(missing)}; "
            "expected what autosched.device.base.Device describes"
        )
    return made


def resolve_auto(name: str) -> str:
    """``name``, or what ``auto`` means on this machine."""
    if name != "auto":
        return name
    import torch

    # Asks the driver only; creates no context in this process.
    return "cuda" if torch.cuda.is_available() else "cpu"
