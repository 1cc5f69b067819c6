"""What the serving benchmarks share: a bundle that needs no tuning job, statistics, and the block that says where figures were taken."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from autosched.capture.export import Captured
    from autosched.core.schedule import Schedule

HERE = Path(__file__).resolve().parent
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(HERE.parents[1]))

from experiments.calls import write_json  # noqa: E402
from experiments.devices import results_of  # noqa: E402
from experiments.suite import environment  # noqa: E402

__all__ = ["bundle_bytes", "bundle_of", "interval", "keep", "keep_shapes", "parser_of", "percentile", "record", "results_of", "tower"]


class Tower(torch.nn.Module):
    """``depth`` blocks of four small operators in two branches: many operators, little work, so that what surrounds them shows."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.left = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(depth))
        self.right = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[batch, 16]``."""
        for left, right in zip(self.left, self.right, strict=True):
            x = torch.tanh(left(x)) + torch.sigmoid(right(x))
        return x


def tower(operators: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A model of about that many operators, and an example input."""
    torch.manual_seed(0)
    return Tower(max(operators // 3, 1)).eval(), (torch.randn(1, 16),)


def bundle_bytes(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, lanes: int, kind: str = "cpu"
) -> tuple[bytes, int]:
    """A bundle of ``model`` on ``lanes`` lanes, dealt out without measuring anything, and its number of operators.

    Load time and overhead do not depend on how good a schedule is.
    """
    from autosched.capture.export import capture
    from autosched.core.schedule import make_schedule, sequential

    captured = capture(model, args, kwargs, rewrite=True, target=kind)
    graph = captured.program.graph
    schedule = sequential(graph)
    if lanes > 1:
        last: dict[int, int] = {}
        lane: list[int] = []
        for index in range(len(graph)):
            # A chain stays on its lane; what forks off goes to the next.
            free = [lane[before] for before in graph.predecessors[index] if last.get(lane[before]) == before]
            lane.append(free[0] if free else index % lanes)
            last[lane[index]] = index
        schedule = make_schedule(graph, range(len(graph)), lane)
    return bundle_of(captured, schedule, type(model).__name__, kind), len(graph)


def bundle_of(captured: Captured, schedule: Schedule, name: str, kind: str = "cpu") -> bytes:
    """A bundle of a schedule that nobody tuned, for this machine's device of ``kind``."""
    from autosched.core.program import ConstantSource
    from autosched.core.report import TuneReport
    from autosched.export.bundle import encode_bundle, make_bundle
    from autosched.runtime.bundle.format import Evidence
    from autosched.runtime.cuda.key import cuda_device_key, cuda_software_key
    from autosched.runtime.host_key import cpu_device_key, software_key

    program, graph = captured.program, captured.program.graph
    literals = {
        binding.name: captured.constants[binding.value].detach().cpu()
        for binding in program.bindings
        if binding.source is ConstantSource.LITERAL
    }
    device, software = (cuda_device_key(0), cuda_software_key(0)) if kind == "cuda" else (cpu_device_key(), software_key())
    report = TuneReport(
        name, graph.hash, device, program.lowering, len(graph), "dealt out", "none", "not tuned: made for a benchmark",
        1.0, 1.0, (), 0, 0, 0.0, 0.0, 0, "quick",
    )  # fmt: skip
    return encode_bundle(make_bundle(program, schedule, Evidence(report), literals, device, software))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``values`` lie, interpolated."""
    return float(np.quantile(values, share))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % bootstrap interval of the median."""
    drawn = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    medians = np.median(np.asarray(values)[drawn], axis=1).tolist()
    return percentile(medians, 0.025), percentile(medians, 0.975)


def beside(base: Sequence[float], times: Sequence[float]) -> dict[str, Any]:
    """Of calls that were timed in the rounds of ``base``, microseconds: the median, the speed-up over ``base``, and both intervals."""
    ratios = [before / after for before, after in zip(base, times, strict=True)]
    return {
        "median_us": statistics.median(times),
        "ci_us": interval(times),
        "speedup": statistics.median(ratios),
        "speedup_ci": interval(ratios),
    }


def parser_of(description: str | None, *, models: bool = True) -> argparse.ArgumentParser:
    """What every benchmark is asked: of which models, where to write, and whether it is only to show that it runs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if models:
        parser.add_argument("models", nargs="*", default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--smoke", action="store_true")
    return parser


def keep(asked: argparse.Namespace, name: str, body: dict[str, Any]) -> None:
    """:func:`record` where it was asked for, or among this CPU's results; of a run that only shows that it runs, nothing unless asked."""
    if asked.out is not None or not asked.smoke:
        record(asked.out or results_of("cpu") / name, body)


def keep_shapes(
    asked: argparse.Namespace,
    name: str,
    shapes: Sequence[tuple[int, ...]],
    measure: Callable[..., dict[str, Any]],
    *,
    rounds: int,
    smoke: int,
) -> None:
    """:func:`keep` what ``measure(*shape, threads, rounds)`` says of each shape on one thread and on all; with ``--smoke``, of one shape.

    Args:
        smoke: the place of that shape.
    """
    from autosched.runtime.cores import usable_cores

    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for shape in [shapes[smoke]] if asked.smoke else shapes:
        rows += [measure(*shape, threads, 2 if asked.smoke else rounds) for threads in sorted({1, usable_cores()})]
        print(f"{shape} done", flush=True)
    keep(asked, name, {"rounds": rounds, "rows": rows})


def record(path: Path, body: dict[str, Any]) -> None:
    """Write a result beside the environment it was taken in."""
    write_json(path, {"environment": environment(), **body})
    print(f"written to {path}")
