"""One operator by its library and by kernels of our own: times and errors, for the scripts that compare them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.serve.overhead import interleaved

PLAIN, AGAIN = "oneDNN", "again"
PYTORCH = "PyTorch"


def compared(
    model: torch.nn.Module, inputs: Sequence[torch.Tensor], variants: Sequence[int], threads: int, rounds: int, plain: str = PLAIN
) -> dict[str, Any]:
    """Microseconds of each way, medians over rounds, the library's a second time for the noise; and largest errors over the largest result.

    Args:
        model: what one operator computes.
        inputs: in the dtype of the model.
        variants: by kernels of our own.
        plain: whose kernel the operator's own call is.
    """
    from autosched.capture.export import capture
    from autosched.core.variants import Variant
    from autosched.runtime.cpu_kernels.steps import own_kernel
    from autosched.runtime.kernels import bind

    captured = capture(model, tuple(inputs))
    torch.set_num_threads(threads)
    bound = bind(captured.program, captured.constants, "cpu")
    [operator] = captured.program.graph.operators
    kernels: dict[str, Any] = {plain: bound.kernels[0]}
    kernels |= {Variant(item).name.lower(): own_kernel(operator, bound, threads, item, {}) for item in variants}
    missing = [str(kernel) for kernel in kernels.values() if not callable(kernel)]
    if missing:
        raise SystemExit(f"there is nothing to time: {missing[0]}")
    slots = bound.new_slots(list(inputs))
    with torch.no_grad():
        wanted = model.double()(*(tensor.double() for tensor in inputs))
    errors: dict[str, float] = {}
    with torch.inference_mode():
        for name, kernel in kernels.items():
            kernel(slots)
            errors[name] = float((bound.outputs(slots)[0] - wanted).abs().max() / wanted.abs().max())
        calls: dict[str, Callable[[], Any]] = {name: partial(kernel, slots) for name, kernel in kernels.items()}
        times = interleaved({**calls, AGAIN: calls[plain]}, rounds, seed=0)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"us": medians, "errors": errors}
