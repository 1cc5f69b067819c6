"""Which recurrent layers the kernel of our own computes: GRU and LSTM, one layer in one direction, in float32, with constant weights.

Others are taken apart into such (``capture.passes.cpu_recurrent``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autosched.config import own_recurrence_wanted
from autosched.core.graph import Operator, OpGraph, ValueRole
from autosched.core.program import Argument, Call, Many, Ref
from autosched.runtime.cpu_kernels.linear import is_dense
from autosched.runtime.cpu_kernels.weights import in_blocks

_GRU, _LSTM = "aten::gru.input", "aten::mkldnn_rnn_layer.default"
_GATES = {_GRU: 3, _LSTM: 4}
_GRU_ARGUMENTS = ("source", "state", "weights", "biases", "layers", "dropout", "train", "both", "batch_first")
# Weights of inputs and of states as oneDNN has them packed.
_LSTM_ARGUMENTS = (
    "source", "of_inputs", "of_states", "bias_of_inputs", "bias_of_states", "state", "cell", "backwards", "sizes", "mode", "hidden",
    "layers", "biases", "both", "batch_first", "train",
)  # fmt: skip
_PLAIN = {"layers": 1, "train": False, "both": False, "batch_first": False}
_LSTM_MODE = 2
_VECTOR = 16  # the longest in use: units fill whole ones


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One that the kernel can compute.

    Args:
        source: the slot of ``[steps, batch, inputs]``.
        state, cell: slots of what there is before the first step, ``[1, batch, hidden]`` each; only an LSTM has a cell.
        made: the slot of the state after each step, ``[steps, batch, hidden]``.
        weights: slots, of inputs, of states, and their biases if there are any.
        backwards: whether the last step comes first.
        after: makes the state after the step that comes last, if that is read.
    """

    source: int
    state: int
    cell: int | None
    made: int
    weights: tuple[int, ...]
    steps: int
    batch: int
    inputs: int
    hidden: int
    backwards: bool
    after: Call | None

    turned = False
    groups = 1

    @property
    def beside(self) -> tuple[int, ...]:
        """What is read beside the source."""
        return (self.state,) if self.cell is None else (self.state, self.cell)

    @property
    def replaced(self) -> tuple[int, ...]:
        """The slots that it does without."""
        return self.weights


def may_be_recurrent(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` has a layer for the kernel."""
    return own_recurrence_wanted() and any(read_recurrence(call, graph) is not None for call in operator.calls)


def read_recurrence(call: Call, graph: OpGraph) -> Recurrence | None:
    """What ``call`` computes, if the kernel can; its slots are values of ``graph``."""
    names = {_GRU: _GRU_ARGUMENTS, _LSTM: _LSTM_ARGUMENTS}.get(call.target, ())
    if not names or call.kwargs or len(call.args) != len(names) or not call.outputs or call.outputs[0] < 0:
        return None
    given = dict(zip(names, call.args, strict=True))
    source, state, weights = _slot(given["source"]), _slot(given["state"]), _weights(given)
    cell = _slot(given["cell"]) if call.target == _LSTM else None
    if source is None or state is None or weights is None or any(given[name] != value for name, value in _PLAIN.items()):
        return None
    if call.target == _LSTM and (cell is None or given["mode"] != _LSTM_MODE or any(output >= 0 for output in call.outputs[2:])):
        # What the cells are after the last step is not written down.
        return None
    made, last = call.outputs[:2]
    specs = [graph.values[slot].spec for slot in (source, state, made, *(() if cell is None else (cell,)))]
    if any(len(spec.shape) != 3 or not is_dense(spec) for spec in specs):
        return None
    (steps, batch, inputs), hidden = specs[0].shape, specs[1].shape[2]
    if [spec.shape for spec in specs[1:]] != [(1, batch, hidden), (steps, batch, hidden), (1, batch, hidden)][: len(specs) - 1]:
        return None
    wide = _GATES[call.target] * hidden
    numbers = (wide * inputs, wide * hidden, wide, wide)
    if (
        min(steps, batch, inputs) < 1
        or hidden % _VECTOR
        or not all(_constant(graph, *each) for each in zip(weights, numbers, strict=False))
    ):
        return None
    backwards = bool(given.get("backwards", False))
    place = 0 if backwards else steps - 1
    after = Call("aten::narrow_copy.default", (Ref(made), 0, place, 1), (), (last,)) if last >= 0 else None
    return Recurrence(source, state, cell, made, weights, steps, batch, inputs, hidden, backwards, after)


def _slot(argument: Argument) -> int | None:
    return argument.value if isinstance(argument, Ref) and argument.value >= 0 else None


def _weights(given: Mapping[str, Argument]) -> tuple[int, ...] | None:
    """Slots of weights and biases, in the order of :func:`packed`."""
    if "weights" in given:
        items = given["weights"].items if isinstance(given["weights"], Many) else ()
    else:
        items = tuple(given[name] for name in ("of_inputs", "of_states", "bias_of_inputs", "bias_of_states"))
    found = [_slot(item) for item in items]
    known = tuple(slot for slot in found if slot is not None)
    # An LSTM without biases is given zeros.
    return known if len(known) == len(found) == (4 if given["biases"] or "weights" not in given else 2) else None


def _constant(graph: OpGraph, slot: int, numbers: int) -> bool:
    value = graph.values[slot]
    return value.role is ValueRole.CONSTANT and value.spec.dtype == "float32" and math.prod(value.spec.shape) == numbers


def packed(weights: Sequence[torch.Tensor], item: Recurrence, lanes: int) -> torch.Tensor:
    """Weights as ``recurrent.h`` reads them: float32, one dimension.

    Args:
        weights: of inputs, of states, and their biases if there are any. The first two are ``[gates * hidden, ...]`` or, as oneDNN has
            them, ``[1, 1, ..., gates, hidden]``.
        lanes: numbers in a vector.
    """
    hidden = item.hidden
    of_inputs, of_states = (each.reshape(-1, each.shape[-2] * hidden) if each.dim() == 5 else each.t() for each in weights[:2])
    wide = of_inputs.shape[1]
    none = torch.zeros(wide, dtype=torch.float32, device="cpu")
    biases = weights[2:] or (none, none)
    apart = of_states.reshape(hidden, -1, hidden)
    edge = hidden // (2 * lanes) * (2 * lanes)
    pairs = apart[:, :, :edge].reshape(hidden, wide // hidden, -1, 2 * lanes).permute(2, 0, 1, 3)
    parts = (in_blocks(of_inputs.unsqueeze(0), lanes), biases[0], pairs, apart[:, :, edge:], biases[1])
    return torch.cat([part.reshape(-1) for part in parts])


def geometry(item: Recurrence, width: int) -> torch.Tensor:
    """Numbers in the order of ``Layer`` in ``recurrent.h``, int64."""
    numbers = (width, item.steps, item.batch, item.inputs, item.hidden, int(item.backwards))
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
