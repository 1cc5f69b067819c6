"""What a machine with a GPU is like before anything is measured on it: what starting takes, how its clock rises, how much room there is,
and whether its convolutions give the same bits each time.

    python experiments/h200/machine.py --out DIR       # writes DIR/machine.json; fails where no GPU answers

Limits and waiting times of autosched were set without a GPU; these are the figures to set them by. A schedule is proved by its bits, so
where convolutions do not repeat theirs, no proof can succeed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.runtime.cuda.key import pci_bus_id  # noqa: E402
from experiments.calls import write_json  # noqa: E402
from experiments.devices import commit  # noqa: E402

_RAMP_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SPIN_CYCLES = 2_000_000
_PACKAGES = ("cuda-bindings", "triton", "nvidia-cudnn-cu13")
# Of GoogLeNet: channels in and out, size of the image, of the kernel, and its step.
_CONVOLUTIONS = (
    (3, 64, 224, 7, 2), (64, 192, 56, 3, 1), (192, 64, 28, 1, 1), (96, 128, 28, 3, 1), (16, 32, 28, 3, 1), (160, 320, 14, 3, 1),
    (832, 384, 7, 1, 1),
)  # fmt: skip
_TIMES = 5


def room() -> dict[str, Any]:
    """Memory, shared memory and disk in GiB, files that may be open, cores. Some machines are given memory only as they use it."""
    found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[f"{name}_gib"] = round(int(amount.split()[0]) / 2**20, 1)
    for name, place in (("shared_memory", "/dev/shm"), ("temporary", tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(place)
            found[f"{name}_gib"] = {"total": round(usage.total / 2**30, 1), "free": round(usage.free / 2**30, 1)}
    return found


def clock_reader() -> Callable[[], int | None]:
    """Reads the clock of the multiprocessors of PyTorch's first GPU, MHz; ``None`` where NVML does not tell."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id(0))
    except Exception:  # NVML has an error of its own for every way a machine can lack it
        return lambda: None

    def read() -> int | None:
        with contextlib.suppress(Exception):
            return int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        return None

    return read


def timed(steps: dict[str, float], name: str, step: Callable[[], Any]) -> Any:
    """What ``step`` returns; how long it took goes to ``steps``, in seconds."""
    begin = time.perf_counter()
    made = step()
    steps[name] = round(time.perf_counter() - begin, 3)
    return made


def ramp(torch: Any, clock: Callable[[], int | None]) -> list[dict[str, Any]]:
    """The clock so long after work began on an idle device, and how long one and the same count of cycles took then."""
    time.sleep(1.0)
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for wanted_s in _RAMP_S:
        while True:
            spin = time.perf_counter()
            torch.cuda._sleep(_SPIN_CYCLES)
            torch.cuda.synchronize()
            spin_us = 1e6 * (time.perf_counter() - spin)
            if (after_s := time.perf_counter() - begin) >= wanted_s:
                break
        rows.append({"after_s": round(after_s, 3), "clock_mhz": clock(), "cycles": _SPIN_CYCLES, "took_us": round(spin_us)})
    return rows


def versions() -> dict[str, str]:
    """Of packages that decide what can be had of a graph; empty where one is missing."""
    found = dict.fromkeys(_PACKAGES, "")
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def differing(runs: Mapping[str, Callable[[], Any]]) -> list[str]:
    """Names of ``runs`` that do not return a tensor of the same bits each time; all are run in turns, as in a model."""
    first = {name: run() for name, run in runs.items()}
    again = [(name, run()) for _ in range(_TIMES - 1) for name, run in runs.items()]
    # What is not a number equals nothing; none of these has any.
    return sorted({name for name, made in again if not made.equal(first[name])})


def convolutions(torch: Any, device: str = "cuda") -> dict[str, Any]:
    """Whether GoogLeNet's repeat their bits, in the dtypes that models are measured in."""
    generator = torch.Generator().manual_seed(0)

    def random_of(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    runs: dict[str, Callable[[], Any]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for inner, outer, size, kernel, step in _CONVOLUTIONS:
            image, weight = random_of(1, inner, size, size).to(device, dtype), random_of(outer, inner, kernel, kernel).to(device, dtype)
            run = functools.partial(torch.conv2d, image, weight, stride=step, padding=kernel // 2)
            runs[f"{dtype} {inner} to {outer}, {size}, {kernel} by {kernel}"] = run
    names = differing(runs)
    return {
        "cudnn": torch.backends.cudnn.version(),
        "tried": len(runs),
        "times": _TIMES,
        "repeat_their_bits": not names,
        "differing": names,
    }


def told(look: Callable[[], Any]) -> Any:
    """What ``look`` finds, or how it failed: everything else runs only where this command ends well, and needs no figure of it."""
    try:
        return look()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for machine.json")
    parser.add_argument("--smoke", action="store_true", help="no GPU: the machine alone")
    arguments = parser.parse_args()
    steps: dict[str, float] = {}
    torch: Any = timed(steps, "import_torch_s", lambda: importlib.import_module("torch"))
    clock = clock_reader()
    found: dict[str, Any] = {"commit": commit(), "room": told(room), "idle_clock_mhz": clock()}
    if not arguments.smoke:
        found |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda, "packages": told(versions)}
        timed(steps, "context_s", lambda: torch.ones(1, device="cuda").item())
        square = torch.ones((256, 256), device="cuda")
        image = torch.ones((1, 64, 56, 56), device="cuda")
        for name in ("first", "second"):
            timed(steps, f"{name}_product_s", lambda: (square @ square).sum().item())
            timed(steps, f"{name}_convolution_s", lambda: torch.conv2d(image, image[:, :, :3, :3].expand(64, 64, 3, 3)).sum().item())
        found["convolutions"] = timed(steps, "convolutions_s", lambda: told(lambda: convolutions(torch)))
        found |= {"free_bytes": told(lambda: torch.cuda.mem_get_info()[0]), "ramp": told(lambda: ramp(torch, clock))}
    found |= {"steps": steps, "room_after": told(room)}
    write_json(arguments.out / "machine.json", found)
    own = ("steps", "ramp", "packages", "convolutions")
    print(", ".join(f"{name} {value}" for name, value in {**found, **steps}.items() if name not in own))
    # A line each: whoever shows the end of a log may cut what is long.
    for name in own[2:]:
        print(f"{name}: {found.get(name, 'not asked')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
