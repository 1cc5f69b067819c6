"""Runs a command on the emulated device: ``python run.py [--memory-gib 32] [--values zeros] -- python -m pytest -m gpu tests/gpu``.

The libraries are preloaded, because PyTorch finds the real ones by an RPATH, which wins over ``LD_LIBRARY_PATH``; a preloaded library whose
name matches satisfies it. Child processes inherit this.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also under PYTHONSAFEPATH

from build import LIBRARIES, BuildError, build, default_output

DEVICES = ("h200", "h100", "a100", "l4", "rtx4090")


def environment(
    folder: str, memory_gib: float, values: str, device: str = DEVICES[0], count: int = 1, *, late: bool = False
) -> dict[str, str]:
    """What the command runs with; ``values``: ``all`` or ``zeros``."""
    changed = dict(os.environ)
    changed["LD_PRELOAD"] = ":".join(f"{folder}/{name}" for name in LIBRARIES)
    changed["EMULATED_CUDA_MEMORY_BYTES"] = str(int(memory_gib * 2**30))
    changed["TRITON_LIBCUDA_PATH"] = folder
    changed.setdefault("OMP_NUM_THREADS", "1")  # the values are computed by small CPU operators
    changed["EMULATED_CUDA_VALUES"] = values
    changed["EMULATED_CUDA_DEVICE"], changed["EMULATED_CUDA_DEVICES"] = device, str(count)
    changed.pop("EMULATED_CUDA_LATE", None)
    if late:
        changed["EMULATED_CUDA_LATE"] = "1"
    site = str(Path(__file__).resolve().parent / "site")
    changed["PYTHONPATH"] = os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])
    return changed


def main() -> int:
    """Build what is not built, then become the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-gib", type=float, default=32.0, help="memory of the device")
    parser.add_argument(
        "--values", choices=("all", "zeros"), default="all", help="zeros: nothing is computed, all memory of the device stays zero"
    )
    parser.add_argument("--device", default=DEVICES[0], help=f"which GPU's properties it has: {', '.join(DEVICES)}; or several, as h200,l4")
    parser.add_argument("--devices", type=int, help="how many there are; by default as many as --device names")
    parser.add_argument("--no-values", dest="values", action="store_const", const="zeros", help="the same as --values zeros")
    parser.add_argument("--late", action="store_true", help="what is enqueued happens when something waits for it, and no sooner")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    arguments = parser.parse_args()
    command = [word for position, word in enumerate(arguments.command) if position or word != "--"]
    named = arguments.device.split(",")
    if unknown := set(named) - set(DEVICES):
        parser.error(f"--device {sorted(unknown)[0]}; expected some of {', '.join(DEVICES)}")
    if not command:
        parser.error("no command; for example: -- python -c 'import torch; print(torch.cuda.get_device_name())'")
    try:
        folder = build(default_output())
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    count = arguments.devices or len(named)
    os.execvpe(
        command[0], command, environment(str(folder), arguments.memory_gib, arguments.values, arguments.device, count, late=arguments.late)
    )


if __name__ == "__main__":
    raise SystemExit(main())
