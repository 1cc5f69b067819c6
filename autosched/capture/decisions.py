"""What a model asks its own tensors to decide what runs (``if self.inited:``, ``self.step.item() > 0``), answered while it is exported.

Export knows no numbers, and gives up where one decides. Those of parameters and buffers are known here: a program is then for these
numbers, and names the tensors that were asked (``Program.decided``), so that it runs on no model in which they are others. Known as well is
what a call makes of numbers alone (``torch.full((batch,), length).max()``), which is the same in each. What depends on anything else is
left to export, and so is what the call may have changed before it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
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
# These change nothing, and are not the names of PyTorch's operators, which say so themselves (``_written``).
_HARMLESS = frozenset(
    (
        "__eq__", "__floordiv__", "__format__", "__get__", "__getitem__", "__invert__", "__len__", "__pow__", "__rdiv__", "__repr__",
        "__rpow__", "__rsub__", "_is_view", "bool", "cpu", "cuda", "double", "float", "fold", "half", "int", "interpolate", "long",
        "ndimension", "nelement", "type",
    )
)  # fmt: skip
# These make tensors of as many elements as numbers say.
_PICKS = frozenset(("argwhere", "bincount", "masked_select", "nonzero", "repeat_interleave", "unique", "unique_consecutive"))
# These make tensors of numbers alone.
_FILLS = frozenset(
    ("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "scalar_tensor", "tensor", "zeros")
)  # fmt: skip
# These take sizes behind a tensor. A tensor may stand for its number there: PyTorch then asks it where nothing sees that.
_SIZED = frozenset(
    ("expand", "interpolate", "new_full", "new_ones", "new_zeros", "pad", "repeat", "reshape", "tile", "view")
)  # fmt: skip
# What those may be given of which a copy of the list around it is a copy.
_PLAIN = (
    bool, complex, float, int, str, slice, type(None), type(Ellipsis), torch.Size, torch.Tensor, torch.device, torch.dtype, torch.layout,
    torch.memory_format,
)  # fmt: skip

_NOTICED = _ASKS | _FILLS

# What a call makes of numbers alone is a literal, and called by how many there were before.
_Place = tuple[ConstantSource, str]
_OF_INPUTS: _Place = (ConstantSource.LITERAL, "")
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
    def is_literal(self) -> bool:
        """Whether it is made of numbers alone."""
        return all(source is ConstantSource.LITERAL for source, _ in self.places)

    @property
    def of_weights(self) -> bool:
        """Whether it has numbers that training changes, or that are made of such."""
        inexact = self.tensor.is_floating_point() or self.tensor.is_complex()
        return inexact and not self.is_literal

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
        self._lost = {_OF_INPUTS: "an input"}
        self._depth = 0
        self._literals = 0
        self._asked: set[_Place] = set()
        self.obstacle = ""

    def begin(self, *_: object) -> None:
        """The model is about to be called: its tensors are those of a tracer by now, unless it calls itself."""
        self._depth += 1
        if self._depth > 1:
            return
        self._lost = {_OF_INPUTS: "an input"}
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
        if torch.compiler.is_dynamo_compiling() or not (self._concerns(args, given) or getattr(func, "__name__", "") in _NOTICED):
            return func(*args, **given)
        called = resolve_name(func) or ""
        # A function of anybody else's may do anything, whatever it is called.
        name = func.__name__ if called.startswith("torch.") else ""
        args, given = self._with_numbers(name, args, given)
        leaves = tree_leaves((args, given))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        found = [known for tensor in tensors if (known := self._known.get(id(tensor))) is not None]
        places = frozenset[_Place]().union(*(known.places for known in found))
        for known in found:
            if known.changed:
                self._lose(known.places, "a change in place")
        whole = bool(found) and len(found) == len(tensors)
        if whole and places.isdisjoint(self._lost) and (name in _ASKS or _picks(name, args, found)):
            answer = self._ask(places, self._later(func, args, given))
            self._learn(answer, places, lambda: answer)
            return answer
        if name in _ASKS:
            self._note_obstacle(tensors, places)
        alone = len(found) == len(tensors) and "out" not in given and all(isinstance(leaf, _PLAIN) for leaf in leaves)
        assigned = self._known[id(args[0])] if alone and found and name == "__setitem__" else None
        answer = func(*args, **given)
        if alone and self._depth and name in _FILLS:
            self._learn(answer, places | {self._literal()}, self._later(func, args, given))
        elif assigned is not None and places.isdisjoint(self._lost) and assigned.is_literal:
            # Views of it, and what was made of it, are as it was.
            self._lose(assigned.places, called)
            made_of = (places - assigned.places) | {self._literal()}
            self._known[id(args[0])] = _Known.of(args[0], made_of, self._later(func, args, given))
        elif found and name not in _ASKS:
            written = () if name in _HARMLESS else _written(name)
            if "out" in given or written is None or (written and not args):
                self._lose(places, called or "an operator")
            elif written:
                changed = [known for item in args[:1] if (known := self._known.get(id(item))) is not None]
                self._lose((place for known in changed for place in known.places), called)
            elif whole:
                self._learn(answer, places, self._later(func, args, given))
            else:
                self._follow(tree_leaves(answer), found, places)
        return answer

    def _follow(self, made: list[Any], found: list[_Known], places: frozenset[_Place]) -> None:
        """Whoever writes to one of ``made`` that lies in the memory of what was known changes that; its own numbers nobody knows."""
        lying = {storage_of(known.tensor) for known in found}
        for tensor in made:
            if isinstance(tensor, torch.Tensor) and storage_of(tensor) in lying:
                self._known.setdefault(id(tensor), _Known.of(tensor, places | {_OF_INPUTS}, tensor.detach))

    def _literal(self) -> _Place:
        self._literals += 1
        return ConstantSource.LITERAL, str(self._literals)

    def _with_numbers(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with the numbers of known tensors where PyTorch takes numbers, and would ask the tensors for them unseen."""
        if name in _SIZED:
            return (*args[:1], *tree_map(self._number, args[1:])), tree_map(self._number, kwargs)
        # The tensor that these two are given, if it is one, they copy.
        if name in _FILLS and not (name in ("as_tensor", "tensor") and args and isinstance(args[0], torch.Tensor)):
            return tree_map(self._number, args), tree_map(self._number, kwargs)
        return args, kwargs

    def _number(self, item: Any) -> Any:
        """The number of a known tensor of a single one; anything else as it is."""
        known = self._known.get(id(item))
        if known is None or item.dim() or known.changed or not known.places.isdisjoint(self._lost):
            return item
        return self._ask(known.places, self._later(torch.Tensor.item, (item,), {}))

    def _ask(self, places: frozenset[_Place], number: Callable[[], Any]) -> Any:
        self._asked |= places & self._own.keys()
        return number()

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

    def _later(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """What computes what it makes of known tensors as they are now; of one that it writes to, what that then is."""
        numbers = {id(leaf): self._known[id(leaf)].number for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        # The lists among them may be others by then.
        return partial(_compute, func, tree_map(_same, args), tree_map(_same, kwargs), numbers)

    def _note_obstacle(self, tensors: list[torch.Tensor], places: frozenset[_Place]) -> None:
        lost = sorted(places & self._lost.keys() & self._own.keys())
        if lost:
            source, name = lost[0]
            self.obstacle = (
                f"It is made of the model's {source} {name!r}, which the call may have changed before ({self._lost[lost[0]]}): expected "
                "one that calls leave as it is, asked before anything else is done with it."
            )
        own = (key for module in self._modules for key, value in vars(module).items() if any(value is tensor for tensor in tensors))
        if key := next(own, ""):
            self.obstacle = f"It is a tensor in the model's attribute {key!r}: register it as a buffer, whose numbers are looked at."


def _compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], numbers: dict[int, Callable[[], Any]]) -> Any:
    def own(leaf: object) -> object:
        return numbers[id(leaf)]() if isinstance(leaf, torch.Tensor) else leaf

    with _disable_current_modes(), torch.no_grad():
        given = tree_map(own, args)
        if func.__name__ != "__setitem__":
            return func(*given, **tree_map(own, kwargs))
        changed = given[0].clone()
        func(changed, *given[1:])
        return changed


