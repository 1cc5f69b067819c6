"""On a CPU: a recurrent layer taken apart into its layers and directions, and the weights of LSTM packed once for oneDNN.

PyTorch runs the two directions of a layer one after the other; apart, they are two operators that may run at the same time. Its LSTM
packs the weights at every call, which for a few steps takes longer than the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from autosched.capture.draft import Draft, Node, is_dense
from autosched.capture.passes.onednn import as_dense, packable_dtypes
from autosched.core.graph import TensorSpec
from autosched.core.program import Ref

_LSTM = "aten::lstm.input"
_GRU = "aten::gru.input"
_OTHERS = (_GRU, "aten::rnn_tanh.input", "aten::rnn_relu.input")
_LSTM_MODE = 2  # of at::mkldnn_rnn_layer, which has no other
_GATES = 4


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """The call of a recurrent layer.

    Args:
        source: ``[steps, batch, inputs]``, or ``[batch, steps, inputs]`` if ``batch_first``.
        states: hidden and, of an LSTM, cell: ``[layers * directions, batch, hidden]`` each.
        weights: of each layer and direction, in PyTorch's order.
    """

    source: int
    states: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    has_biases: bool
    layers: int
    directions: int
    batch_first: bool


def part_cpu_recurrences(draft: Draft) -> int:
    """Each ``lstm`` with constant weights becomes ``mkldnn_rnn_layer`` calls, one for each layer and direction.

    A ``gru`` becomes as many calls of its own kind, as the kernel of our own takes them (``runtime.cpu_kernels.recurrent``); a plain
    recurrent layer, only if it has two directions. Whole sequences are turned around for the second one.
    """
    if draft.device.type != "cpu":
        return 0
    fixed = draft.fixed_values()
    body: list[Node] = []
    applied = 0
    for node in draft.nodes:
        found = _read(node, draft, fixed)
        if found is None:
            body.append(node)
            continue
        body += _Parts(draft, node, found).made()
        applied += 1
    draft.nodes = body
    draft.remove_dead()
    return applied


def _read(node: Node, draft: Draft, fixed: set[int]) -> _Recurrence | None:
    if node.target not in (_LSTM, *_OTHERS) or node.argument("train"):
        return None
    source, states, values = node.tensor("input"), _values(node.argument("hx")), _values(node.argument("params"))
    if source is None or states is None or values is None:
        return None
    layers, directions = int(str(node.argument("num_layers"))), 1 + bool(node.argument("bidirectional"))
    each = 2 + 2 * bool(node.argument("has_biases"))
    # More of them where the hidden state is projected, for which oneDNN has nothing here.
    if len(values) != layers * directions * each or not all(value in fixed for value in values):
        return None
    if node.target == _LSTM:
        if not _packable([draft.specs[value] for value in (source, *states, *values)]):
            return None
    elif directions == 1 and (node.target != _GRU or (layers == 1 and not node.argument("batch_first"))):
        return None
    return _Recurrence(
        source,
        states,
        tuple(values[place : place + each] for place in range(0, len(values), each)),
        bool(node.argument("has_biases")),
        layers,
        directions,
        bool(node.argument("batch_first")),
    )


def _values(argument: object) -> tuple[int, ...] | None:
    """Of one tensor or a list of them; none if anything else is among these."""
    items = argument if isinstance(argument, list) else [argument]
    found = tuple(item.value for item in items if isinstance(item, Ref))
    return found if len(found) == len(items) else None


def _packable(specs: Sequence[TensorSpec]) -> bool:
    dtypes = {spec.dtype for spec in specs}
    # oneDNN has no LSTM in float16 on processors that have products in it.
    return len(dtypes) == 1 and dtypes <= packable_dtypes() - {"float16"} and all(spec.elements for spec in specs)


@dataclass(slots=True)
class _Parts:
    """Writes the calls that stand for ``node``."""

    draft: Draft
    node: Node
    layer: _Recurrence
    calls: list[Node] = field(default_factory=list)

    def made(self) -> list[Node]:
        """The calls, which fill the outputs that ``node`` fills."""
        aten: Any = torch.ops.aten
        layer, draft = self.layer, self.draft
        shape, dense = draft.specs[layer.source].shape, is_dense(draft.specs[layer.source])
        source = layer.source
        if layer.batch_first:
            shape = (shape[1], shape[0], *shape[2:])
            dense = dense and (shape[0] == 1 or shape[1] == 1)
            source = self._call(aten.transpose.int, (Ref(source), 0, 1))
        source = source if dense else self._dense(source)
        states = [value if is_dense(draft.specs[value]) else self._dense(value) for value in layer.states]
        last: list[list[int]] = [[] for _ in states]
        for number in range(layer.layers):
            outputs = []
            for direction in range(layer.directions):
                place = number * layer.directions + direction
                own = [self._slice(value, place) for value in states]
                output, *after = self._cell(source, shape, own, layer.weights[place], backwards=direction == 1)
                outputs.append(output)
                for column, value in zip(last, after, strict=True):
                    column.append(value)
            source = self._joined(outputs, 2)
            hidden = draft.specs[layer.states[0]].shape[2]
            shape = (*shape[:2], hidden * layer.directions)
        if layer.batch_first:
            source = self._call(aten.transpose.int, (Ref(source), 0, 1))
        self._stand_for([source, *(self._joined(column, 0) for column in last)])
        return self.calls

    def _cell(self, source: int, shape: Sequence[int], states: list[int], weights: Sequence[int], *, backwards: bool) -> list[int]:
        """One layer in one direction: its output ``[steps, batch, hidden]``, and the states after the last step."""
        layer, aten = self.layer, torch.ops.aten
        if self.node.target == _LSTM:
            first, second, *biases = self._packed(weights, shape, backwards=backwards)
            sizes = (_LSTM_MODE, self.draft.specs[layer.states[0]].shape[2], 1, layer.has_biases, False, False, False)
            refs = [Ref(value) for value in (source, first, second, *biases, *states)]
            made = tuple(self.draft.fresh() for _ in range(3))
            # The fourth is for training.
            self.calls.append(self._node(aten.mkldnn_rnn_layer.default, (*refs, backwards, [], *sizes), (*made, -1), "lstm"))
            return list(made)
        if backwards:
            source = self._call(aten.flip.default, (Ref(source), [0]))
        made = (self.draft.fresh(), self.draft.fresh())
        options = (layer.has_biases, 1, 0.0, False, False, False)
        self.calls.append(self._node(self.node.op, (Ref(source), Ref(states[0]), [Ref(value) for value in weights], *options), made, "one"))
        output = self._call(aten.flip.default, (Ref(made[0]), [0])) if backwards else made[0]
        return [output, made[1]]

    def _packed(self, weights: Sequence[int], shape: Sequence[int], *, backwards: bool) -> list[int]:
        """Weights as oneDNN wants them for sequences of ``shape``, and two biases."""
        draft, mkldnn, aten = self.draft, torch.ops.mkldnn, torch.ops.aten
        hidden = draft.specs[self.layer.states[0]].shape[2]
        both = (draft.fresh(), draft.fresh())
        plain = [as_dense(draft, self.node, weight) for weight in weights[:2]]
        args = (*plain, hidden, backwards, self.layer.has_biases, False, list(shape))
        draft.prologue.append(self._node(mkldnn._reorder_mkldnn_rnn_layer_weight.default, args, both, "packed"))
        if self.layer.has_biases:
            return [*both, *weights[2:]]
        none = draft.fresh()
        draft.prologue.append(self._node(aten.new_zeros.default, (Ref(weights[0]), [_GATES * hidden]), (none,), "no_bias"))
        return [*both, none, none]

    def _slice(self, value: int, place: int) -> int:
        if self.layer.layers * self.layer.directions == 1:
            return value
        return self._call(torch.ops.aten.slice.Tensor, (Ref(value), 0, place, place + 1))

    def _dense(self, value: int) -> int:
        return self._call(torch.ops.aten.clone.default, (Ref(value),), memory_format=torch.contiguous_format)

    def _joined(self, values: list[int], dim: int) -> int:
        return values[0] if len(values) == 1 else self._call(torch.ops.aten.cat.default, ([Ref(value) for value in values], dim))

    def _call(self, op: OpOverload[..., Any], args: tuple[object, ...], **options: object) -> int:
        made = self.draft.fresh()
        self.calls.append(self._node(op, args, (made,), op._schema.name.partition("::")[2], **options))
        return made

    def _node(self, op: OpOverload[..., Any], args: tuple[object, ...], outputs: tuple[int, ...], name: str, /, **options: object) -> Node:
        return Node(op, args, dict(options), outputs, f"{self.node.name}_{name}", self.node.source)

    def _stand_for(self, values: Sequence[int]) -> None:
        """Let the calls fill what ``node`` filled."""
        named = {value: output for value, output in zip(values, self.node.outputs, strict=True) if output >= 0}
        for call in self.calls:
            call.substitute(named)
            call.outputs = tuple(named.get(value, value) for value in call.outputs)
