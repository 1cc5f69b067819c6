"""On a CPU: convolutions in sixteen bits that oneDNN has no kernel for, in float32."""

from __future__ import annotations

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.activations import read_activation
from autosched.capture.passes.convolution import Convolution, read_convolution
from autosched.capture.passes.onednn import packable_dtypes
from autosched.capture.passes.spelling import Spelling
from autosched.core.program import Ref

aten = torch.ops.aten
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def widen_convolutions(draft: Draft) -> int:
    """Those with constant weights, and an activation behind, are computed in float32 and rounded once, where PyTorch's own loops take a
    hundred times as long. Weights that a batch norm was folded into are taken as they were before they were rounded. Returns how many
    convolutions are.
    """
    fixed, users, leaving = draft.fixed_values(), draft.users(), set(draft.output_values())
    slow = _HALVES.keys() - packable_dtypes()
    nodes: list[Node] = []
    gone: set[Node] = set()
    widened = _unrounded(draft)
    count = 0
    for node in draft.nodes:
        convolution = read_convolution(node)
        if convolution is None or not _widenable(convolution, node, draft, fixed, slow):
            nodes += [] if node in gone else [node]
            continue
        following = users.get(node.outputs[0], [])
        activated = len(following) == 1 and node.outputs[0] not in leaving and following[0].args[0] == Ref(node.outputs[0])
        last = following[0] if activated and read_activation(following[0]) is not None else None
        nodes += _widened(draft, node, convolution, last, widened)
        gone |= set() if last is None else {last}
        count += 1
    draft.nodes = nodes
    if count:
        draft.remove_dead()
    return count


def _unrounded(draft: Draft) -> dict[int, Ref]:
    """What passes before this one have computed in float32 and rounded, by what it was rounded to; a model's own calls are others."""
    rounded = {node.outputs[0]: node.tensor("self") for node in draft.prologue if node.target == "aten::to.dtype"}
    return {value: Ref(source) for value, source in rounded.items() if source is not None and draft.specs[source].dtype == "float32"}


def _widenable(convolution: Convolution, node: Node, draft: Draft, fixed: set[int], slow: set[str]) -> bool:
    given = [convolution.source, convolution.weight, *(() if convolution.bias is None else (convolution.bias,))]
    dtypes = {draft.specs[value].dtype for value in given}
    return node.outputs[0] >= 0 and fixed.issuperset(given[1:]) and len(dtypes) == 1 and dtypes <= slow


def _widened(draft: Draft, node: Node, convolution: Convolution, activation: Node | None, known: dict[int, Ref]) -> list[Node]:
    """What stands in the place of ``node`` and, if there is one, of the ``activation`` behind it.

    Args:
        known: values in float32, by what they were; what is made is added.
    """
    source, dtype = convolution.source, _HALVES[draft.specs[convolution.source].dtype]
    spell = Spelling(draft, activation or node)
    if source not in known:
        known[source] = spell.call(aten._to_copy.default, Ref(source), dtype=torch.float32)
    for value in (convolution.weight, convolution.bias):
        if value is not None and value not in known:
            known[value] = Ref(draft.prepare(node, "wide", aten.to.dtype, Ref(value), torch.float32))

    def wide(argument: object) -> object:
        return known.get(argument.value, argument) if isinstance(argument, Ref) else argument

    made = spell.call(node.op, *map(wide, node.args), **{name: wide(argument) for name, argument in node.kwargs.items()})
    if activation is not None:
        made = spell.call(activation.op, made, *activation.args[1:], **activation.kwargs)
    spell.call(aten._to_copy.default, made, dtype=dtype)
    return spell.finished()
