"""Single calls after a pause, as a server that is asked now and then makes them: a schedule, the model as it comes, ``torch.compile``.

    python experiments/serve/paused.py [MODEL...]

writes ``results/<device>/paused.json``. Each model is tuned (``--effort quick``) and loaded as a server loads it; then it is called in
turns with the model as it comes and the compiled model, these two with one thread and with all, each call after 20 ms in which nothing
happens. The tuned schedule has two columns, whose difference is the noise. ``--smoke`` runs a small model for a few calls and writes
nothing unless told where.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.serve.common import keep, parser_of  # noqa: E402
from experiments.serve.load import build  # noqa: E402

MODELS = ("autosched:deepfm", "autosched:moe", "autosched:lstm", "torchvision:squeezenet1_1", "autosched:randwire", "torchvision:googlenet")
PAUSE_MS = 20.0


def measure(name: str, calls: int, budget_s: float | None) -> dict[str, Any]:
    """All contestants on one model."""
    import autosched
    from autosched.pipeline.call_times import Contestant, paused_calls_us
    from autosched.runtime.cores import usable_cores

    model, args, kwargs = build(name)
    tuned = autosched.tune(model, args, kwargs, device="cpu", effort="quick", budget_s=budget_s)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.autosched"
        tuned.save(file)
        fast = autosched.load(file, model, strict=True)
    compiled = torch.compile(model)
    counts = sorted({1, usable_cores()})
    contestants = {column: Contestant(partial(fast, *args, **kwargs), counts[-1]) for column in ("tuned", "tuned again")}
    for prefix, function in (("eager", model), ("compile", compiled)):
        contestants |= {f"{prefix}_{count}": Contestant(partial(function, *args, **kwargs), count) for count in counts}
    times = paused_calls_us(contestants, PAUSE_MS, calls, seed=0)
    return {"model": name, "calls": calls, "kept": tuned.report.chosen, "rows": {column: _row(times, column) for column in times}}


def _row(times: dict[str, list[float]], column: str) -> dict[str, Any]:
    """Its times, and how many times as long it takes as the tuned schedule."""
    from autosched.device.timing import paired_ratio
    from autosched.pipeline.call_times import call_times

    said, ratio = call_times(column, times[column]), paired_ratio(times[column], times["tuned"])
    return {
        "median_us": said.median_us,
        "p90_us": said.p90_us,
        "p99_us": said.p99_us,
        "mean_us": statistics.fmean(times[column]),
        "over_tuned": ratio.ratio,
        "over_tuned_ci": [ratio.ci_low, ratio.ci_high],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--calls", type=int, default=100)
    arguments = parser.parse_args()
    models, calls, budget_s = arguments.models or list(MODELS), arguments.calls, None
    if arguments.smoke:
        models, calls, budget_s = ["tower:12"], 8, 2.0
    cases = []
    for name in models:
        case = measure(name, calls, budget_s)
        cases.append(case)
        for column, row in case["rows"].items():
            low, high = row["over_tuned_ci"]
            print(
                f"{name}: {column} {row['median_us']:,.0f} us, 99 of 100 within {row['p99_us']:,.0f}, "
                f"{row['over_tuned']:.2f} times as long as tuned ({low:.2f} to {high:.2f})",
                flush=True,
            )
    keep(arguments, "paused.json", {"pause_ms": PAUSE_MS, "cases": cases})


if __name__ == "__main__":
    main()
