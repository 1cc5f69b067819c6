"""On a CPU: activations whose kernels take several times as long as others', spelled with those others."""

from __future__ import annotations

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.spelling import Spelling, respelled
from autosched.core.byte_products import INT_MM, byte_product, whole_views
from autosched.core.gelu import CUBIC, LINEAR
from autosched.core.program import Ref

aten = torch.ops.aten
# From here on mish(x) is x in float32, and e ** (2 x) is still a number.
_MISH_IS_X = 20.0
# With fewer elements several calls take longer than one slow one.
_LEAST_ELEMENTS = 1 << 13


def spell_slow_activations(draft: Draft) -> int:
    """``gelu`` by the hyperbolic tangent, ``1 + tanh(x)`` and ``mish`` in float32, by sigmoid and exp: a tenth of the time where a compiler
    writes one loop of it, and less than their own kernels' otherwise. Rounding differs in the last bits. What a product in eight bits takes
    in keeps its name, by which it is known there.
    """
    users, producers, leaving = draft.users(), draft.producers(), set(draft.output_values())
    views = whole_views(draft.nodes, draft.specs)
    products = (byte_product(node, draft.specs, views, users, leaving) for node in draft.nodes if node.target == INT_MM)
    taken_in = {node for product in products if product is not None for node in product.path}

    def words(node: Node) -> list[Node]:
        source = node.tensor("self") if node.kind in ("aten::gelu", "aten::mish", "aten::add") else None
        if source is None or node in taken_in or node.mutates() or node.outputs[0] < 0 or not _large(draft, source):
            return []
        if node.kind == "aten::gelu" and node.argument("approximate") == "tanh":
            return _gelu(Spelling(draft, node), source)
        if node.kind == "aten::mish":
            return _mish(Spelling(draft, node), source)
        if node.target == "aten::add.Tensor" and node.args[1:] == (1,) and not node.kwargs:
            tangent = producers.get(source)
            given = tangent.tensor("self") if tangent is not None and tangent.target == "aten::tanh.default" else None
            # Integers have a tangent in float32, too, and twice an integer may be more than there is.
            alone = len(users[source]) == 1 and source not in leaving
            if given is not None and _large(draft, given) and alone:
                return _tangent_and_one(Spelling(draft, node), given)
        return []

    changed = respelled(draft, words)
    draft.remove_dead()
    return changed


def _large(draft: Draft, value: int) -> bool:
    return draft.specs[value].dtype == "float32" and draft.specs[value].elements >= _LEAST_ELEMENTS


def _gelu(spell: Spelling, source: int) -> list[Node]:
    x = Ref(source)
    square = spell.call(aten.mul.Tensor, x, x)
    factor = spell.call(aten.add.Tensor, spell.call(aten.mul.Tensor, square, CUBIC), LINEAR)
    spell.call(aten.mul.Tensor, x, spell.call(aten.sigmoid.default, spell.call(aten.mul.Tensor, factor, x)))
    return spell.finished()


def _mish(spell: Spelling, source: int) -> list[Node]:
    """``x * tanh(log(1 + e ** x))``, where ``tanh(log(z))`` is ``(z ** 2 - 1) / (z ** 2 + 1)``."""
    power = spell.call(aten.exp.default, spell.call(aten.clamp_max.default, Ref(source), _MISH_IS_X))
    above = spell.call(aten.mul.Tensor, power, spell.call(aten.add.Tensor, power, 2))
    share = spell.call(aten.div.Tensor, above, spell.call(aten.add.Tensor, above, 2))
    spell.call(aten.mul.Tensor, Ref(source), share)
    return spell.finished()


def _tangent_and_one(spell: Spelling, given: int) -> list[Node]:
    half = spell.call(aten.sigmoid.default, spell.call(aten.mul.Tensor, Ref(given), 2))
    spell.call(aten.mul.Tensor, half, 2)
    return spell.finished()
