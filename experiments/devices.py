"""What the folder of a device's figures and runs is called, so that none stands in another's place."""

from __future__ import annotations

import re
import sys
from pathlib import Path

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from autosched.core.records import DeviceKey

# By the name that the driver gives: a part of one (a slice by MIG), or another board of the same chip, is another device.
_SHORT = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}


def folder_name(key: DeviceKey) -> str:
    """``<kind>_<short name>_<cores>``; just ``h100`` and ``h200`` for those two."""
    if key.name in _SHORT:
        return _SHORT[key.name]
    name = re.sub(r"[^a-z0-9]+", "_", key.name.lower()).strip("_")
    return "_".join(part for part in (key.kind, name, dict(key.details).get("cores", "")) if part)
