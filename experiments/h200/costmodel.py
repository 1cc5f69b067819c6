"""The cost model on the H200's runs: held-out-family errors, intervals, composition, whole schedules, learning curve.

    python experiments/h200/costmodel.py             # datasets/data/h200 -> experiments/results/h200/{train.txt,costmodel.json}
    python experiments/h200/costmodel.py --smoke     # a small simulated store; its figures mean nothing

The same code as for the CPU, see ``experiments/costmodel/held_out.py``; the trained model is kept beside the runs, where it ships.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.costmodel.held_out import main  # noqa: E402

if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(given if "--smoke" in given else ["--device", "h200", "--keep", *given]))
