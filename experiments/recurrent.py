"""What taking recurrent layers apart is worth on a CPU: PyTorch's own layer, its parts in order, and its parts on a tuned schedule.

    python experiments/recurrent.py

writes ``results/<device>/recurrent.json``: for LSTM and GRU of several sizes, in one direction and in both, the layer as it comes with all
threads (twice, for the noise) and with one, its parts one after another, each with all threads, and the schedule that ``autosched.tune``
keeps (lowering ``rewritten``, ten seconds). Timed in interleaved rounds, in one process. ``autosched/capture/passes/cpu_recurrent.py`` is
what takes the layers apart. ``--smoke`` measures one small layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.serve.common import beside, bundle_of, keep, parser_of
from experiments.serve.overhead import interleaved

EAGER, AGAIN, ONE_THREAD, IN_ORDER, TUNED = "as it comes", "as it comes, again", "as it comes, one thread", "in order", "tuned"
_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Layer:
    """A recurrent layer and what it reads; sizes as ``torch.nn.LSTM`` has them."""

    kind: str
    inputs: int
    hidden: int
    layers: int
    both: bool
    steps: int
    batch: int = 1


LAYERS = (
    Layer("LSTM", 640, 640, 2, False, 1),
    Layer("LSTM", 640, 640, 2, False, 10),
    Layer("LSTM", 128, 256, 2, False, 50),
    Layer("LSTM", 128, 128, 1, True, 50),
    Layer("LSTM", 128, 256, 2, True, 50),
    Layer("LSTM", 128, 256, 2, True, 50, batch=16),
    Layer("LSTM", 512, 512, 2, True, 50),
    Layer("GRU", 128, 128, 1, True, 50),
    Layer("GRU", 128, 256, 2, True, 50),
    Layer("GRU", 128, 256, 2, True, 50, batch=16),
    Layer("GRU", 512, 512, 2, True, 50),
)


def contestants(layer: Layer, budget_s: float) -> tuple[dict[str, Callable[[], Any]], Any]:
    """By name, what computes the layer; and the loaded schedule."""
    import autosched
    from autosched.capture.export import capture
    from autosched.core.schedule import sequential

    torch.manual_seed(0)
    made = getattr(torch.nn, layer.kind)
    model = made(layer.inputs, layer.hidden, layer.layers, bidirectional=layer.both, batch_first=True).eval()
    x = torch.randn(layer.batch, layer.steps, layer.inputs)
    threads = torch.get_num_threads()

    def one_thread() -> Any:
        torch.set_num_threads(1)
        try:
            return model(x)
        finally:
            torch.set_num_threads(threads)

    captured = capture(model, (x,))
    wide = sequential(captured.program.graph, width=threads)
    in_order = autosched.load(bundle_of(captured, wide, layer.kind), model, strict=True)
    found = autosched.tune(model, (x,), device="cpu", effort="quick", budget_s=budget_s, lowering="rewritten")
    tuned = autosched.load(found.to_bytes(), model, strict=True)
    runs = {
        EAGER: lambda: model(x),
        AGAIN: lambda: model(x),
        ONE_THREAD: one_thread,
        IN_ORDER: lambda: in_order(x),
        TUNED: lambda: tuned(x),
    }
    return runs, tuned


def measure(layer: Layer, rounds: int, budget_s: float) -> dict[str, Any]:
    """One layer."""
    runs, tuned = contestants(layer, budget_s)
    with torch.inference_mode():
        expected = runs[EAGER]()[0]
        differences = {name: float((run()[0] - expected).abs().max()) for name, run in runs.items()}
        times = interleaved(runs, rounds, seed=0)
    rows = []
    for name, column in times.items():
        rows.append({"name": name, **beside(times[EAGER], column), "max_difference": differences[name]})
        print(f"{layer}: {name}: {rows[-1]['median_us']:,.0f} us, {rows[-1]['speedup']:.2f}x", flush=True)
    report = tuned.report()
    return {**asdict(layer), "schedule": report.schedule, "lanes": report.lanes, "rows": rows}


def main() -> None:
    asked = parser_of(__doc__, models=False).parse_args()
    layers, rounds, budget_s = LAYERS, _ROUNDS, 10.0
    if asked.smoke:
        layers, rounds, budget_s = (Layer("LSTM", 8, 16, 2, True, 4),), 2, 2.0
    cases = [measure(layer, rounds, budget_s) for layer in layers]
    keep(asked, "recurrent.json", {"rounds": rounds, "threads": torch.get_num_threads(), "cases": cases})


if __name__ == "__main__":
    main()
