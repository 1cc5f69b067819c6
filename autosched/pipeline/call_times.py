"""Single calls of a loaded model, each after a pause: what a server sees that is not asked all the time.

Threads and cores that were idle are slow to come back, on a virtual machine above all; calls one after the other do not show it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from autosched.core.custom_operators import trusted
from autosched.core.errors import UsageError
from autosched.core.progress import Progress, Silent
from autosched.device.cpu_measure import no_collector
from autosched.device.registry import AUTO, device_like, place_of
from autosched.device.timing import beyond_noise, noise_floor_pct, paired_ratio
from autosched.pipeline.benching import BenchShapes, unless
from autosched.pipeline.bundles import chosen
from autosched.runtime.bundle.format import Bundle, printable
from autosched.runtime.kernels import random_inputs
from autosched.runtime.load import load
from autosched.runtime.shapes import describe_shape
from autosched.runtime.trees import unflatten_inputs

CALLS = 100
_WARM_UPS = 5
_TUNED, _AGAIN = "tuned", "tuned again"


@dataclass(frozen=True, slots=True)
class Contestant:
    """What is called, and with how many of PyTorch's threads."""

    call: Callable[[], object]
    threads: int


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Of all calls: the median, and what 90 and 99 of a hundred stay below; microseconds."""

    name: str
    median_us: float
    p90_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class PausedCalls:
    """``autosched bench --pause``: one shape's calls, checks of the loaded model included.

    Args:
        eager: the model as it comes, on a CPU with one thread or with all of them, whichever is faster.
        speedup_vs_eager: of paired calls, with its 95 % interval.
        noise_floor_pct: what two columns of calls of the schedule differ by.
    """

    file: str
    model: str
    device: str
    chosen: str
    shape: str
    pause_ms: float
    calls: int
    tuned: CallTimes
    eager: CallTimes
    speedup_vs_eager: float
    speedup_ci: tuple[float, float]
    noise_floor_pct: float
    eager_beyond_noise: bool

    def summary(self) -> str:
        """For people."""
        low, high = self.speedup_ci
        lines = [
            f"{self.model} {self.shape} on {self.device}, {self.calls} calls of each after {self.pause_ms:g} ms of nothing, "
            f"noise floor {self.noise_floor_pct:.1f} %"
        ]
        for name, row in ((f"tuned ({self.chosen}), as loaded", self.tuned), (f"as it comes ({self.eager.name})", self.eager)):
            lines.append(f"  {name}: {row.median_us:,.0f} us; 90 of 100 within {row.p90_us:,.0f}, 99 within {row.p99_us:,.0f}")
        lines.append(f"  tuned is {self.speedup_vs_eager:.3f}x (95 % interval {low:.3f} to {high:.3f}){unless(self.eager_beyond_noise)}")
        return "\n".join(lines)


def bench_paused(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    pause_ms: float,
    *,
    calls: int | None = None,
    seed: int = 0,
    shape: str | None = None,
    batch: int | None = None,
    device: str = AUTO,
    progress: Progress | None = None,
) -> PausedCalls | BenchShapes[PausedCalls]:
    """Time calls of the loaded model and of the model as it comes, in turns and in this process, each after ``pause_ms``.

    Args:
        model: is put on the device.
        calls: of each; 100 by default.
        device: where; ``auto`` is the first device of this machine that the bundle was tuned for.

    Returns:
        A result, or, if several shapes are meant, one for each.

    Raises:
        UsageError: for a pause that is no time.
        IncompatibleArtifact: if a schedule does not fit this machine or model.
    """
    if not 0.0 <= pause_ms <= 60_000.0:
        raise UsageError(f"the pause is {pause_ms:g} ms; expected 0 to 60000")
    bundles = chosen(path, shape, batch)
    told = progress or Silent()
    told.stage("load")
    home = torch.device(place_of(device_like(bundles[0].key.device, device)))
    model = model.to(home)
    # Of a file of many shapes those that are called, each in its warm-up.
    fast = load(path, model, strict=True, max_shapes=max(8, len(bundles)), prepare="first-use", custom_operators=sorted(trusted()))
    told.stage("calls")
    threads = torch.get_num_threads()
    results = []
    for bundle in bundles:
        given = random_inputs(bundle.program, seed, home)[: len(bundle.program.given)]
        call = partial(_call, *unflatten_inputs(bundle.program, given), home)
        contestants = {name: Contestant(partial(call, fast), threads) for name in (_TUNED, _AGAIN)}
        contestants |= {name: Contestant(partial(call, model), count) for name, count in as_it_comes(home.type, threads).items()}
        times = paused_calls_us(contestants, pause_ms, CALLS if calls is None else calls, seed)
        results.append(_stated(path, bundle, pause_ms, times))
    return results[0] if len(results) == 1 else BenchShapes(os.fspath(path), tuple(results))


def as_it_comes(kind: str, threads: int) -> dict[str, int]:
    """The rows of eager mode by name, and their numbers of threads. A GPU has one: how many the host has is nothing to it."""
    return {"eager": threads} if kind == "cuda" else {f"eager_{count}": count for count in {1, threads}}


def _call(args: Sequence[Any], kwargs: Mapping[str, Any], home: torch.device, function: Callable[..., Any]) -> None:
    function(*args, **kwargs)
    if home.type == "cuda":
        torch.cuda.synchronize(home)


def paused_calls_us(contestants: Mapping[str, Contestant], pause_ms: float, calls: int, seed: int) -> dict[str, list[float]]:
    """Microseconds of single calls, in rounds of random order: a column for each contestant."""
    rng = np.random.default_rng(seed)
    names = list(contestants)
    columns: dict[str, list[float]] = {name: [] for name in names}
    threads = torch.get_num_threads()
    try:
        with torch.inference_mode(), no_collector():
            for turn in range(_WARM_UPS + calls):
                for place in rng.permutation(len(names)).tolist():
                    contestant = contestants[names[place]]
                    torch.set_num_threads(contestant.threads)
                    time.sleep(pause_ms / 1e3)
                    begin_ns = time.perf_counter_ns()
                    contestant.call()
                    if turn >= _WARM_UPS:
                        columns[names[place]].append((time.perf_counter_ns() - begin_ns) / 1e3)
    finally:
        torch.set_num_threads(threads)
    return columns


def call_times(name: str, times_us: Sequence[float]) -> CallTimes:
    """What is said of one column."""
    median, p90, p99 = np.percentile(times_us, (50, 90, 99)).tolist()
    return CallTimes(name, median, p90, p99)


def _stated(path: str | os.PathLike[str], bundle: Bundle, pause_ms: float, times: Mapping[str, Sequence[float]]) -> PausedCalls:
    noise = noise_floor_pct(times[_TUNED], times[_AGAIN])
    eager = min((name for name in times if name.startswith("eager")), key=lambda name: float(np.median(times[name])))
    ratio = paired_ratio(times[eager], times[_TUNED])
    report = bundle.evidence.report
    return PausedCalls(
        file=os.fspath(path),
        model=printable(report.model),
        device=printable(bundle.key.device.name),
        chosen=printable(report.chosen),
        shape=describe_shape(bundle.program),
        pause_ms=pause_ms,
        calls=ratio.count,
        tuned=call_times(_TUNED, times[_TUNED]),
        eager=call_times(eager, times[eager]),
        speedup_vs_eager=ratio.ratio,
        speedup_ci=(ratio.ci_low, ratio.ci_high),
        noise_floor_pct=noise,
        eager_beyond_noise=beyond_noise(ratio, noise),
    )
