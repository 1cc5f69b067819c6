"""On a CPU: pictures made of rows of tokens are channels last, as they lie in memory."""

from __future__ import annotations

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.channels_last import in_channels_last_order
from autosched.capture.passes.spelling import respelled
from autosched.capture.passes.views import RESHAPES, depends_on_strides, loosen_views
from autosched.core.program import Ref

aten = torch.ops.aten


def order_token_pictures(draft: Draft) -> int:
    """``tokens.transpose(1, 2).reshape(1, c, height, width)`` becomes ``tokens.reshape(1, height, width, c).permute(0, 3, 1, 2)``.

    Both are the same view, but for the stride of the one picture, which ``reshape`` leaves as it finds it. PyTorch tells channels last by
    that one, too: what interpolates or pools, say, then walks through such a picture one channel after the other, in many times the time.
    Results after it come out channels last, so that ``view`` becomes ``reshape``. Returns the number of pictures.
    """
    if depends_on_strides(draft):
        return 0
    producers = draft.producers()

    def words(node: Node) -> list[Node]:
        tokens = _tokens(node, draft, producers)
        if tokens is None:
            return []
        batch, channels, height, width = draft.specs[node.outputs[0]].shape
        rows = draft.fresh()
        shape = [batch, height, width, channels]
        return [
            Node(aten.reshape.default, (Ref(tokens), shape), {}, (rows,), f"{node.name}_rows", node.source),
            Node(aten.permute.default, (Ref(rows), [0, 3, 1, 2]), {}, node.outputs, node.name, node.source),
        ]

    found = respelled(draft, words)
    if found:
        loosen_views(draft)
        draft.remove_dead()
    return found


def _tokens(node: Node, draft: Draft, producers: dict[int, Node]) -> int | None:
    """The rows of tokens that ``node`` views as one picture, if PyTorch does not take that for channels last."""
    source = node.tensor("self") if node.target in RESHAPES else None
    before = producers.get(source) if source is not None else None
    if source is None or before is None or not _turns(before, draft):
        return None
    tokens, made = before.tensor("self"), node.outputs[0]
    picture, turned = draft.specs[made], draft.specs[source]
    if tokens is None or len(picture.shape) != 4 or picture.shape[:2] != turned.shape[:2] or picture.shape[0] != 1:
        return None
    view = draft.storage[made] == draft.storage[tokens]
    return tokens if view and turned.strides[1] == 1 and not in_channels_last_order(picture) else None


def _turns(node: Node, draft: Draft) -> bool:
    """Whether it lets the last two of three dimensions change places."""
    if node.target == "aten::transpose.int":
        places = {node.argument("dim0"), node.argument("dim1")}
        return len(draft.specs[node.outputs[0]].shape) == 3 and {int(place) % 3 for place in places if isinstance(place, int)} == {1, 2}
    return node.target == "aten::permute.default" and node.argument("dims") in ([0, 2, 1], [0, -1, -2], [0, -1, 1], [0, 2, -2])
