"""Bytes an operator reads and writes: each storage once, however many views of it are used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autosched.capture.draft import Node
from autosched.core.graph import TensorSpec

# These read only the rows they pick from their first tensor.
_LOOKUPS = frozenset({"aten::embedding", "aten::index_select", "aten::gather", "aten::index", "aten::_embedding_bag"})


def footprint(spec: TensorSpec) -> int:
    """Bytes of memory behind a tensor: a dimension of stride 0 (expanded) is one element."""
    if len(spec.strides) != len(spec.shape):
        return spec.bytes
    shape = tuple(1 if stride == 0 else size for size, stride in zip(spec.shape, spec.strides, strict=True))
    return TensorSpec(shape, spec.dtype, spec.strides).bytes


def bytes_read(calls: Sequence[Node], specs: Mapping[int, TensorSpec], storage: Mapping[int, int]) -> int:
    """Bytes that ``calls`` read of memory made outside of them. Views read nothing; what a call reads through a view is counted."""
    own = {value for node in calls for value in node.outputs if value >= 0 and storage[value] == value}
    most: dict[int, int] = {}
    for node in calls:
        if is_view(node, storage):
            continue
        picked = sum(specs[value].bytes for value in node.outputs if value >= 0) if node.kind in _LOOKUPS else None
        for position, value in enumerate(node.reads()):
            if storage[value] in own or value in node.mutates():
                continue
            amount = footprint(specs[value])
            if picked is not None and position == 0:
                amount = min(amount, picked)
            most[storage[value]] = max(most.get(storage[value], 0), amount)
    return sum(most.values())


def bytes_written(values: Iterable[int], specs: Mapping[int, TensorSpec], storage: Mapping[int, int]) -> int:
    """Bytes of the storages behind ``values``, each once."""
    most: dict[int, int] = {}
    for value in values:
        most[storage[value]] = max(most.get(storage[value], 0), footprint(specs[value]))
    return sum(most.values())


def is_view(node: Node, storage: Mapping[int, int]) -> bool:
    """Whether everything the call makes shares memory with something it was given, and nothing is written."""
    made = [value for value in node.outputs if value >= 0]
    return bool(made) and all(storage[value] != value for value in made) and not node.mutates()
