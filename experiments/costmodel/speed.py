"""How long features, predictions and training take; no accuracy.

Rows are simulated: only their number matters here. Prints one JSON object.

    python experiments/costmodel/speed.py [--kernels 300] [--pairs 20000] [--smoke]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from autosched.costmodel.analytic import AnalyticModel
from autosched.costmodel.model import COST_MODELS, PairLabels, PairQuery
from autosched.costmodel.stacked import StackedModel
from autosched.datasets.synthetic import synthetic_device, synthetic_kernels


def seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def training_rows(kernels: int, pairs: int, rng: np.random.Generator) -> tuple[PairQuery, PairLabels]:
    """Simulated rows whose labels are the analytic slowdown times noise: cheap to make in any number."""
    device = synthetic_device()
    facts = tuple(kernel.facts for kernel in synthetic_kernels(kernels, device, rng))
    first, last = rng.integers(kernels, size=(2, pairs))
    query = PairQuery(facts, (device,), np.zeros(kernels, dtype=np.int64), first, last)
    prior = AnalyticModel().predict(query)
    noisy = [values * np.exp(rng.normal(0.0, 0.1, pairs)) for values in (prior.slowdown_first, prior.slowdown_last)]
    ones = np.ones(pairs)
    return query, PairLabels(noisy[0], noisy[1], prior.makespan_ratio, ("simulated",) * pairs, ones, ones, ones)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--models", nargs="*", default=None, help="names; all by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a rehearsal in a few seconds")
    options = parser.parse_args()
    if options.smoke:
        options.kernels, options.pairs, options.repeats = 40, 300, 1
    rng = np.random.default_rng(0)
    query, labels = training_rows(options.kernels, options.pairs, rng)
    a, b = np.divmod(np.arange(options.kernels**2), options.kernels)
    everything = PairQuery(query.kernels, query.devices, query.kernel_device, a, b)
    result: dict[str, Any] = {"rows": "simulated", "kernels": options.kernels}
    result |= {"predicted_pairs": len(everything), "trained_pairs": len(query)}
    for name in options.models or COST_MODELS.names():
        model = COST_MODELS.get(name)()
        start, start_cpu = time.perf_counter(), time.process_time()
        model.fit(query, labels, rng=np.random.default_rng(0))
        fit_s, fit_cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
        model.predict(everything)
        predict_s = seconds(lambda used=model: used.predict(everything), options.repeats)
        start_cpu = time.process_time()
        model.predict(everything)
        predict_cpu_s = time.process_time() - start_cpu
        result[name] = {
            "predict_cpu_s": round(predict_cpu_s, 4),
            "fit_s": round(fit_s, 3),
            "fit_cpu_s": round(fit_cpu_s, 3),
            "predict_all_pairs_s": round(predict_s, 4),
        }
        if isinstance(model, StackedModel):
            # Without a residual no tree is asked, and the figure would flatter.
            result[name]["residual_share"] = model.share
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
