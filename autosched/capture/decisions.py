"""What a model asks its own tensors to decide what runs (``if self.inited:``, ``self.step.item() > 0``), answered while it is exported.

Export knows no numbers, and gives up where one decides. Those of parameters and buffers are known here: a program is then for these
numbers, and names the tensors that were asked (``Program.decided``), so that it runs on no model in which they are others. What depends on
anything else is left to export, and so is what the call may have changed before it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from autosched.capture.draft import Draft
from autosched.capture.dynamo import DynamoGraph
from autosched.capture.export_reader import OWN_CHANGES
from autosched.capture.screen import explain_export_failure
from autosched.core.decided import can_decide, digest_of
from autosched.core.errors import UnsupportedGraph
from autosched.core.extents import storage_of
from autosched.core.from_outside import let_through
from autosched.core.program import ConstantSource, Decision

# Names of functions and methods. These are answered with numbers.
_ASKS = frozenset(
    ("__bool__", "__complex__", "__float__", "__index__", "__int__", "allclose", "equal", "is_nonzero", "item", "tolist")
)  # fmt: skip
# These look at no numbers.
_LOOKS = frozenset(
    (
        "__format__", "__len__", "__repr__", "_is_view", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
        "is_floating_point", "is_inference", "is_signed", "ndimension", "nelement", "numel", "size", "storage_offset", "stride",
    )
)  # fmt: skip
# These change nothing, and make a tensor that may lie in the memory of the one that they are given.
_VIEWS = frozenset(
    (
        "__get__", "__getitem__", "bool", "contiguous", "cpu", "cuda", "detach", "double", "flatten", "float", "half", "int", "long",
        "permute", "ravel", "reshape", "select", "squeeze", "to", "transpose", "type", "unbind", "unsqueeze", "view",
    )
)  # fmt: skip
# These change nothing, and make tensors with memory of their own.
_MAKES = frozenset(
    (
        "__and__", "__eq__", "__floordiv__", "__invert__", "__or__", "__pow__", "__rdiv__", "__rpow__", "__rsub__", "__xor__", "abs", "add",
        "all", "amax", "amin", "any", "argmax", "argmin", "bitwise_and", "bitwise_not", "bitwise_or", "clone", "count_nonzero", "div", "eq",
        "floor_divide", "ge", "gt", "isfinite", "isinf", "isnan", "le", "logical_and", "logical_not", "logical_or", "logical_xor", "lt",
        "max", "maximum", "mean", "min", "minimum", "mul", "ne", "neg", "norm", "pow", "prod", "remainder", "sqrt", "sub", "sum", "where",
    )
)  # fmt: skip

_Place = tuple[ConstantSource, str]
_TABLES = ((ConstantSource.PARAMETER, "_parameters"), (ConstantSource.BUFFER, "_buffers"))


@dataclass(frozen=True, slots=True)
class _Known:
    """A traced tensor whose numbers follow from the model's own alone.

    Args:
        tensor: itself, so that no other takes its place in memory.
        places: what it was made of.
        number: a tensor with its numbers, computed when it is first asked for.
        version: how often it was changed by then. Code that was scripted is not seen here.
    """

    tensor: torch.Tensor
    places: frozenset[_Place]
    number: Callable[[], torch.Tensor]
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor, places: frozenset[_Place], number: Callable[[], torch.Tensor]) -> _Known:
        """As it is now."""
        # Of what is computed from itself, time after time, each step is computed once.
        return cls(tensor, places, cache(number), _version_of(tensor))

    @property
    def changed(self) -> bool:
        """Whether it was changed since."""
        return _version_of(self.tensor) != self.version


class Decisions(TorchFunctionMode):
    """Answers what ``model`` asks its parameters and buffers, while it is entered and the model is traced.

    A tensor that was given to a function that may write to it, or to what is made of it, is asked no more in that call.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._own: dict[_Place, torch.Tensor] = {}
        self._homes: list[tuple[_Place, dict[str, torch.Tensor | None], str]] = []
        # What Dynamo cuts out of a model does not decide.
        for path, module in () if isinstance(model, DynamoGraph) else model.named_modules():
            for source, kind in _TABLES:
                table = getattr(module, kind)
                for key, tensor in table.items() if isinstance(table, dict) else ():
                    if isinstance(tensor, torch.Tensor) and can_decide(tensor):
                        place = (source, f"{path}.{key}".lstrip("."))
                        self._own[place] = tensor
                        self._homes.append((place, table, key))
        self._modules = list(model.modules())
        self._known: dict[int, _Known] = {}
        self._lost: dict[_Place, str] = {}
        self._depth = 0
        self._asked: set[_Place] = set()
        self.obstacle = ""

    def begin(self, *_: object) -> None:
        """The model is about to be called: its tensors are those of a tracer by now, unless it calls itself."""
        self._depth += 1
        if self._depth > 1:
            return
        self._lost.clear()
        self._known.clear()
        for place, table, key in self._homes:
            if (tensor := table.get(key)) is not None:
                self._known[id(tensor)] = _Known.of(tensor, frozenset({place}), self._own[place].detach)

    def end(self, *_: object) -> None:
        """It has been called."""
        self._depth -= 1
        if not self._depth:
            self._known.clear()

    def require_kept(self, exported: ExportedProgram) -> None:
        """Refuse a model that changes, by its program with nothing changed in place, what it has asked.

        Before that is read: how something is initialised is often refused as well, and says less.

        Raises:
            UnsupportedGraph: naming what it changes.
        """
        changed = {item.target for item in exported.graph_signature.output_specs if item.kind in OWN_CHANGES} if self._asked else set()
        self._require_others(tensor for (_, name), tensor in self._own.items() if name in changed)

    def note(self, draft: Draft) -> None:
        """Write down in ``draft``, of the model as it was exported, by which tensors it decides.

        Raises:
            UnsupportedGraph: if it changes one of them.
        """
        self._require_others(constant.tensor for constant in draft.state.values())
        draft.decided = tuple(Decision(*place, digest_of(self._own[place])) for place in sorted(self._asked))

    def _require_others(self, changed: Iterable[torch.Tensor]) -> None:
        storages = set(map(storage_of, changed))
        for source, name in sorted(self._asked):
            if storage_of(self._own[source, name]) in storages:
                raise UnsupportedGraph(
                    f"the model decides by its {source} {name!r} what runs, and changes it in the same call: the next call may run "
                    "something else. Expected a tensor that calls leave as it is. If that is done once, as codebooks are initialised, do "
                    "it before: load trained weights, or call the model in the way that does it."
                )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """PyTorch's own protocol: called in the place of each function on tensors."""
        given = kwargs or {}
        # The functions that control flow is given: Dynamo would follow all that is below, and cannot.
        if torch.compiler.is_dynamo_compiling() or not (self._concerns(args, given) or getattr(func, "__name__", "") in _ASKS):
            return func(*args, **given)
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        found = [known for tensor in tensors if (known := self._known.get(id(tensor))) is not None]
        places = frozenset[_Place]().union(*(known.places for known in found))
        for known in found:
            if known.changed:
                self._lose(known.places, "a change in place")
        called = resolve_name(func) or ""
        # A function of anybody else's may do anything, whatever it is called.
        name = func.__name__ if called.startswith("torch.") else ""
        whole = bool(found) and len(found) == len(tensors)
        if name in _ASKS:
            if whole and places.isdisjoint(self._lost):
                self._asked |= places
                return self._compute(func, args, given)
            self._note_obstacle(tensors, places)
        answer = func(*args, **given)
        if found and name not in _ASKS:
            made = [item for item in tree_leaves(answer) if isinstance(item, torch.Tensor)]
            if "out" in given or not (name in _MAKES or (name in _LOOKS and not made) or (name in _VIEWS and (whole or not made))):
                self._lose(places, called or "an operator")
            elif whole:
                self._learn(answer, places, lambda: self._compute(func, args, given))
        return answer

    def _concerns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call may have something to do with what is known; export makes thousands that have not."""
        known = self._known
        if not known:
            return False
        return any(id(item) in known or isinstance(item, tuple | list | dict) for item in (*args, *kwargs.values()))

    def _lose(self, places: Iterable[_Place], why: str) -> None:
        for place in places:
            self._lost.setdefault(place, why)

    def _learn(self, answer: Any, places: frozenset[_Place], number: Callable[[], Any]) -> None:
        """What a function has made, a tensor or several, has the numbers that ``number`` computes."""
        if isinstance(answer, torch.Tensor):
            # Some return what they are given.
            self._known.setdefault(id(answer), _Known.of(answer, places, number))
        elif isinstance(answer, tuple | list):
            for place, item in enumerate(answer):
                self._learn(item, places, partial(_item_of, number, place))

    def _compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What it makes of the model's own tensors in the place of the tracer's."""

        def own(leaf: object) -> object:
            return self._known[id(leaf)].number() if isinstance(leaf, torch.Tensor) else leaf

        with _disable_current_modes(), torch.no_grad():
            return func(*tree_map(own, args), **tree_map(own, kwargs))

    def _note_obstacle(self, tensors: list[torch.Tensor], places: frozenset[_Place]) -> None:
        lost = sorted(places & self._lost.keys())
        if lost:
            source, name = lost[0]
            self.obstacle = (
                f"It is made of the model's {source} {name!r}, which the call may have changed before ({self._lost[lost[0]]}): expected "
                "one that calls leave as it is, asked before anything else is done with it."
            )
        own = (key for module in self._modules for key, value in vars(module).items() if any(value is tensor for tensor in tensors))
        if key := next(own, ""):
            self.obstacle = f"It is a tensor in the model's attribute {key!r}: register it as a buffer, whose numbers are looked at."


def _item_of(number: Callable[[], Any], place: int) -> Any:
    return number()[place]


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def decisions_answered(model: torch.nn.Module) -> Iterator[Decisions]:
    """While ``model`` is exported."""
    decisions = Decisions(model)
    hooks = []
    # A scripted module has no such hooks to run.
    if not isinstance(model, torch.jit.ScriptModule):
        hooks.append(model.register_forward_pre_hook(decisions.begin, prepend=True))
        hooks.append(model.register_forward_hook(decisions.end, always_call=True))
    try:
        with decisions:
            yield decisions
    except Exception as error:
        let_through(error)
        if isinstance(error, UnsupportedGraph) or not decisions.obstacle:
            raise
        raise explain_export_failure(error, decisions.obstacle) from error
    finally:
        for hook in hooks:
            hook.remove()
