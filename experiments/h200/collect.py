"""The data set of an H200: operators, pairs in both orders, groups and schedules of the suite, in calls that each end within nine minutes.

    python experiments/h200/collect.py                   # what is still open, as far as nine minutes go
    python experiments/h200/collect.py timm:hrnet_w18 --deadline 520
    python experiments/h200/collect.py --smoke           # the CPU, one tiny model; its figures mean nothing

Aims: 500 unique operators, 5,000 pairs of them in both start orders, groups of three and four, repeats for the noise floor. Writes
``datasets/data/h200/`` and begins from what is there, so calling it again goes on. Exit status: 0 the aims are reached, 10 something is
left for the next call. ``experiments/h200/costmodel.py`` makes the tables.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.core.scratch import Scratch  # noqa: E402
from autosched.datasets.store import Store  # noqa: E402
from autosched.device.registry import device_named  # noqa: E402
from autosched.pipeline.collecting import Aims  # noqa: E402
from experiments.costmodel.collect import SUITE, measure, report  # noqa: E402
from experiments.costmodel.shipping import DATA, resume  # noqa: E402

MODELS = (*SUITE, "timm:nasnetalarge", "torchvision:densenet201")
# 5,000 pairs in both orders over the models, probes first; small graphs allow fewer, so the others get more.
AIMS = Aims(pairs=1000, groups=40, schedules=16, probes=True)
LEFT = 10
_SPARE_S = 20.0


def open_first(models: list[str], work: Path) -> list[str]:
    """The models with fewest pairs first: a call that ends early must not always measure the same ones."""
    if not (work / "pairs").is_dir():
        return models
    counts = Counter(row.model for row in Store.open(work).pairs())
    return sorted(models, key=lambda name: counts[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--deadline", type=float, default=520.0, help="seconds this call may take")
    parser.add_argument("--work", type=Path, default=ROOT / ".autosched" / "runs" / "h200")
    parser.add_argument("--out", type=Path, default=DATA / "h200")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    models, device, aims = options.models or list(MODELS), "cuda", AIMS
    if options.smoke:
        scratch = Scratch()
        models, device, aims = ["autosched:toy"], "cpu", Aims(8, 2, 3, probes=True)
        options.deadline, options.work, options.out = 30.0, scratch.path / "work", scratch.path / "data"
    opened = device_named(device)
    resume(options.work, options.out)
    budget_s = options.deadline - _SPARE_S - (time.monotonic() - began)
    models = open_first(models, options.work)
    unfinished, result = measure(
        models, options.work, device=device, budget_s=budget_s, aims=aims, seed=options.seed, keep_disturbed=options.smoke
    )
    report(options.work, options.out, opened, result, unfinished, models=models, seed=options.seed, rehearsal=options.smoke)
    return LEFT if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
