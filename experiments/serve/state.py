"""What a model's own state costs: one step of decoding with a large cache of keys and values that the model changes in place.

    python experiments/serve/state.py

writes ``results/<device>/state.json``. The transformer of ``autosched:decoder`` takes one token and attends to a cache of fixed length that
its layers keep as buffers. Timed in rounds, in random order within each, in one process: the model as it comes, ``torch.compile`` with its
defaults, and schedules of the operators one after another (nothing was searched), each with the cache copied back (``in_place=False``, all
there was before) and in place. Everybody has a copy of the model. Answers and caches after the same steps are compared first.
``--smoke`` runs a small one for a few rounds and writes nothing unless told where.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.zoo_models.decoder import Decoder, Size  # noqa: E402
from experiments.serve.common import beside, bundle_of, keep, parser_of  # noqa: E402

_BLOCK_US = 60_000.0  # a timed block is at least this long: its first call finds the caches as another contestant left them
_STEPS = 6  # of the comparison, each at its own position
EAGER = "eager"


def decoder(size: Size) -> Decoder:
    torch.manual_seed(0)
    return Decoder(size).eval()


def step(size: Size, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The arguments of one step."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(1, 1, size.width, generator=generator), torch.tensor([size.length // 2 + number])


def scheduled(size: Size, lowering: str, *, in_place: bool) -> tuple[nn.Module, Any]:
    """A model, and its operators in order, each as wide as the process and compiled where it can be."""
    from autosched.capture.export import capture
    from autosched.core.schedule import sequential
    from autosched.core.variants import WHOLE, Variant, lowering_named
    from autosched.runtime.load import load
    from autosched.runtime.regions.pieces import variants_of

    model = decoder(size)
    if lowering in WHOLE:
        from autosched.pipeline.inductor_capture import capture_inductor
        from autosched.runtime.inductor.modes import Mode

        captured: Any = capture_inductor(model, step(size, 0), {}, mode=Mode(lowering_named(lowering)))
    else:
        captured = capture(model, step(size, 0), lowering=lowering_named(lowering))
    graph = captured.program.graph
    schedule = sequential(graph, width=torch.get_num_threads())
    compiled = [Variant.COMPILED in variants_of(operator, graph, "cpu", captured.program.lowering) for operator in graph.operators]
    schedule = dataclasses.replace(schedule, variant=tuple(int(Variant.COMPILED if item else Variant.CALLS) for item in compiled))
    loaded = load(bundle_of(captured, schedule, "Decoder"), model, strict=True, in_place=in_place)
    return model, loaded


def contestants(size: Size, lowerings: Sequence[str]) -> dict[str, tuple[nn.Module, Callable[..., Any]]]:
    """By name: a model, and what runs it. ``eager again`` is the A/A test."""
    found: dict[str, tuple[nn.Module, Callable[..., Any]]] = {}
    for name in (EAGER, f"{EAGER} again"):
        model = decoder(size)
        found[name] = model, model
    model = decoder(size)
    found["torch.compile"] = model, torch.compile(model)
    for lowering in lowerings:
        found[f"{lowering}, copied"] = scheduled(size, lowering, in_place=False)
        found[f"{lowering}, in place"] = scheduled(size, lowering, in_place=True)
    return found


def agreement(runs: dict[str, tuple[nn.Module, Callable[..., Any]]], size: Size) -> dict[str, float]:
    """The largest difference from the model as it comes, of answers and caches, after a few steps in a row."""
    answers = {name: [run(*step(size, number)).clone() for number in range(_STEPS)] for name, (_, run) in runs.items()}
    states = {name: [buffer.clone() for buffer in model.buffers()] for name, (model, _) in runs.items()}

    def distance(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
        return max(float((one.double() - other.double()).abs().max()) for one, other in zip(mine, theirs, strict=True))

    return {name: max(distance(answers[name], answers[EAGER]), distance(states[name], states[EAGER])) for name in runs}


def interleaved(runs: dict[str, tuple[nn.Module, Callable[..., Any]]], size: Size, rounds: int) -> dict[str, list[float]]:
    """Microseconds of one step, for every round."""
    rng = random.Random(0)
    given = step(size, 0)

    def per_step_us(run: Callable[..., Any], steps: int) -> float:
        began = time.perf_counter_ns()
        for _ in range(steps):
            run(*given)
        return (time.perf_counter_ns() - began) / 1e3 / steps

    steps = {name: max(1, int(_BLOCK_US / per_step_us(run, 3))) for name, (_, run) in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        order = list(runs)
        rng.shuffle(order)
        for name in order:
            per_step_us(runs[name][1], 1)
            times[name].append(per_step_us(runs[name][1], steps[name]))
    return times


def measure(size: Size, lowerings: Sequence[str], rounds: int) -> dict[str, Any]:
    """One length of the cache."""
    torch._dynamo.reset()
    runs = contestants(size, lowerings)
    model = runs[EAGER][0]
    changed = [buffer for name, buffer in model.named_buffers() if name != "places"]
    with torch.no_grad():
        differences = agreement(runs, size)
        times = interleaved(runs, size, rounds)
    base = times[EAGER]
    rows = []
    for name, column in times.items():
        report = runs[name][1].report() if hasattr(runs[name][1], "report") else None
        rows.append(
            {
                "name": name,
                **beside(base, column),
                "max_difference": differences[name],
                "copied_back_bytes": report.shapes[0].copied_back_bytes if report is not None else 0,
            }
        )
        print(f"{size.length} tokens, {name}: {rows[-1]['median_us']:,.0f} us, {rows[-1]['speedup']:.2f}x; off by {differences[name]:.1e}")
    return {
        **dataclasses.asdict(size),
        "cache_bytes": sum(buffer.numel() * buffer.element_size() for buffer in changed),
        "weight_bytes": sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        "rounds": rounds,
        "rows": rows,
    }


def main() -> None:
    parser = parser_of(__doc__, models=False)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--lowerings", nargs="*", default=["rewritten", "fused", "inductor"])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    sizes, lowerings, rounds = [Size(6, 8, 512, length) for length in arguments.lengths], arguments.lowerings, arguments.rounds
    if arguments.smoke:
        sizes, lowerings, rounds = [Size(2, 2, 64, 256)], ["rewritten"], 2
    cases = [measure(size, lowerings, rounds) for size in sizes]
    keep(arguments, "state.json", {"threads": torch.get_num_threads(), "cases": cases})


if __name__ == "__main__":
    main()
