"""How long a server waits for its first tuned answer: each repeat in a fresh process that already has torch and the model.

    python experiments/serve/load.py
    python experiments/serve/load.py --device cuda

writes ``experiments/results/<device>/load.json``: seconds from before ``import autosched`` to the end of the first inference, percentiles
over repeats, and how they divide into stages. The file is written after every model; ``--deadline`` divides its seconds among the models,
and one whose time is over has fewer repeats. ``--missing`` goes on where an earlier call was ended. ``--smoke`` takes two repeats of
a small model and writes nothing unless told where.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.core.errors import AutoschedError  # noqa: E402
from experiments.calls import read_json, run_to_end  # noqa: E402
from experiments.serve.common import bundle_bytes, interval, parser_of, percentile, record, results_of, tower  # noqa: E402

MODELS = ("tower:300", "torchvision:googlenet", "timm:hrnet_w18")
# A repeat has this long, and the first one of a model at least that long however late it is.
_LONGEST_S, _LEAST_S = 600.0, 60.0
# What each stage covers, by the function that does it; the rest of ``load`` is ``other``.
STAGES = ("import", "read", "verdict", "watch", "constants", "pack", "plan", "verify", "first_call")


def build(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if name.startswith("tower:"):
        model, args = tower(int(name.partition(":")[2]))
        return model, args, {}
    from autosched import zoo

    made = zoo.load(name)
    return made.model, made.args, made.kwargs


def child(name: str, bundle: Path, device: str) -> None:
    """One repeat: prints one JSON object."""
    import torch
    from torch.utils import _pytree as pytree

    model, args, kwargs = build(name)
    # The model is where it serves before anything is timed, and so is the call.
    model = model.to(device)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with torch.inference_mode():
        model(*args, **kwargs)
        wait()
        began = time.perf_counter()
        model(*args, **kwargs)
        wait()
        model_s = time.perf_counter() - began
    # The zoo is autosched's; what it brought along must be imported again to be counted.
    for module in [item for item in sys.modules if item == "autosched" or item.startswith("autosched.")]:
        del sys.modules[module]
    data = bundle.read_bytes()
    spent: dict[str, float] = {}
    began = time.perf_counter()
    import autosched.runtime.load as loading

    spent["import"] = time.perf_counter() - began
    _watch_stages(loading, spent)
    before_load = time.perf_counter()
    fast = loading.load(data, model, strict=True)
    loaded = time.perf_counter()
    with torch.inference_mode():
        fast(*args, **kwargs)
        wait()
    done = time.perf_counter()
    spent["first_call"] = done - loaded
    total = spent["import"] + (done - before_load)
    spent["other"] = total - sum(spent.values())
    print(json.dumps({"total_s": total, "model_s": model_s, "stages_s": spent, "ready": fast.report().ready}))


def _watch_stages(loading: Any, spent: dict[str, float]) -> None:
    from autosched.runtime import binding, comparison

    def timed(owner: Any, name: str, stage: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                spent[stage] = spent.get(stage, 0.0) + time.perf_counter() - began

        setattr(owner, name, run)

    timed(loading, "read_bundles", "read")
    timed(loading, "check_bundle", "verdict")
    timed(binding, "ModelWatch", "watch")
    timed(binding, "gather_constants", "constants")
    timed(binding, "bind_for", "pack")
    timed(binding, "bind", "pack")  # on a GPU
    timed(binding, "make_plan", "plan")
    timed(comparison.Comparison, "_verify", "verify")


class ChildFailed(Exception):
    """A repeat gave no answer; the message is what it said."""


def measure(name: str, repeats: int, lanes: int, device: str, until: float = math.inf) -> dict[str, Any]:
    """``repeats`` of one model, or as many as end before ``until`` (``time.monotonic``), one at the least.

    Raises:
        ChildFailed: if one fails.
    """
    model, args, kwargs = build(name)
    data, operators = bundle_bytes(model, args, kwargs, lanes=lanes, kind=device)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "model.autosched"
        bundle.write_bytes(data)
        longest_s = 0.0
        for _ in range(repeats):
            began = time.monotonic()
            if runs and began + longest_s > until:
                break
            command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--bundle", str(bundle)]
            command += ["--device", device]
            done = run_to_end(command, min(_LONGEST_S, max(until - began, _LEAST_S)))
            if done.status != 0:
                raise ChildFailed(done.err[-2000:] or (f"status {done.status}" if done.status is not None else "no answer in time"))
            runs.append(json.loads(done.out.splitlines()[-1]))
            longest_s = max(longest_s, time.monotonic() - began)
    totals = [run["total_s"] for run in runs]
    named = (*STAGES, "other")
    return {
        "model": name,
        "operators": operators,
        "lanes": lanes,
        "repeats": len(runs),
        "bundle_bytes": len(data),
        "model_s": statistics.median(run["model_s"] for run in runs),
        "total_s": {f"p{share}": percentile(totals, share / 100) for share in (10, 50, 90, 99)},
        "median_ci_s": interval(totals),
        "stages_s": {stage: statistics.median(run["stages_s"].get(stage, 0.0) for run in runs) for stage in named},
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--deadline", type=float, default=None, help="seconds this call may take; by default 520 on a GPU, else no limit")
    parser.add_argument("--missing", action="store_true", help="only models that the file of earlier calls lacks")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--bundle", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child, arguments.bundle, arguments.device)
        return 0
    models, repeats = arguments.models or list(MODELS), arguments.repeats
    if arguments.smoke:
        models, repeats = ["tower:30"], 1
    deadline_s = arguments.deadline if arguments.deadline is not None else 520.0 if arguments.device == "cuda" else math.inf
    end = time.monotonic() + deadline_s
    target = None if arguments.smoke and arguments.out is None else arguments.out or results_of(arguments.device) / "load.json"
    cases: list[dict[str, Any]] = []
    if arguments.missing and target is not None and (earlier := read_json(target)) is not None:
        cases = earlier["cases"]
        models = [name for name in models if name not in {case["model"] for case in cases}]
    failed = 0
    for place, name in enumerate(models):
        now = time.monotonic()
        try:
            case = measure(name, repeats, arguments.lanes, arguments.device, now + (end - now) / (len(models) - place))
        except (ChildFailed, AutoschedError) as error:
            failed += 1
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            continue
        cases.append(case)
        print(f"{name}: {case['operators']} operators, median {case['total_s']['p50']:.3f} s of {case['repeats']}", flush=True)
        if target is not None:
            record(target, {"cases": cases})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
