"""A rough earliest start and finish of every call, to see which merges would make something wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosched.capture.draft import Draft, Node
from autosched.capture.traffic import bytes_read, bytes_written
from autosched.core.custom_operators import known_kind

# Orders of magnitude of one core (bytes and elements each microsecond); only the comparison of path lengths uses them.
_BYTES_EACH_US = 10_000
_PRODUCTS_EACH_US = 20_000
_CALL_US = 2.0


def rough_us(calls: Sequence[Node], draft: Draft) -> float:
    """Guess of the time of some calls run one after the other, in microseconds."""
    moved = bytes_read(calls, draft.specs, draft.storage)
    moved += bytes_written((value for node in calls for value in node.outputs if value >= 0), draft.specs, draft.storage)
    return len(calls) * _CALL_US + moved / _BYTES_EACH_US + products_us(calls, draft)


def products_us(calls: Sequence[Node], draft: Draft) -> float:
    """The same for the arithmetic of convolutions and matrix products alone."""
    return sum(_products(node, draft) for node in calls) / _PRODUCTS_EACH_US


def _products(node: Node, draft: Draft) -> int:
    if not any(word in known_kind(node.kind) for word in ("conv", "mm", "linear", "matmul")):
        return 0
    values = [value for value in node.outputs if value >= 0]
    reads = node.reads()
    if not values or len(reads) < 2:
        return 0
    shapes = sorted((draft.specs[value].elements for value in reads), reverse=True)
    out = draft.specs[values[0]]
    # Work of a product is about (output elements) x (reduction length); the weight's elements over its output features is that length.
    features = out.shape[1] if "conv" in node.kind and len(out.shape) > 1 else (out.shape[-1] if out.shape else 1)
    return out.elements * max(1, shapes[-1 if len(shapes) == 1 else 1] // max(1, features))


def earliest_finish(draft: Draft) -> dict[int, tuple[float, float]]:
    """For each value made by the body: earliest start and finish of its call with unlimited lanes, in microseconds."""
    times: dict[int, tuple[float, float]] = {}
    for node in draft.nodes:
        start = max((times[value][1] for value in node.reads() if value in times), default=0.0)
        finish = start + rough_us([node], draft)
        times.update((value, (start, finish)) for value in node.outputs if value >= 0)
    return times


def finish_of(times: Mapping[int, tuple[float, float]], value: int) -> float:
    """Earliest finish of a value; 0 for inputs and constants."""
    return times[value][1] if value in times else 0.0
