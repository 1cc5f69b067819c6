"""On a CPU: sums of products written as ``einsum``, spelled as the matrix products that they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.spelling import Spelling, respelled
from autosched.capture.passes.views import depends_on_strides, loosen_views
from autosched.core.program import Ref

aten = torch.ops.aten


def spell_einsums(draft: Draft) -> int:
    """``einsum`` of two tensors becomes ``matmul``, or ``linear`` where the second is a weight, as other passes know them.

    PyTorch's own call may lay its result out in another order of dimensions; what a view cannot join then is copied.
    """
    if depends_on_strides(draft):
        return 0
    fixed = draft.fixed_values()

    def words(node: Node) -> list[Node]:
        product = _product(node, draft) if node.target == "aten::einsum.default" and node.outputs[0] >= 0 else None
        return [] if product is None else _calls(draft, node, product, fixed)

    changed = respelled(draft, words)
    if changed:
        loosen_views(draft)
    return changed


@dataclass(frozen=True, slots=True)
class _Product:
    """A sum of products of two tensors.

    Args:
        operands: what is multiplied.
        terms: the letters of their dimensions.
        result: those of the result, in its order.
        sizes: of each letter.
    """

    operands: tuple[int, int]
    terms: tuple[str, str]
    result: str
    sizes: dict[str, int]

    def shared(self) -> str:
        """Letters of both operands and of the result."""
        return "".join(letter for letter in self.result if letter in self.terms[0] and letter in self.terms[1])

    def own(self, place: int) -> str:
        """Letters of the result that one operand alone has."""
        return "".join(letter for letter in self.result if letter not in self.terms[1 - place])

    def summed(self) -> str:
        """Letters that the result has not."""
        return "".join(letter for letter in self.terms[0] if letter not in self.result)


def _product(node: Node, draft: Draft) -> _Product | None:
    """What ``node`` sums, if every letter is in at least two places, once in each, and of the same size there."""
    equation, operands = node.argument("equation"), node.argument("tensors")
    if not isinstance(equation, str) or not isinstance(operands, list) or len(operands) != 2:
        return None
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    values = [item.value for item in operands if isinstance(item, Ref)]
    if not arrow or len(terms) != 2 or len(values) != 2:
        return None
    shapes = [draft.specs[value].shape for value in values]
    written = _without_dots([*terms, result], [len(shape) for shape in shapes])
    if written is None:
        return None
    one, other, result = written
    sizes = dict(zip(one, shapes[0], strict=True)) | dict(zip(other, shapes[1], strict=True))
    known = all(tuple(sizes[letter] for letter in term) == shape for term, shape in zip((one, other), shapes, strict=True))
    once = all(len(set(term)) == len(term) for term in written)
    twice = all(sum(letter in term for term in written) >= 2 for letter in sizes)
    product = _Product((values[0], values[1]), (one, other), result, sizes)
    whole = 0 not in sizes.values() and set(result) <= set(sizes) and product.summed()
    return product if known and once and twice and whole else None


def _without_dots(terms: list[str], dimensions: list[int]) -> tuple[str, str, str] | None:
    """Both terms and the result with a letter for each dimension; None if the dots of one stand for other dimensions than another's."""
    meant = [count - len(term.replace("...", "")) for term, count in zip(terms[:2], dimensions, strict=True)]
    dotted = {count for term, count in zip(terms[:2], meant, strict=True) if "..." in term}
    if any(count for term, count in zip(terms[:2], meant, strict=True) if "..." not in term) or len(dotted) > 1:
        return None
    taken = set("".join(terms))
    letters = [chr(code) for code in range(ord("A"), ord("Z") + 1) if chr(code) not in taken][: max(dotted, default=0)]
    one, other, result = (term.replace("...", "".join(letters)) for term in terms)
    return one, other, result


def _calls(draft: Draft, node: Node, product: _Product, fixed: set[int]) -> list[Node]:
    """What stands in the place of ``node``."""
    spell = Spelling(draft, node)
    shared, summed, left, right = product.shared(), product.summed(), product.own(0), product.own(1)
    sizes = product.sizes

    def arranged(place: int, *groups: str) -> Ref:
        """One operand, with its dimensions in that order and those of a group joined."""
        term, value = product.terms[place], Ref(product.operands[place])
        order = [term.index(letter) for group in groups for letter in group]
        if order != sorted(order):
            value = spell.call(aten.permute.default, value, order)
        shape = [math.prod(sizes[letter] for letter in group) for group in groups]
        return value if shape == [sizes[term[place]] for place in order] else spell.call(aten.reshape.default, value, shape)

    if not shared and product.operands[1] in fixed and draft.specs[product.operands[1]].dtype == draft.specs[product.operands[0]].dtype:
        made = spell.call(aten.linear.default, arranged(0, *left, summed), arranged(1, right, summed))
        lying = [*left, right]
    else:
        made = spell.call(aten.matmul.default, arranged(0, *shared, left, summed), arranged(1, *shared, summed, right))
        lying = [*shared, left, right]
    order = "".join(lying)
    parted = [sizes[letter] for letter in order]
    if parted != [math.prod(sizes[letter] for letter in group) for group in lying]:
        made = spell.call(aten.reshape.default, made, parted)
    if order != product.result:
        spell.call(aten.permute.default, made, [order.index(letter) for letter in product.result])
    return spell.finished()
