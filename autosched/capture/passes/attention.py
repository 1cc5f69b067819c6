"""Masks of attention that are the same in every run: in the form that fused kernels take best, and what they leave to be filled. Copies
that it needs not.
"""

from __future__ import annotations

import torch

from autosched.capture.draft import Draft, Node, call
from autosched.capture.passes.identities import copied_from, drop_unchanged
from autosched.core.program import ConstantSource, Ref

_ATTENTION = "aten::scaled_dot_product_attention"


def settle_masks(draft: Draft) -> int:
    """Drop a mask that hides nothing, say *causal* in the place of a causal one, and on a GPU make others dense, of the query's type.

    Tracing keeps a mask that a model leaves out when it runs eagerly. A CPU's kernel then converts it at every call, and
    computes what a causal one hides. On a GPU, where the mask's last dimension is expanded (stride 0), as of masks made by tracing, PyTorch
    falls back from one fused kernel to a dozen small ones; and a mask of booleans is converted at every call there as well. What a mask's
    values tell is used only where no parameter or buffer has a part in them: those may change.
    """
    fixed = draft.fixed_values()
    settled = 0
    values: dict[int, torch.Tensor | None] = {}  # every layer has the same, as a rule
    dense: dict[tuple[int, str], int] = {}
    for node in draft.nodes:
        mask = node.tensor("attn_mask") if node.kind == _ATTENTION else None
        if mask is None or mask not in fixed:
            continue
        if mask not in values:
            values[mask] = value_of(draft, mask)
        known = values[mask]
        if known is not None and known.dtype == torch.bool and bool(known.all()):
            _set(node, "attn_mask", None)
        elif known is not None and _is_causal(known, draft, node):
            _set(node, "attn_mask", None)
            _set(node, "is_causal", True)
        elif draft.target != "cpu" and not _is_ready(draft, mask):
            query = draft.specs[_tensor(node, "query")].dtype
            if (mask, query) not in dense:
                dense[mask, query] = _densified(draft, node, mask, query)
            _set(node, "attn_mask", Ref(dense[mask, query]))
        else:
            continue
        settled += 1
    draft.remove_dead()
    return settled


def drop_idle_fills(draft: Draft) -> int:
    """Drop ``masked_fill`` where its mask says nowhere, in every run: zeros for queries that see nothing, of which there are none."""
    fixed = draft.fixed_values()
    idle: dict[int, bool] = {}

    def given_back(node: Node) -> int | None:
        mask = node.tensor("mask") if node.kind == "aten::masked_fill" else None
        if mask is None or mask not in fixed:
            return None
        if mask not in idle:
            known = value_of(draft, mask)
            idle[mask] = known is not None and not bool(known.any())
        return _tensor(node, "self") if idle[mask] else None

    return drop_unchanged(draft, given_back)


def attend_in_place(draft: Draft) -> int:
    """On a CPU: heads that are copied to lie apart, and whose rows lie whole already, are read where they are; how many.

    Kernels take any step from row to row. Models copy heads for GPUs, or because rows do not lie whole where pictures are channels first,
    as CoAtNet's do.
    """
    producers, written = draft.producers(), draft.written()
    read = 0
    for node in draft.nodes:
        if node.kind != _ATTENTION:
            continue
        mapping: dict[int, int] = {}
        for name in ("query", "key", "value"):
            value = _tensor(node, name)
            source = copied_from(value, producers, written, draft)
            if source is not None and draft.specs[source].strides[-1:] == (1,):
                mapping[value] = source
        node.substitute(mapping)
        read += len(mapping)
    draft.remove_dead()
    return read


def _is_causal(mask: torch.Tensor, draft: Draft, node: Node) -> bool:
    """Whether row ``i`` sees columns up to ``i``, as ``is_causal`` has it, for as many rows as columns."""
    rows, columns = (draft.specs[_tensor(node, name)].shape[-2] for name in ("query", "key"))
    if mask.dtype != torch.bool or rows != columns or tuple(mask.shape[-2:]) != (rows, columns):
        return False
    if scales_what_it_hides(node):
        return False
    return torch.equal(mask, torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril().expand_as(mask))


def scales_what_it_hides(node: Node) -> bool:
    """Whether attention cannot be causal: PyTorch's fused kernel for a CPU multiplies by the scale what it has hidden, and minus infinity
    becomes plus infinity, or not a number.
    """
    scale = node.argument("scale")
    return isinstance(scale, int | float) and scale <= 0


def _is_ready(draft: Draft, mask: int) -> bool:
    spec = draft.specs[mask]
    return spec.dtype != "bool" and bool(spec.strides) and (spec.shape[-1] == 1 or spec.strides[-1] == 1)


def value_of(draft: Draft, value: int) -> torch.Tensor | None:
    """What the prologue makes of literals alone; ``None`` if something that may change has a part in it."""
    makers = {output: node for node in draft.prologue for output in node.outputs if output >= 0}
    tensors: dict[int, torch.Tensor] = {}

    def know(wanted: int) -> bool:
        if wanted in tensors:
            return True
        if wanted in draft.constants:
            constant = draft.constants[wanted]
            tensors[wanted] = constant.tensor.detach()
            return constant.source is ConstantSource.LITERAL
        node = makers.get(wanted)
        if node is None or not all(know(read) for read in node.reads()):
            return False
        for output, made in zip(node.outputs, call(node, tensors.__getitem__), strict=True):
            if output >= 0 and isinstance(made, torch.Tensor):
                tensors[output] = made
        return wanted in tensors

    with torch.inference_mode():
        return tensors[value] if know(value) else None


def _densified(draft: Draft, node: Node, mask: int, dtype: str) -> int:
    """A value of the prologue: the mask, dense; of booleans, what is added to the scores."""
    aten = torch.ops.aten
    made = draft.fresh()
    if draft.specs[mask].dtype != "bool":
        draft.prologue.append(
            Node(aten.clone.default, (Ref(mask),), {"memory_format": torch.contiguous_format}, (made,), "mask", node.source)
        )
        return made
    hidden, zeros, kept = draft.fresh(), draft.fresh(), draft.fresh()
    options = {"dtype": getattr(torch, dtype), "memory_format": torch.contiguous_format}
    draft.prologue += [
        Node(aten.clone.default, (Ref(mask),), {"memory_format": torch.contiguous_format}, (kept,), "mask", node.source),
        Node(aten.logical_not.default, (Ref(kept),), {}, (hidden,), "mask", node.source),
        Node(aten.zeros_like.default, (Ref(kept),), options, (zeros,), "mask", node.source),
        Node(aten.masked_fill.Scalar, (Ref(zeros), Ref(hidden), float("-inf")), {}, (made,), "mask", node.source),
    ]
    return made


def _tensor(node: Node, name: str) -> int:
    value = node.tensor(name)
    assert value is not None
    return value


def _set(node: Node, name: str, item: object) -> None:
    for position, argument in enumerate(node.op._schema.arguments):
        if argument.name == name and position < len(node.args):
            node.args = (*node.args[:position], item, *node.args[position + 1 :])
            return
    node.kwargs[name] = item
