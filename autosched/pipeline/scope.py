"""What measurements of one program are valid for: a device with its software and settings, and what ran the lanes of that very program."""

from __future__ import annotations

from autosched.config import openmp_waiting
from autosched.core.records import Engine, SoftwareKey
from autosched.datasets.facts import device_facts
from autosched.datasets.journal import Scope
from autosched.datasets.schema import ScopeRow
from autosched.device.base import Device, Limits
from autosched.device.replay import ReplayDevice
from autosched.runtime.host_key import numerics_key

_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
# Settings as PyTorch has them unless somebody asks for others. What is missing here is part of every scope that has it.
_USUAL = frozenset(
    {
        ("attention", "cudnn, flash, math, mem_efficient"),
        ("autocast", "False"),
        ("cudnn_benchmark", "False"),
        ("cudnn_tf32", "True"),
        ("default_dtype", "float32"),
        ("deterministic", "False"),
        ("float32_matmul_precision", "highest"),
        # The second where PyTorch tells reductions within a product from those across its parts.
        ("half_precision", ", ".join(_REDUCTIONS)),
        ("half_precision", ", ".join(f"{name}{end}" for name in _REDUCTIONS for end in ("", "_split_k"))),
        ("mkldnn_enabled", "True"),
    }
)


def scope_of(device: Device, limits: Limits) -> Scope:
    """The scope of what a session with these ``limits`` measures.

    A program with an operator that native lanes do not take runs on lanes of Python, also where all others do without: its times are no
    other's, and no longer its own once native lanes take it.
    """
    software = software_of(device)
    if device.key.kind == "cpu":
        software = software.on(Engine.NATIVE if limits.native_lanes else Engine.PYTHON)
    return Scope(device.key, software)


def software_of(device: Device) -> SoftwareKey:
    """The device's software with the settings of this process, said only where they are not the usual ones: old keys stay known.

    Settings that let PyTorch round, or choose other kernels, change times, and so does on a CPU how threads wait. What a replayed device
    was measured under, its software says.
    """
    if isinstance(device, ReplayDevice):
        return device.software
    unusual = set(numerics_key(device.key.kind)) - _USUAL
    if device.key.kind == "cpu":
        unusual.update(openmp_waiting())
    return SoftwareKey(tuple(sorted({*device.software.versions, *unusual})))


def scope_row(device: Device, limits: Limits) -> ScopeRow:
    """The same, as a row of a store."""
    scope = scope_of(device, limits)
    return ScopeRow(scope.digest, scope.device, scope.software, device_facts(scope.device))
