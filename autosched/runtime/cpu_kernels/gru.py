"""Which layers of gated recurrent units the kernel of our own computes: one layer in one direction, in float32, with constant weights.

Others are taken apart into such (``capture.passes.cpu_recurrent``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autosched.config import own_gru_wanted
from autosched.core.graph import Operator, OpGraph, TensorSpec, ValueRole
from autosched.core.program import Call, Many, Ref
from autosched.runtime.cpu_kernels.weights import in_blocks

_TARGET = "aten::gru.input"
_GATES = 3
_VECTOR = 16  # the longest in use: units fill whole ones


@dataclass(frozen=True, slots=True)
class Gru:
    """One that the kernel can compute.

    Args:
        source: the slot of ``[steps, batch, inputs]``.
        residual: the slot of the state before the first step, ``[1, batch, hidden]``, where other kernels have what is added.
        made: the slot of the state after each step, ``[steps, batch, hidden]``.
        weights: slots, in PyTorch's order: of inputs, of states, and their biases if there are any.
        after: makes the state after the last step, if that is read.
    """

    source: int
    residual: int
    made: int
    weights: tuple[int, ...]
    steps: int
    batch: int
    inputs: int
    hidden: int
    after: Call | None

    bias = None
    turned = False

    @property
    def replaced(self) -> tuple[int, ...]:
        """The slots that it does without."""
        return self.weights


def may_be_gru(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` has a layer for the kernel."""
    return own_gru_wanted() and any(read_gru(call, graph) is not None for call in operator.calls)


def read_gru(call: Call, graph: OpGraph) -> Gru | None:
    """What ``call`` computes, if the kernel can; its slots are values of ``graph``."""
    if call.target != _TARGET or call.kwargs or len(call.args) != 9 or len(call.outputs) != 2 or call.outputs[0] < 0:
        return None
    source, state, given, biases, layers, _, train, both, batch_first = call.args
    weights = tuple(item.value for item in given.items if isinstance(item, Ref)) if isinstance(given, Many) else ()
    plain = layers == 1 and not train and not both and not batch_first and len(weights) == (4 if biases else 2)
    if not isinstance(source, Ref) or not isinstance(state, Ref) or not plain or min(source.value, state.value, *weights) < 0:
        return None
    if any(graph.values[slot].role is not ValueRole.CONSTANT for slot in weights):
        return None
    specs = [graph.values[slot].spec for slot in (source.value, state.value, call.outputs[0])]
    if any(len(spec.shape) != 3 or not _dense(spec) for spec in specs):
        return None
    (steps, batch, inputs), hidden = specs[0].shape, specs[1].shape[2]
    wanted: list[tuple[int, ...]] = [(_GATES * hidden, inputs), (_GATES * hidden, hidden), (_GATES * hidden,), (_GATES * hidden,)]
    if (
        [spec.shape for spec in specs[1:]] != [(1, batch, hidden), (steps, batch, hidden)]
        or min(steps, batch, inputs) < 1
        or hidden % _VECTOR
    ):
        return None
    if any((spec.shape, spec.dtype) != (shape, "float32") for spec, shape in zip(_specs(weights, graph), wanted, strict=False)):
        return None
    made, last = call.outputs
    after = Call("aten::narrow_copy.default", (Ref(made), 0, steps - 1, 1), (), (last,)) if last >= 0 else None
    return Gru(source.value, state.value, made, weights, steps, batch, inputs, hidden, after)


def _specs(slots: Sequence[int], graph: OpGraph) -> list[TensorSpec]:
    return [graph.values[slot].spec for slot in slots]


def _dense(spec: TensorSpec) -> bool:
    """Whether it is of float32, and its elements lie one behind the other."""
    batch, hidden = spec.shape[1:]
    usual = (batch * hidden, hidden, 1)
    apart = [stride for size, stride, step in zip(spec.shape, spec.strides, usual, strict=False) if size > 1 and stride != step]
    return spec.dtype == "float32" and len(spec.strides) == 3 and not apart


def packed(weights: Sequence[torch.Tensor], lanes: int) -> torch.Tensor:
    """Weights as ``gru.h`` reads them: float32, one dimension.

    Args:
        weights: in PyTorch's order, with or without biases.
        lanes: numbers in a vector.
    """
    of_inputs, of_states = weights[:2]
    hidden = of_states.shape[1]
    none = torch.zeros(_GATES * hidden, dtype=torch.float32, device="cpu")
    biases = weights[2:] or (none, none)
    apart = of_states.t().reshape(hidden, _GATES, hidden)
    edge = hidden // (2 * lanes) * (2 * lanes)
    pairs = apart[:, :, :edge].reshape(hidden, _GATES, -1, 2 * lanes).permute(2, 0, 1, 3)
    parts = (in_blocks(of_inputs.t().unsqueeze(0), lanes), biases[0], pairs, apart[:, :, edge:], biases[1])
    return torch.cat([part.reshape(-1) for part in parts])


def geometry(gru: Gru, width: int) -> torch.Tensor:
    """Numbers in the order of ``Layer`` in ``gru.h``, int64."""
    return torch.tensor((width, gru.steps, gru.batch, gru.inputs, gru.hidden), dtype=torch.int64, device="cpu")
