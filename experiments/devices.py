"""Where figures come from: the folder of a device's, so that none stands in another's place, and the commit they were taken at."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.core.records import DeviceKey  # noqa: E402

# By the name that the driver gives: a part of one (a slice by MIG), or another board of the same chip, is another device.
_SHORT = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}


def folder_name(key: DeviceKey) -> str:
    """``<kind>_<short name>_<cores>``; just ``h100`` and ``h200`` for those two."""
    if key.name in _SHORT:
        return _SHORT[key.name]
    unmarked = re.sub(r"\((r|tm)\)", "", title(key).lower())
    name = re.sub(r"[^a-z0-9]+", "_", unmarked).strip("_")
    return "_".join(part for part in (key.kind, name, dict(key.details).get("cores", "")) if part)


def title(key: DeviceKey) -> str:
    """The device's name for people.

    Virtual machines give processors of several generations, the fastest twice as fast as the slowest, one name that has no number in it
    (``AMD EPYC``): their vectors and their first cache tell them apart.
    """
    details = dict(key.details)
    apart = [details[each] for each in ("vector", "cache_l1") if each in details]
    return f"{key.name} ({', '.join(apart)})" if key.kind == "cpu" and apart and not re.search(r"\d", key.name) else key.name


def key_of(device: str) -> DeviceKey:
    """The key of this machine's ``cpu`` or ``cuda``."""
    if device == "cuda":
        from autosched.runtime.cuda.key import cuda_device_key

        return cuda_device_key()
    from autosched.runtime.host_key import cpu_device_key

    return cpu_device_key()


def results_of(device: str) -> Path:
    """Where figures taken on this machine's ``cpu`` or ``cuda`` lie: ``results/<folder>``, so that none stands in another's place."""
    return RESULTS / folder_name(key_of(device))


def commit() -> str:
    """What the file ``COMMIT`` at the top of this checkout says, else its commit; empty if neither is there.

    A checkout may be copied over an older one that has a history.
    """
    stated = ROOT / "COMMIT"
    if stated.is_file():
        return stated.read_text(encoding="utf-8").strip()
    # A checkout that was copied belongs to another user, whom git would not trust.
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    return done.stdout.strip() if done is not None and done.returncode == 0 else ""
