"""Give the model's outputs back the strides they had before it was traced, and before it was rewritten."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autosched.capture.draft import Draft, Node, contiguous_strides
from autosched.capture.passes.identities import same_layout
from autosched.core.graph import TensorSpec
from autosched.core.program import Ref


def restore_output_layout(draft: Draft, wanted: Sequence[TensorSpec | None]) -> int:
    """A copy after each output that tracing or a rewrite made channels last and that was row-major before (or the reverse).

    ``wanted`` has, for each output leaf and then for each write, its spec before that. Code after the model may call ``view`` on it.
    One that had gaps, being a part of a larger tensor, gets none back, but may be viewed in every way in which it could be.

    Returns:
        How many copies. What leaves the model twice is copied once: its owner may write to one and read the other.
    """
    copies: dict[tuple[int, torch.memory_format], Ref] = {}
    leaves: list[object] = []
    for leaf, spec in zip([*draft.output_leaves, *(Ref(value) for _, value in draft.writes)], wanted, strict=True):
        if isinstance(leaf, Ref) and spec is not None and not same_layout(draft.specs[leaf.value], spec):
            layout = format_of(spec)
            if layout is None and not _joins(spec) <= _joins(draft.specs[leaf.value]):
                layout = torch.contiguous_format
            if layout is not None:
                if (copy := copies.get((leaf.value, layout))) is None:
                    copy = copies[leaf.value, layout] = Ref(draft.fresh())
                    options: dict[str, object] = {"memory_format": layout}
                    draft.nodes.append(Node(torch.ops.aten.clone.default, (leaf,), options, (copy.value,), "output_layout"))
                leaf = copy
        leaves.append(leaf)
    count = len(draft.output_leaves)
    draft.output_leaves = leaves[:count]
    draft.writes = [(target, leaf.value) for (target, _), leaf in zip(draft.writes, leaves[count:], strict=True) if isinstance(leaf, Ref)]
    return len(copies)


def _joins(spec: TensorSpec) -> set[int]:
    """Which dimensions, of those larger than one, a view may join with the next; the last, if its elements lie side by side."""
    kept = [(size, stride) for size, stride in zip(spec.shape, spec.strides, strict=True) if size != 1]
    following = [size * stride for size, stride in kept[1:]] + [1]
    return {place for place, ((_, stride), step) in enumerate(zip(kept, following, strict=True)) if stride == step}


def format_of(spec: TensorSpec) -> torch.memory_format | None:
    """The format that a copy into these strides has; None if there is none."""
    if spec.strides == contiguous_strides(spec.shape):
        return torch.contiguous_format
    if len(spec.shape) == 4 and spec.strides == channels_last_strides(spec.shape):
        return torch.channels_last
    return None


def channels_last_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor ``[batch, channels, height, width]`` whose channels lie side by side."""
    return tuple(torch.empty(tuple(shape), device="meta", memory_format=torch.channels_last).stride())
