"""What measurements of one program are valid for: a device with its software, and what ran the lanes of that very program."""

from __future__ import annotations

from autosched.core.records import Engine
from autosched.datasets.facts import device_facts
from autosched.datasets.journal import Scope
from autosched.datasets.schema import ScopeRow
from autosched.device.base import Device, Limits


def scope_of(device: Device, limits: Limits) -> Scope:
    """The scope of what a session with these ``limits`` measures.

    A program with an operator that native lanes do not take runs on lanes of Python, also where all others do without: its times are no
    other's, and no longer its own once native lanes take it.
    """
    software = device.software
    if device.key.kind == "cpu":
        software = software.on(Engine.NATIVE if limits.native_lanes else Engine.PYTHON)
    return Scope(device.key, software)


def scope_row(device: Device, limits: Limits) -> ScopeRow:
    """The same, as a row of a store."""
    scope = scope_of(device, limits)
    return ScopeRow(scope.digest, scope.device, scope.software, device_facts(scope.device))
