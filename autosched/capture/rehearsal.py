"""One call of a model with real tensors, before it is traced.

What a model makes at its first call and keeps outside of itself (a table of cosines behind ``functools.lru_cache``, a mask in a dictionary
of its class) it would else make, for good, of a tracer's tensors, which have no values.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosched.capture.containers import real_containers
from autosched.capture.first_call import Before, Changes, with_other_values
from autosched.capture.leftovers import attributes_kept
from autosched.core.extents import storage_address
from autosched.core.from_outside import let_through
from autosched.core.graph import TensorSpec
from autosched.core.specs import spec_of


def rehearse(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Call ``model`` once, with packed arguments; afterwards it, its arguments and random numbers are as they were.

    Only what a first call makes for good stays as that has left it (:func:`_leave_what_stays`).

    Nothing is done where the arguments have no values either. What the model raises it raises again when it is traced, which explains it.

    Returns:
        How the tensors of its answer are laid out, in order; nothing where there is none.
    """
    if detect_fake_mode(_reached(model, args, kwargs)) is not None:
        return ()
    first = _call(model, args, kwargs)
    if first.changes.are_of_a_first_call:
        with torch.no_grad():
            _leave_what_stays(model, args, kwargs, first)
    return first.layout


@dataclass(frozen=True)
class _Called:
    """A call, after which all is as it was before it.

    Args:
        answer: copies of the tensors that it returned, if that was asked for or it may have been a first call.
    """

    layout: tuple[TensorSpec, ...] = ()
    answer: tuple[torch.Tensor, ...] = ()
    changes: Changes = field(default_factory=Changes)
    failed: bool = False


def _call(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, answered: bool = False) -> _Called:
    devices = {tensor.get_device() for tensor in _reached(model, args, kwargs) if tensor.is_cuda}
    with torch.no_grad(), warnings.catch_warnings(), torch.random.fork_rng(devices), attributes_kept(model):
        warnings.simplefilter("ignore")
        before = Before(model)
        undoing = _Undoing()
        try:
            # A part that is compiled at its first call, as control flow is, would take longer to compile than the rest to run.
            with real_containers(model), torch.compiler.set_stance("force_eager"), undoing:
                answer = _tensors(model(*args, **kwargs))
            changes = before.changes(undoing.written())
            copies = tuple(tensor.clone() for tensor in answer) if answered or changes.are_of_a_first_call else ()
            return _Called(tuple(map(spec_of, answer)), copies, changes)
        except Exception as error:
            let_through(error)
            return _Called(failed=True)
        finally:
            undoing.undo()


def _leave_what_stays(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], first: _Called) -> None:
    """Leave what ``first`` has made, if that is the same whatever it is given, and a second call changes nothing and answers alike.

    What a call makes of its inputs (a cache, statistics of the first batch) is not of the example that a model is captured with.
    """
    if not _call(model, *with_other_values(args, kwargs)).changes.same(first.changes):
        return
    first.changes.put()
    second = _call(model, args, kwargs, answered=True)
    if second.failed or second.changes != Changes() or not _close(first.answer, second.answer):
        first.changes.take_back()


def _close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    try:
        torch.testing.assert_close(list(one), list(other), equal_nan=True)
    except AssertionError:
        return False
    return True


class _Undoing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies what calls write to, unless calls have made it, so that it can be given back.

    To copy all that might be written to, weights among it, would take the memory of a second model.
    """

    # Nothing is to be undone of these themselves.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()
        self._copies: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = kwargs or {}
        if isinstance(func, OpOverload):
            written = [each for each in _written(func, args, given) if storage_address(each) not in self._made]
            # Some calls (t_) change how a tensor lies over its memory, and nothing there.
            self._copies += [(each, each.detach(), each.clone()) for each in written]
        answer = func(*args, **given)
        # What was there before lies, as long as the call lasts, where nothing is made.
        self._made |= {*map(storage_address, _tensors(answer))} - {0, *map(storage_address, _tensors((args, given)))}
        return answer

    def written(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of what was written to, each with a copy of what was there."""
        return [(place, before) for _, place, before in self._copies]

    def undo(self) -> None:
        """Give back what was written to."""
        for tensor, place, before in reversed(self._copies):
            if _lies(tensor) != _lies(place):
                tensor.set_(place)  # type: ignore[call-overload]
            # Whoever counts writes to this need not be told of none.
            if not torch.equal(place, before):
                # Of what was expanded and filled, one element may be written for all that share its memory.
                once = tuple(slice(1) if stride == 0 else slice(None) for stride in place.stride())
                place[once].copy_(before[once])


def _written(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        # Batch norm in training mode changes its statistics without a mark in its schema.
        if (alias is not None and alias.is_write) or argument.name.startswith("running_"):
            found += _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _reached(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """What a call has before it: arguments, parameters and buffers."""
    return [*_tensors((args, kwargs)), *model.parameters(), *model.buffers()]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _lies(tensor: torch.Tensor) -> tuple[object, ...]:
    return (storage_address(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()) if tensor.layout is torch.strided else ()
