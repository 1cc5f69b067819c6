"""The cost model on a GPU's runs: held-out-family errors, intervals, composition, whole schedules, learning curve.

    python experiments/h200/costmodel.py                 # of each GPU: datasets/data/h100 -> results/h100/{train.txt,costmodel.json}
    python experiments/h200/costmodel.py --device h200   # of one
    python experiments/h200/costmodel.py --smoke         # a small simulated store; its figures mean nothing

The same code as for the CPU, see ``experiments/costmodel/held_out.py``; the trained model is kept beside the runs, where it ships.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.costmodel import stores  # noqa: E402
from experiments.costmodel.held_out import main  # noqa: E402


def each_gpu(given: list[str]) -> int:
    """``held_out.main`` for every GPU whose runs are committed, or as ``given`` says."""
    if {"--smoke", "--device"} & set(given):
        return main(given if "--smoke" in given else ["--keep", *given])
    # Where there are none yet, what is called says so.
    gpus = [place.name for place in stores.recorded_stores() if not place.name.startswith("cpu")] or ["cuda"]
    return max(main(["--device", gpu, "--keep", *given]) for gpu in gpus)


if __name__ == "__main__":
    sys.exit(each_gpu(sys.argv[1:]))