def _picks(name: str, args: tuple[Any, ...], found: list[_Known]) -> bool:
    """Whether a call makes a tensor whose size its arguments' numbers decide, of which the program may hold what it makes.

    Not of weights: those of another model are others.
    """
    if any(known.of_weights for known in found):
        return False
    if name == "__getitem__":
        return any(known.tensor.dtype is torch.bool for known in found[1:])
    return name in _PICKS and (name != "repeat_interleave" or len(args) == 1 or len(found) > 1)


@cache
def _written(name: str) -> tuple[int, ...] | None:
    """Which arguments PyTorch's operators of that name write to: none or the first; ``None`` for others, and where they draw numbers."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = _overloads_of(packet) if isinstance(packet, OpOverloadPacket) else []
    written = {position for overload in overloads for position in _written_by(overload)}
    draws = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    return None if draws or not overloads or written - {0} else tuple(written)


def _overloads_of(packet: Any) -> list[OpOverload[..., Any]]:
    return [getattr(packet, name) for name in packet.overloads()]


def _written_by(overload: OpOverload[..., Any]) -> Iterator[int]:
    for position, argument in enumerate(overload._schema.arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
        # Batch norm in training mode changes its statistics without a mark in its schema.
        if marked or argument.name.startswith("running_"):
            yield position


def _same(leaf: Any) -> Any:
    return leaf


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
