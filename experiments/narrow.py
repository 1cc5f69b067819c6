"""What weights in fewer bits are worth in a product of one row on a CPU, whose compiled loop widens them as it reads them.

    python experiments/narrow.py

writes ``results/<device>/narrow.json``: for each dtype of the weight, on one thread and on all, the time of one product in float32, in
interleaved rounds. A round goes once through so many weights that they come from memory. The dtypes that
``autosched/capture/passes/narrow_weights.py`` leaves narrow are those that gain here. ``--smoke`` goes through a few weights.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.packing import compiled_product
from experiments.serve.common import keep, parser_of
from experiments.serve.overhead import interleaved

WIDE = "float32"
DTYPES = (WIDE, "bfloat16", "float16", "int8", "uint8", "int16", "float8_e4m3fn", "float8_e5m2")
INPUTS, OUTPUTS = 1024, 1024
_MEMORY_BYTES = 64 << 20
_ROUNDS = 15


class Widened(torch.nn.Module):
    """The product of a row with a weight that is given, too."""

    def forward(self, row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(row, weight.to(row.dtype))


def measure(threads: int, weights: int, rounds: int) -> list[dict[str, Any]]:
    """Microseconds of one product for each dtype, medians over rounds; the first again, for the noise."""
    row = torch.randn(1, INPUTS)
    calls: dict[str, Callable[[], None]] = {}
    for name in (*DTYPES, WIDE):
        dtype: torch.dtype = getattr(torch, name)
        entry, shapes = compiled_product(Widened(), (row, torch.zeros(OUTPUTS, INPUTS).to(dtype)), threads)
        many = [torch.randint(0, 100, (OUTPUTS, INPUTS)).to(dtype) for _ in range(weights)]

        given = [[row, weight] if shapes[0] == row.shape else [weight, row] for weight in many]

        def run(entry: Any = entry, given: list[list[torch.Tensor]] = given) -> None:
            for tensors in given:
                entry(list(tensors))

        calls[name if name not in calls else "again"] = run
    with torch.inference_mode():
        times = interleaved(calls, rounds, seed=0)
    return [{"dtype": name, "threads": threads, "us": statistics.median(values) / weights} for name, values in times.items()]


def main() -> None:
    asked = parser_of(__doc__, models=False).parse_args()
    from autosched.runtime.cores import usable_cores

    torch.manual_seed(0)
    weights = 2 if asked.smoke else _MEMORY_BYTES // (INPUTS * OUTPUTS)  # of eight bits: enough, and more of the others
    rows: list[dict[str, Any]] = []
    for threads in sorted({1, usable_cores()}):
        rows += measure(threads, weights, 2 if asked.smoke else _ROUNDS)
        print(f"{threads} threads done", flush=True)
    keep(asked, "narrow.json", {"rounds": _ROUNDS, "shape": [INPUTS, OUTPUTS], "rows": rows})


if __name__ == "__main__":
    main()
