"""Operators that cannot run inside a CUDA graph, found before anything is captured, and named.

Two screens: one reads the program and needs no GPU; the other runs every operator once with PyTorch's own check for
synchronising calls. Random operators never get this far: capture refuses them. Neither screen goes by ``dynamic_output_shape`` alone,
because plain indexing carries that tag too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autosched.core.errors import UnsupportedGraph
from autosched.core.graph import Operator, OpGraph
from autosched.core.program import Call, Many, Ref
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.calls import resolve

_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl", "aten::_unsafe_index"})
_READS_BACK = frozenset(
    {
        "aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::unique_consecutive",
        "aten::_unique2", "aten::bincount", "aten::equal", "aten::is_nonzero", "aten::multinomial", "aten::_linalg_check_errors",
        "aten::histogramdd",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Synchronising:
    """An operator that makes the host wait for the device, or copies between them; ``reason`` is for people."""

    operator: int
    name: str
    reason: str
    source: str


def synchronising_operators(graph: OpGraph) -> list[Synchronising]:
    """What the program itself tells: tags, operators known to read back, boolean indices, copies to or from the host."""
    found: list[Synchronising] = []
    for operator in graph.operators:
        reason = next((reason for call in operator.calls if (reason := _reason(call, graph))), "")
        if reason:
            found.append(_named(operator, reason))
    return found


def require_capturable(graph: OpGraph) -> None:
    """Raise for the first operator that cannot be captured.

    Raises:
        UnsupportedGraph: naming it, its source line, and the reason.
    """
    for item in synchronising_operators(graph)[:1]:
        place = f" at {item.source}" if item.source else ""
        raise UnsupportedGraph(
            f"operator {item.name}{place} {item.reason}, which a CUDA graph cannot hold; expected operators that stay on the device. "
            "Move it out of the model, or tune for --device cpu."
        )


def observe_synchronising(measurer: CudaMeasurer) -> list[Synchronising]:
    """Run every operator once more (after warm-up) with PyTorch's check for synchronising calls set to raise.

    Needs a GPU. What an operator does on its first call, such as loading its module, is past by then.
    """
    found: list[Synchronising] = []
    slots = measurer.program.new_slots(measurer.static)
    cuda: Any = torch.cuda
    before = cuda.get_sync_debug_mode()
    with torch.inference_mode(), measurer.backend.on(measurer.capturer.streams.named("warm-up")):
        for operator in measurer.graph.operators:
            measurer.beat(operator.index)
            cuda.set_sync_debug_mode("error")
            try:
                measurer.program.kernels[operator.index](slots)
            except RuntimeError as error:
                if "synchroniz" not in str(error).lower():
                    raise
                found.append(_named(operator, "waits for the device"))
                cuda.set_sync_debug_mode("default")
                # Its outputs are needed by what follows.
                measurer.program.kernels[operator.index](slots)
            finally:
                cuda.set_sync_debug_mode(before)
    measurer.backend.synchronize()
    return found


def _named(operator: Operator, reason: str) -> Synchronising:
    return Synchronising(operator.index, f"{operator.name} ({operator.kind})", reason, operator.source)


def _reason(call: Call, graph: OpGraph) -> str:
    name = call.target.partition(".")[0]
    if name.startswith("inductor::"):
        # A launch of generated code, which has no sizes that depend on values; whether it waits for the device is seen by running it.
        return ""
    if name in _READS_BACK:
        return "reads a value back to the host"
    tags = set(getattr(resolve(call.target), "tags", ()))
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    if unsafe is not None and unsafe in tags:
        return "is marked by PyTorch as unsafe in CUDA graphs"
    if torch.Tag.data_dependent_output in tags:
        return "makes a result that depends on values on the host"
    if name in _INDEXING and any(graph.values[value].spec.dtype in ("bool", "uint8") for value in _indices(call)):
        return "indexes with a mask, whose result has a size only the device knows"
    return ""


def _indices(call: Call) -> Iterator[int]:
    for argument in call.args[1:2]:
        if isinstance(argument, Many):
            yield from (item.value for item in argument.items if isinstance(item, Ref))
