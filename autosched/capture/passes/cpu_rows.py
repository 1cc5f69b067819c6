"""On a CPU, where a compiler is at hand: products of one row, however they are spelt, as the ``linear`` that it writes loops for.

See ``core.row_products`` for why. A convolution whose kernel covers its whole input, as in a squeeze-and-excitation block, is one too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autosched.capture.draft import Draft, Node, is_dense
from autosched.capture.passes.convolution import Convolution, read_convolution
from autosched.capture.passes.cpu_linear import turned
from autosched.capture.passes.linear import Linear, read_linear
from autosched.capture.passes.narrow_weights import NarrowWeights
from autosched.capture.passes.views import depends_on_strides
from autosched.core.graph import TensorSpec
from autosched.core.program import Ref
from autosched.core.row_products import LINEAR, matrix_of


def spell_row_products(draft: Draft) -> int:
    """``addmm``, ``mm`` and convolutions of one row with constant weights become ``linear``.

    A weight that is stored by inputs is turned once, so that what makes one output lies together. One that is made from narrower constants
    (``narrow_weights``) is made in front of each product, whose compiled loop then reads the narrower ones.
    """
    if draft.device.type != "cpu":
        return 0
    speller = _Speller(draft)
    draft.nodes = [made for node in draft.nodes for made in speller.spell(node)]
    draft.remove_dead()
    return speller.count


class _Speller:
    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._fixed = draft.fixed_values()
        self._narrow = NarrowWeights(draft)
        self._strides_matter = depends_on_strides(draft)
        self._turned: dict[int, int] = {}
        self.count = 0

    def spell(self, node: Node) -> list[Node]:
        """The nodes in place of ``node``; itself if it is no such product, or spelt as one already."""
        linear, convolution = read_linear(node), read_convolution(node)
        if linear is not None and linear.weight in self._fixed:
            weight = self._draft.specs[linear.weight]
            shape = weight.shape[::-1] if linear.by_rows else weight.shape
            if self._is_row(self._draft.specs[linear.source], linear.weight, shape, linear.bias):
                return self._read_once(node, linear, shape)
        if convolution is not None and not self._strides_matter and self._covers(convolution):
            self.count += 1
            return self._flat(node, convolution)
        return [node]

    def _read_once(self, node: Node, linear: Linear, shape: Sequence[int]) -> list[Node]:
        """The product with its weight as narrow, and as few times in memory, as it can be read; ``shape`` is ``[outputs, inputs]``."""
        together = self._draft.specs[linear.weight].strides == ((1, shape[1]) if linear.by_rows else (shape[1], 1))
        narrow = self._narrow.made_in_place(linear.weight) if together else None
        if narrow is None and not linear.by_rows:
            return [node]
        self.count += 1
        nodes, weight = narrow or ([], linear.weight)
        if linear.by_rows and together:
            nodes.append(Node(torch.ops.aten.t.default, (Ref(weight),), {}, (self._draft.fresh(),), f"{node.name}_t", node.source))
            weight = nodes[-1].outputs[0]
        elif linear.by_rows:
            if weight not in self._turned:
                self._turned[weight] = turned(self._draft, node, weight)
            weight = self._turned[weight]
        return [*nodes, self._linear(node, linear.source, weight, linear.bias, node.outputs)]

    def _is_row(self, source: TensorSpec, weight: int, shape: Sequence[int], bias: int | None) -> bool:
        """Whether it is one once the weight lies in memory as ``shape`` says."""
        dense = TensorSpec(tuple(shape), self._draft.specs[weight].dtype, (shape[-1], 1)) if len(shape) == 2 else None
        return dense is not None and matrix_of(LINEAR, (source, dense, self._draft.specs[bias] if bias is not None else None)) is not None

    def _covers(self, convolution: Convolution) -> bool:
        """Whether the kernel is as large as the input, of one image, so that there is one place to put it."""
        source, weight = self._draft.specs[convolution.source], self._draft.specs[convolution.weight]
        if convolution.transposed or convolution.groups != 1 or any(convolution.padding) or len(source.shape) < 3:
            return False
        dilated = any(item != 1 for item in convolution.dilation) and weight.elements != weight.shape[0] * weight.shape[1]
        if source.shape != (1, *weight.shape[1:]) or dilated:
            return False
        if convolution.weight not in self._fixed or not is_dense(weight):
            return False
        inputs = weight.elements // max(1, weight.shape[0])
        flat = TensorSpec((1, inputs), source.dtype, (inputs, 1))
        return self._is_row(flat, convolution.weight, (weight.shape[0], inputs), convolution.bias)

    def _flat(self, node: Node, convolution: Convolution) -> list[Node]:
        draft = self._draft
        outputs = draft.specs[convolution.weight].shape[0]
        row, matrix, made = draft.fresh(), draft.fresh(), draft.fresh()
        reshape, view = torch.ops.aten.reshape.default, torch.ops.aten.view.default
        return [
            Node(reshape, (Ref(convolution.source), [1, -1]), {}, (row,), f"{node.name}_row", node.source),
            Node(view, (Ref(convolution.weight), [outputs, -1]), {}, (matrix,), f"{node.name}_matrix", node.source),
            self._linear(node, row, matrix, convolution.bias, (made,)),
            Node(view, (Ref(made), list(draft.specs[node.outputs[0]].shape)), {}, node.outputs, f"{node.name}_image", node.source),
        ]

    def _linear(self, node: Node, source: int, weight: int, bias: int | None, outputs: tuple[int, ...]) -> Node:
        args = (Ref(source), Ref(weight), Ref(bias) if bias is not None else None)
        return Node(torch.ops.aten.linear.default, args, {}, outputs, node.name, node.source)
