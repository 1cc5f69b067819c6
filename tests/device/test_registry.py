"""Devices by name: what a plugin brings is looked at before a job begins."""

from __future__ import annotations

import pytest

from autosched.core.errors import UsageError
from autosched.device.registry import DEVICES, device_named


class Half:
    """Has a key, and raises when it is asked for it; cannot be opened."""

    @property
    def key(self) -> object:
        raise AssertionError("asked")


def test_a_plugin_that_is_no_device_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES._places, "half", f"{__name__}:Half")
    with pytest.raises(UsageError, match=r"'half' is a Half without open, software.*device\.base\.Device"):
        device_named("half")


def test_the_cpu_is_a_device() -> None:
    assert device_named("cpu").key.kind == "cpu"
