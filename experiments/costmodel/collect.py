"""The recorded data set of this machine: operators, pairs, groups and schedules of the suite, in one command, within a stated time.

    python experiments/costmodel/collect.py                            # 12 minutes on this CPU, then datasets/data/<machine>/
    python experiments/costmodel/collect.py torchvision:googlenet --budget 60s --out somewhere
    python experiments/costmodel/collect.py --smoke                    # a rehearsal of seconds; its figures mean nothing

Stop it at any time, run it again and it goes on: nothing is measured twice. What was timed while other processes had the cores is not
kept, so run it alone. ``experiments/costmodel/held_out.py`` makes the tables.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched import zoo  # noqa: E402
from autosched.config import parse_seconds  # noqa: E402
from autosched.core.errors import AutoschedError  # noqa: E402
from autosched.core.scratch import Scratch  # noqa: E402
from autosched.datasets.store import Store  # noqa: E402
from autosched.device.base import Device  # noqa: E402
from autosched.device.registry import device_named  # noqa: E402
from autosched.pipeline.collecting import Aims, CollectResult, Subject, collect  # noqa: E402
from experiments.costmodel.shipping import folder_of, resume, ship  # noqa: E402

SUITE = (
    "torchvision:googlenet",
    "autosched:randwire",
    "autosched:deepfm",
    "torchvision:squeezenet1_1",
    "torchvision:inception_v3",
    "timm:hrnet_w18",
    "autosched:lstm",
    "autosched:moe",
    "transformers:bert",
    "transformers:t5",
    "torchvision:resnet50",
    "torchvision:mobilenet_v2",
)


def measure(
    models: Sequence[str],
    work: Path,
    *,
    device: str,
    budget_s: float,
    aims: Aims,
    seed: int,
    cost_model: Path | None = None,
    keep_disturbed: bool = False,
) -> tuple[list[str], CollectResult | None]:
    """One model after the other, each with an equal share of the time left; models whose aims are open, and the last result.

    One that fails is open, and keeps no other from its turn.
    """
    deadline = time.monotonic() + budget_s
    unfinished: list[str] = []
    result = None
    for index, name in enumerate(models):
        if deadline <= time.monotonic():
            unfinished += models[index:]
            break
        try:
            made = zoo.load(name, seed=seed)
        except AutoschedError as error:
            sys.stderr.write(f"{name} is left out: {error}\n")
            continue
        began = time.monotonic()
        try:
            result = collect(
                [Subject(name, made.model, made.args, made.kwargs)],
                work,
                device=device,
                aims=aims,
                seed=seed,
                cost_model=cost_model,
                budget_s=max(0.0, deadline - began) / (len(models) - index),
                keep_disturbed=keep_disturbed,
            )
        except Exception:
            traceback.print_exc()
            unfinished.append(name)
            continue
        unfinished += result.unfinished
        sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s; {result.summary().splitlines()[0]}\n")
    return unfinished, result


def report(work: Path, target: Path, opened: Device, result: CollectResult | None, unfinished: Sequence[str], **about: object) -> None:
    """Ship what is there and say what it is."""
    if not (work / "solo").is_dir() or not Store.open(work).keys("solo"):
        sys.exit("nothing was kept: there was no time, other processes had the cores, or no model could be loaded")
    ship(work, target, opened, unfinished=list(unfinished), **about)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{result.summary() if result else 'no time for more'}\nwritten to {target}: {size / 1e6:.2f} MB")
    if unfinished:
        print(f"not all that was asked for: {', '.join(unfinished)}; the same command goes on")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", default="12m", help="for all models together, models' loading included")
    parser.add_argument("--work", type=Path, default=None, help="where runs gather; default: .autosched/runs/<machine>")
    parser.add_argument("--out", type=Path, default=None, help="where they are shipped; default: datasets/data/<machine>")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--schedules", type=int, default=12)
    parser.add_argument("--cost-model", type=Path, default=None, help="half of the pairs are then those it is least sure of")
    parser.add_argument("--keep-disturbed", action="store_true", help="keep, marked, what others disturbed: for rehearsals only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    opened = device_named(options.device)
    models = options.models or list(SUITE)
    aims = Aims(options.pairs, options.groups, options.schedules)
    if options.smoke:
        models, options.budget, aims, options.keep_disturbed = ["autosched:toy"], "8s", Aims(6, 2, 3), True
        scratch = Scratch()
        options.work, options.out = options.work or scratch.path / "work", options.out or scratch.path / "data"
    target = options.out or folder_of(opened)
    work = options.work or ROOT / ".autosched" / "runs" / target.name
    budget_s = parse_seconds(options.budget)
    resume(work, target)
    unfinished, result = measure(
        models,
        work,
        device=options.device,
        budget_s=budget_s,
        aims=aims,
        seed=options.seed,
        cost_model=options.cost_model,
        keep_disturbed=options.keep_disturbed,
    )
    rehearsal = options.smoke or options.keep_disturbed
    report(work, target, opened, result, unfinished, models=models, budget_s=budget_s, seed=options.seed, rehearsal=rehearsal)


if __name__ == "__main__":
    main()
