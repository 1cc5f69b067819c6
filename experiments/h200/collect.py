"""The data set of a GPU: operators, pairs in both orders, groups and schedules of the suite, in calls that each end within nine minutes.

    python experiments/h200/collect.py                   # what is still open, as far as nine minutes go
    python experiments/h200/collect.py timm:hrnet_w18 --deadline 520
    python experiments/h200/collect.py --smoke           # the CPU, one tiny model; its figures mean nothing

Aims: 500 unique operators, 5,000 pairs of them in both start orders, groups of three and four, repeats for the noise floor. Writes
a folder of ``datasets/data/`` that is named after the GPU, and begins from what is there, so calling it again goes on; a call
that is ended by force keeps what it measured in ``--work``. Exit status: 0 the aims are reached, 10 something is left for the next call.
``experiments/h200/costmodel.py`` makes the tables.
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
from experiments.calls import LEFT, read_json  # noqa: E402
from experiments.costmodel.collect import SUITE, measure, report  # noqa: E402
from experiments.costmodel.shipping import folder_of, resume  # noqa: E402

MODELS = (*SUITE, "timm:nasnetalarge", "torchvision:densenet201")
# 5,000 pairs in both orders over the models, probes first; small graphs allow fewer, so the others get more.
AIMS = Aims(pairs=1000, groups=40, schedules=16, probes=True)
_SPARE_S = 20.0
# Least seconds for one model: loading it, capturing it and starting its process take a good part of them.
_SHARE_S = 40.0


def done_before(target: Path, asked: list[str]) -> set[str]:
    """Models that reached their aims in earlier calls, as the last one says."""
    said = read_json(target / "about.json")
    if said is None:
        return set()
    return {name for name in asked if name in said["models"] and name not in said["unfinished"]}


def open_first(models: list[str], work: Path, done: set[str]) -> list[str]:
    """The models with fewest pairs first, those that are done last: a call that ends early must not always measure the same ones."""
    counts = Counter(row.model for row in Store.open(work).pairs()) if (work / "pairs").is_dir() else Counter()
    return sorted(models, key=lambda name: (name in done, counts[name]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--deadline", type=float, default=520.0, help="seconds this call may take")
    parser.add_argument("--work", type=Path, default=None, help="where runs gather; default: .autosched/runs/<device>")
    parser.add_argument("--out", type=Path, default=None, help="where they are shipped; default: datasets/data/<device>")
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
    # By the device, so that no rehearsal and no other GPU is taken for this one.
    target = options.out or folder_of(opened)
    work = options.work or ROOT / ".autosched" / "runs" / target.name
    resume(work, target)
    until = began + options.deadline - _SPARE_S
    done = done_before(target, models)
    left = open_first(models, work, done)
    unfinished, result = list[str](), None
    # Fewer models with time enough each. Where those are done sooner, others have the rest; what is left comes first in the next call.
    while left and (result is None or until - time.monotonic() >= _SHARE_S):
        budget_s = until - time.monotonic()
        count = max(1, int(budget_s / _SHARE_S))
        now, left = left[:count], left[count:]
        found = measure(now, work, device=device, budget_s=budget_s, aims=aims, seed=options.seed, keep_disturbed=options.smoke)
        unfinished, result = [*unfinished, *found[0]], found[1] or result
    unfinished += [name for name in left if name not in done]
    report(work, target, opened, result, unfinished, models=models, seed=options.seed, rehearsal=options.smoke)
    return LEFT if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
