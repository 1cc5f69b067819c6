"""Buffers of submodules that ``forward`` replaces (``self.hidden = new``), seen by ``torch.export``.

Export notices such an assignment on the root module alone; on any other it takes the buffer for one that never changes. While a model is
exported here, every submodule's buffer that was replaced is given, when the model's call ends, the contents of what replaced it, which
export notices everywhere. What the model returns of a buffer's old tensor, its root's too, is a copy, for export says of both that they are
the buffer. What replaces a buffer of the root by another shape or dtype is refused here, for export says nothing of it that helps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook

from autosched.core.containers import map_packed
from autosched.core.errors import UnsupportedGraph


@contextmanager
def assignments_seen(model: torch.nn.Module) -> Iterator[None]:
    """While ``model`` is exported."""
    if isinstance(model, torch.jit.ScriptModule):
        # It has no such hooks to run.
        yield
        return
    tables = {id(module._buffers) for module in model.modules() if isinstance(module._buffers, dict)}
    # By the dictionary that holds it, and its key there: what was there before the first assignment.
    began: dict[tuple[int, str], tuple[dict[str, Any], torch.Tensor]] = {}

    def note(module: torch.nn.Module, name: str, value: object) -> None:
        old = module._buffers.get(name)
        if id(module._buffers) in tables and isinstance(old, torch.Tensor):
            began.setdefault((id(module._buffers), name), (module._buffers, old))

    def settle(module: torch.nn.Module, args: object, result: Any) -> Any:
        replaced: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        for (_, key), (table, old) in began.items():
            new = table.get(key)
            if isinstance(new, torch.Tensor) and new is not old:
                replaced.append((table, key, old, new))
        began.clear()
        others = [item for item in replaced if (item[2].shape, item[2].dtype) != (item[3].shape, item[3].dtype)]
        for table, key, old, new in others:
            if table is model._buffers:
                raise UnsupportedGraph(
                    f"the model replaces its buffer {key!r}, {list(old.shape)} {old.dtype}, by one that is {list(new.shape)} {new.dtype}; "
                    "expected the same shape and dtype in every call. Keep one of the largest size and fill a part of it, or take it as an "
                    "input and return it."
                )
        # Those of the root export writes itself.
        inner = [item for item in replaced if item[0] is not model._buffers]
        if not replaced or others:
            return result
        # A result that is what was there before must not become what is there now.
        result = map_packed(lambda tensor: tensor.clone() if _is_among(tensor, replaced) else tensor, result)
        # One may be another's old tensor, or an input, of which export must be able to tell what becomes of it.
        news = [new.clone() for _, _, _, new in inner]
        for (table, key, old, _), new in zip(inner, news, strict=True):
            old.copy_(new)
            table[key] = old
        return result

    def _is_among(tensor: torch.Tensor, replaced: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]) -> bool:
        return any(tensor is old or (tensor._is_view() and tensor._base is old) for _, _, old, _ in replaced)

    noting = register_module_buffer_registration_hook(note)
    settling = model.register_forward_hook(settle)
    try:
        yield
    finally:
        noting.remove()
        settling.remove()


def set_aside_empty_buffers(model: torch.nn.Module) -> None:
    """Make the buffers of ``model`` itself that are ``None`` plain attributes; whoever calls this gives them back.

    ``torch.export`` counts them among the inputs of its graph, which they are not: what is assigned to one of them, or to a buffer after
    it, it copies to another input. An attribute it leaves alone, as it does a part's buffers.
    """
    buffers: object = model._buffers
    if not isinstance(buffers, dict):
        return  # a scripted module keeps them elsewhere
    for name in [name for name, tensor in buffers.items() if tensor is None]:
        vars(model)[name] = None
        del buffers[name]
