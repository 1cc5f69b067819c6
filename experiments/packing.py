"""From what size on a linear layer's weights are worth packing for oneDNN, and what a compiler makes of a product of one row.

    python experiments/packing.py

writes ``results/<device>/packing.json``: for each shape of weights and number of rows, on one thread and on all, PyTorch's own product and
the packed one with a bias, for one row also the sums that Inductor compiles, in interleaved rounds. A round goes once through several
layers of that shape: few enough that a cache shared by the cores holds their weights, or so many that it does not.
``autosched/capture/passes/cpu_linear.py`` and ``cpu_rows.py`` have the rules made from it. Compiled code is called through Python, which
takes some microseconds longer than a lane does. ``--smoke`` measures one shape.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.serve.common import keep, parser_of
from experiments.serve.overhead import interleaved

SHAPES = ((128, 128), (256, 256), (256, 512), (512, 512), (512, 1024), (1024, 1024), (2048, 1000), (4096, 1024), (1024, 4096))
ROWS = (1, 2, 4, 16, 64)
_CACHED_LAYERS = 8
_MEMORY_BYTES = 64 << 20
_MOST_LAYERS = 400
_ROUNDS = 15


def measure(shape: tuple[int, int], rows: int, threads: int, layers: int, rounds: int) -> dict[str, Any]:
    """Microseconds of one product, unpacked (twice, for the noise), packed and, of one row, compiled: medians over rounds.

    Args:
        shape: features in, features out.
        layers: how many different weights a round goes through.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        inputs, outputs = shape
        plain = [torch.randn(outputs, inputs) for _ in range(layers)]
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in plain]
        source, bias = torch.randn(rows, inputs), torch.randn(outputs)
        linear, pointwise = torch.ops.aten.linear.default, torch.ops.mkldnn._linear_pointwise.default

        def unpacked_round() -> None:
            for weight in plain:
                linear(source, weight, bias)

        def packed_round() -> None:
            for weight in packed:
                pointwise(source, weight, bias, "none", [], "")

        calls: dict[str, Callable[[], None]] = {"unpacked": unpacked_round, "again": unpacked_round, "packed": packed_round}
        if rows == 1:
            entry = _compiled(inputs, outputs, threads)

            def compiled_round() -> None:
                for weight in plain:
                    entry([source, weight, bias])

            calls["compiled"] = compiled_round
        with torch.inference_mode():
            times = interleaved(calls, rounds, seed=0)
    finally:
        torch.set_num_threads(before)
    medians = {f"{name}_us": statistics.median(values) / layers for name, values in times.items()}
    return {"shape": list(shape), "rows": rows, "threads": threads, "layers": layers, **medians}


def compiled_product(
    model: torch.nn.Module, given: tuple[torch.Tensor, ...], threads: int
) -> tuple[Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], list[tuple[int, ...]]]:
    """What the lowering ``fused`` runs for a model that is one product of one row, and the shapes of what that reads, in order."""
    from autosched.capture.export import capture
    from autosched.core.variants import Lowering, Variant
    from autosched.runtime.regions.compile import Code, compile_piece
    from autosched.runtime.regions.pieces import pieces_of

    graph = capture(model.eval(), given, lowering=Lowering.FUSED).program.graph
    (piece,) = pieces_of(graph.operators[-1], graph)
    code = compile_piece(piece, graph, torch.device("cpu"), width=threads, variant=Variant.COMPILED)
    if not isinstance(code, Code):
        sys.exit(f"{[(tuple(tensor.shape), tensor.dtype) for tensor in given]} cannot be compiled: {code.reason}")
    return code.entry, [graph.values[value].spec.shape for value in piece.reads]


@lru_cache
def _compiled(inputs: int, outputs: int, threads: int) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Of ``row @ weight.T + bias``."""
    return compiled_product(torch.nn.Linear(inputs, outputs), (torch.randn(1, inputs),), threads)[0]


def main() -> None:
    asked = parser_of(__doc__, models=False).parse_args()
    from autosched.runtime.cores import usable_cores

    torch.manual_seed(0)
    cases = []
    for shape in SHAPES[1:2] if asked.smoke else SHAPES:
        size = 4 * shape[0] * shape[1]
        from_memory = 2 * _CACHED_LAYERS if asked.smoke else -(-_MEMORY_BYTES // size)
        for layers in dict.fromkeys((_CACHED_LAYERS, max(from_memory, _CACHED_LAYERS))):
            if layers > _MOST_LAYERS:
                continue  # a model of that many layers of this size is not held up by its weights
            for rows in ROWS:
                for threads in sorted({1, usable_cores()}):
                    case = measure(shape, rows, threads, layers, 2 if asked.smoke else _ROUNDS)
                    cases.append({**case, "from_cache": layers == _CACHED_LAYERS and layers < from_memory})
        print(f"{shape[0]} x {shape[1]} done", flush=True)
    keep(asked, "packing.json", {"rounds": _ROUNDS, "cases": cases})


if __name__ == "__main__":
    main()
