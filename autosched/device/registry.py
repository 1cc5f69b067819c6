"""Which devices there are, by name."""

from __future__ import annotations

import re
from typing import Any

from autosched.core.errors import DeviceError, DeviceMissing, UnknownName, UsageError
from autosched.core.records import DeviceKey
from autosched.core.registry import Registry
from autosched.device.base import Device, OneOfSeveral

DEVICES: Registry[type[Device]] = Registry("device", "autosched.runners")
DEVICES.add("cpu", "autosched.device.cpu:CpuDevice")
DEVICES.add("cuda", "autosched.device.cuda.device:CudaDevice")

AUTO = "auto"
_MOST = 64  # of one kind, where the one that would say how many there are cannot be used
# As PyTorch writes it: no sign, no leading zero.
_NUMBERED = re.compile(r"([^:]+):(0|[1-9][0-9]{0,3})")


def device_named(name: str) -> Device:
    """The device called ``name``, such as ``cpu``, ``cuda`` or ``cuda:1``; ``auto`` is CUDA where there is a GPU, else the CPU.

    Raises:
        UnknownName: listing the known names.
        DeviceMissing: if this machine does not have it.
        UsageError: if this machine has fewer of that kind, or what a plugin brings is no device.
    """
    resolved = resolve_auto(name)
    numbered = _NUMBERED.fullmatch(resolved)
    kind = numbered[1] if numbered is not None else resolved
    if kind not in DEVICES.names() or (numbered is not None and not hasattr(DEVICES.get(kind), "index")):
        names = ["cuda (or cuda:N, one of several GPUs)" if item == "cuda" else item for item in DEVICES.names()]
        raise UnknownName(f"unknown device {name!r}; expected {', '.join([*names, AUTO])}, or replay:DIR for recorded runs")
    make: Any = DEVICES.get(kind)
    made: Device = make(index=int(numbered[2])) if numbered is not None else make()
    # Not by asking for them: a device that is not there may raise.
    if missing := sorted({"key", "software", "open"} - set(dir(made))):
        raise UsageError(
            f"device {resolved!r} is a {type(made).__name__} without {', '.join(missing)}; "
            "expected what autosched.device.base.Device describes"
        )
    return made


def device_like(key: DeviceKey, name: str = AUTO) -> Device:
    """The device called ``name``; for ``auto`` the first on this machine whose key is ``key``, else the first of its kind.

    Raises:
        UnknownName, DeviceMissing, UsageError: as :func:`device_named`.
    """
    if name != AUTO:
        return device_named(name)
    try:
        first = device_named(key.kind)
    except DeviceMissing:
        raise
    except DeviceError:  # this one cannot be used; another may
        if (other := _numbered_like(key, _MOST)) is None:
            raise
        return other
    if first.key == key:
        return first
    return _numbered_like(key, first.count if isinstance(first, OneOfSeveral) else 0) or first


def _numbered_like(key: DeviceKey, most: int) -> Device | None:
    """Of ``most`` devices of a kind at the most, the first one whose key is ``key`` and that can be used."""
    for index in range(most):
        try:
            device = device_named(f"{key.kind}:{index}")
        except (UsageError, DeviceMissing):  # there are no more, or there is but one of this kind
            return None
        except DeviceError:
            continue
        if device.key == key:
            return device
    return None


def index_of(device: Device) -> int | None:
    """Which of several ``device`` is; ``None`` where there is but one of its kind."""
    return device.index if isinstance(device, OneOfSeveral) else None


def place_of(device: Device) -> str:
    """``device`` as PyTorch names it: ``cpu``, ``cuda:1``."""
    index = index_of(device)
    return device.key.kind if index is None else f"{device.key.kind}:{index}"


def resolve_auto(name: str) -> str:
    """``name``, or what ``auto`` means on this machine."""
    if name != AUTO:
        return name
    import torch

    # Asks the driver only; creates no context in this process.
    return "cuda" if torch.cuda.is_available() else "cpu"
