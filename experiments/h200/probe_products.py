"""P15: what takes the time in a graph that ``torch.compile`` fills, and what its matrix products take by either library."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from probe_bench import Answer, Bench

# Rows, columns and terms of a sum, of the products in the mixture of experts.
_PRODUCTS = ((16, 256, 128), (16, 128, 256))
_REPEATED = 20
_SHOWN_COLUMNS = 40


def p15(bench: Bench) -> Answer:
    import torch

    from autosched.device.cuda.baselines import BaselineKind, TimedBaseline
    from autosched.runtime.trees import map_tensors
    from autosched.zoo import load

    loaded = load("autosched:moe")
    args, kwargs = map_tensors(lambda tensor: tensor.cuda(), (loaded.args, loaded.kwargs))
    timed = TimedBaseline(bench.backend, loaded.model.cuda(), args, BaselineKind.COMPILED, kwargs)
    blocks_us = [timed.block_us(0.0) for _ in range(5)]
    # Held back for as long as the launches really take: whether the host has a part in the times of the blocks.
    data: dict[str, Any] = {"block_us": blocks_us, "held_us": bench.replay_us(timed._graph, 20, 5)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        timed._graph.replay()
        torch.cuda.synchronize()
    on_device = [(event.name, event.time_range.elapsed_us()) for event in profiler.events() if event.device_type.name == "CUDA"]
    data["kernels"] = by_name(on_device)
    data["products"] = {" x ".join(map(str, shape)): _products_us(bench, *shape) for shape in _PRODUCTS}
    longest = "; ".join(f"{row['count']} of {row['name'][:_SHOWN_COLUMNS]} {row['total_us']:.0f} us" for row in data["kernels"][:3])
    return (
        f"the graph takes {median(blocks_us):.0f} us, {median(data['held_us']):.0f} us if held back; its {len(on_device)} kernels "
        f"{sum(time_us for _, time_us in on_device):.0f} us ({longest or 'the profiler saw none'}); products, us: {data['products']}"
    ), data


def by_name(events: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    """Kernels of one name together, those that take most of the time first."""
    found: dict[str, list[float]] = {}
    for name, time_us in events:
        found.setdefault(name, []).append(time_us)
    rows: list[dict[str, Any]] = [{"name": name, "count": len(times), "total_us": round(sum(times), 3)} for name, times in found.items()]
    return sorted(rows, key=lambda row: -row["total_us"])


def _products_us(bench: Bench, rows: int, columns: int, terms: int) -> dict[str, float]:
    """One product alone in a graph: without a bias by cuBLAS, as PyTorch's default is, and by cuBLASLt; and with one, by cuBLASLt."""
    import torch

    left, weight = torch.randn(rows, terms, device="cuda"), torch.randn(columns, terms, device="cuda")
    bias = torch.randn(columns, device="cuda")
    stream = bench.lanes(1)[0]
    library = torch.backends.cuda.preferred_blas_library()
    cases: dict[str, tuple[Any, Callable[[], Any]]] = {
        "mm": (library, lambda: torch.mm(left, weight.t())),
        "mm_cublaslt": ("cublaslt", lambda: torch.mm(left, weight.t())),
        "addmm": (library, lambda: torch.addmm(bias, left, weight.t())),
    }
    found: dict[str, float] = {}
    for label, (wanted, run) in cases.items():

        def body(run: Callable[[], Any] = run) -> None:
            with bench.backend.on(stream):
                for _ in range(_REPEATED):
                    run()

        torch.backends.cuda.preferred_blas_library(wanted)
        try:
            with torch.inference_mode():
                body()
                graph, _ = bench.capture([stream], body)
        finally:
            torch.backends.cuda.preferred_blas_library(library)
        found[label] = round(median(bench.replay_us(graph, 20, 5)) / _REPEATED, 3)
        bench.backend.reset(graph)
    return found
