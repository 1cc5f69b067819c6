"""One call of a program as a callable on slots: which operators may run, and the shortest way to run them.

Programs come from bundles, and bundles come from strangers: only operators of PyTorch's own namespaces resolve, but for those of
``runtime.refused``, and functional ones of the namespaces that the caller trusts (``core.custom_operators``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from autosched.core.custom_operators import BUILT_IN, ON_IMPORT, trusted, why_unfit
from autosched.core.errors import UnsupportedGraph
from autosched.core.program import Argument, Call, Many, NonFinite, Ref, TorchLiteral
from autosched.runtime.direct import binding_of
from autosched.runtime.instructions import CallOperator, carrying
from autosched.runtime.refused import is_refused, makes_tensors

Slots = list[Any]
Kernel = Callable[[Slots], None]


def resolve(target: str) -> Callable[..., Any]:
    """The operator overload called ``namespace::name.overload``.

    Raises:
        UnsupportedGraph: if it is neither on the allow-list nor of a trusted namespace, or does not exist here, or is a custom operator
            that no schedule can hold.
    """
    namespace, separator, rest = target.partition("::")
    name, dot, overload = rest.rpartition(".")
    custom = namespace not in BUILT_IN
    if not separator or not dot or (custom and namespace not in trusted()) or is_refused(name):
        advice = f"If you trust {namespace!r}, give custom_operators=({namespace!r},)." if custom else "Capture the model again."
        raise UnsupportedGraph(f"operator {target!r} may not run from a schedule; expected one of {sorted(BUILT_IN | trusted())}. {advice}")
    if (module := ON_IMPORT.get(namespace)) is not None:
        importlib.import_module(module)
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or overload not in packet.overloads():  # type: ignore[no-untyped-call]
        if custom:
            raise UnsupportedGraph(
                f"operator {target!r} is not registered in this process; expected the namespace {namespace!r} to hold it. Import the "
                "package that registers it first."
            )
        raise UnsupportedGraph(f"operator {target!r} does not exist in torch {torch.__version__}; tune again with this version.")
    found: Any = getattr(packet, overload)
    if not custom and not makes_tensors(found._schema):
        raise UnsupportedGraph(f"operator {target!r} may not run from a schedule: it returns no tensor. Capture the model again.")
    if custom and (reason := why_unfit(found._schema)):
        raise UnsupportedGraph(f"custom operator {target!r} {reason}.")
    resolved: Callable[..., Any] = found
    return resolved


def compile_call(call: Call, device: torch.device) -> Kernel:
    """A callable that takes the arguments of ``call`` from slots and puts its results there; it carries the call as an instruction.

    Raises:
        UnsupportedGraph: if the operator is not allowed or does not exist here.
    """
    overload = resolve(call.target)
    function = binding_of(call.target) or overload
    kernel = _short_call(call, function, overload, device) or _general_call(call, function, device)
    return carrying(kernel, [CallOperator(call)])


def _general_call(call: Call, function: Callable[..., Any], device: torch.device) -> Kernel:
    fillers = [_filler(argument, device) for argument in call.args]
    keywords = {name: literal(argument, device) for name, argument in call.kwargs if not _has_ref(argument)}
    keyword_fillers = [(name, _filler(argument, device)) for name, argument in call.kwargs if _has_ref(argument)]
    store = _storer(call.outputs)

    def run(slots: Slots) -> None:
        named = {**keywords, **{name: fill(slots) for name, fill in keyword_fillers}} if keyword_fillers else keywords
        store(slots, function(*[fill(slots) for fill in fillers], **named))

    return run


def _short_call(call: Call, function: Callable[..., Any], overload: Callable[..., Any], device: torch.device) -> Kernel | None:
    """A closure without loops, for the common call: one tensor made, tensors first, then fixed arguments, no tensor by keyword.

    The walk over a plan is Python, and at batch size 1 an operator may take two microseconds: every loop here would show.
    """
    returns = getattr(overload, "_schema", None)
    one_tensor = returns is not None and len(returns.returns) == 1 and isinstance(returns.returns[0].type, torch.TensorType)
    if not one_tensor or len(call.outputs) != 1 or call.outputs[0] < 0 or any(_has_ref(argument) for _, argument in call.kwargs):
        return None
    made = call.outputs[0]
    keywords = {name: literal(argument, device) for name, argument in call.kwargs}
    refs = [argument.value for argument in call.args if isinstance(argument, Ref)]
    leading = 0
    while leading < len(call.args) and isinstance(call.args[leading], Ref):
        leading += 1
    if leading != len(refs) or any(_has_ref(argument) for argument in call.args[leading:]) or not 1 <= leading <= 3:
        return None
    tail = tuple(literal(argument, device) for argument in call.args[leading:])
    return _with_tail(function, refs, tail, keywords, made)


def _with_tail(function: Callable[..., Any], refs: list[int], tail: tuple[Any, ...], keywords: dict[str, Any], made: int) -> Kernel:
    first, second, third = (*refs, -1, -1)[:3]

    def unary(slots: Slots) -> None:
        slots[made] = function(slots[first], *tail, **keywords)

    def binary(slots: Slots) -> None:
        slots[made] = function(slots[first], slots[second], *tail, **keywords)

    def ternary(slots: Slots) -> None:
        slots[made] = function(slots[first], slots[second], slots[third], *tail, **keywords)

    # Unpacking arguments shows beside a small operator, even where there are none.
    short = None if keywords else _without_unpacking(function, refs, tail, made)
    return short or (unary, binary, ternary)[len(refs) - 1]


def _without_unpacking(function: Callable[..., Any], refs: list[int], tail: tuple[Any, ...], made: int) -> Kernel | None:
    first, second, third = (*refs, -1, -1)[:3]
    one, other = (*tail, None, None)[:2]

    def bare_unary(slots: Slots) -> None:
        slots[made] = function(slots[first])

    def bare_binary(slots: Slots) -> None:
        slots[made] = function(slots[first], slots[second])

    def bare_ternary(slots: Slots) -> None:
        slots[made] = function(slots[first], slots[second], slots[third])

    def unary_with_one(slots: Slots) -> None:
        slots[made] = function(slots[first], one)

    def unary_with_two(slots: Slots) -> None:
        slots[made] = function(slots[first], one, other)

    written = {
        (1, 0): bare_unary, (2, 0): bare_binary, (3, 0): bare_ternary, (1, 1): unary_with_one, (1, 2): unary_with_two,
    }  # fmt: skip
    return written.get((len(refs), len(tail)))


def _storer(outputs: tuple[int, ...]) -> Callable[[Slots, Any], None]:
    if len(outputs) == 1 and outputs[0] >= 0:
        only = outputs[0]

        def store_one(slots: Slots, result: Any) -> None:
            # An operator that returns a list of one tensor still fills one slot.
            slots[only] = result[0] if isinstance(result, (tuple, list)) else result

        return store_one
    pairs = tuple((position, value) for position, value in enumerate(outputs) if value >= 0)

    def store_many(slots: Slots, result: Any) -> None:
        for position, value in pairs:
            slots[value] = result[position]

    return store_many


def _has_ref(argument: Argument) -> bool:
    return isinstance(argument, Ref) or (isinstance(argument, Many) and any(_has_ref(item) for item in argument.items))


def _filler(argument: Argument, device: torch.device) -> Callable[[Slots], Any]:
    if isinstance(argument, Ref):
        value = argument.value
        return lambda slots: slots[value]
    if isinstance(argument, Many) and _has_ref(argument):
        fillers = tuple(_filler(item, device) for item in argument.items)
        return lambda slots: [fill(slots) for fill in fillers]
    fixed = literal(argument, device)
    return lambda slots: fixed


_LITERAL_TYPES: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def literal(argument: Argument, device: torch.device) -> Any:
    """The Python value of an argument without tensors; every device becomes ``device``."""
    if isinstance(argument, Many):
        return [literal(item, device) for item in argument.items]
    if isinstance(argument, NonFinite):
        return float(argument.name)
    if isinstance(argument, TorchLiteral):
        if argument.kind == "device":
            return device
        found = getattr(torch, argument.name, None)
        if not isinstance(found, _LITERAL_TYPES[argument.kind]):
            raise UnsupportedGraph(
                f"{argument.kind} {argument.name!r} does not exist in torch {torch.__version__}; tune again with this version."
            )
        return found
    return argument
