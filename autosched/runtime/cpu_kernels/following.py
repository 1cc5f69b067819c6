"""Activations behind a product, as calls of their own, that the kernel of the product can compute with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autosched.core.byte_products import ACTIVATIONS
from autosched.core.gelu import CUBIC, LINEAR
from autosched.core.graph import OpGraph
from autosched.core.program import Argument, Call, Ref
from autosched.runtime.cpu_kernels.convolution import follows_of
from autosched.runtime.cpu_kernels.linear import Linear, is_dense, read_linear
from autosched.runtime.instructions import Window

_TIMES, _PLUS, _SIGMOID = "aten::mul.Tensor", "aten::add.Tensor", "aten::sigmoid.default"


@dataclass(frozen=True, slots=True)
class _Activation:
    """Of what is in the slot ``source``: its name, its algorithm, and what is called before the last call."""

    source: int
    name: str
    algorithm: str = "none"
    before: tuple[Call, ...] = ()


def read_product(call: Call, graph: OpGraph, calls: Sequence[Call], writes: Iterable[int], windows: Mapping[int, Window]) -> Linear | None:
    """The linear layer that ``call`` is or, if that is the end of an activation behind one, the layer with it.

    What is made in between nobody else may read.

    Args:
        calls: of an operator, whose results are ``writes``.
        windows: views that those read, by their slots.
    """
    return read_linear(call, graph, windows) or _followed(call, graph, calls, writes, windows)


def _followed(call: Call, graph: OpGraph, calls: Sequence[Call], writes: Iterable[int], windows: Mapping[int, Window]) -> Linear | None:
    producers = {value: other for other in calls for value in other.outputs}
    activation = _read(call, producers) if len(call.outputs) == 1 and call.outputs[0] >= 0 else None
    product = None if activation is None else producers.get(activation.source)
    linear = None if product is None else read_linear(product, graph, windows)
    if activation is None or product is None or linear is None or not linear.follows.nothing:
        return None
    follows = follows_of(activation.name, None, activation.algorithm)
    hidden = (product, *activation.before)
    between = {value for each in hidden for value in each.outputs}
    seen = between.intersection(writes).union(value for other in calls if other not in (*hidden, call) for value in other.reads())
    made, plain = graph.values[call.outputs[0]].spec, graph.values[linear.made].spec
    if follows is None or between & seen or made.shape != plain.shape or not is_dense(made, linear.dtype):
        return None
    return replace(linear, made=call.outputs[0], follows=follows, before=hidden)


def _read(call: Call, producers: dict[int, Call]) -> _Activation | None:
    name = ACTIVATIONS.get(call.target)
    if name is None:
        return _read_spelled(call, producers)
    named = dict(call.kwargs)
    algorithm = named.pop("approximate", "none") if name == "gelu" else "none"
    if len(call.args) != 1 or named or not isinstance(call.args[0], Ref) or not isinstance(algorithm, str):
        return None
    return _Activation(call.args[0].value, name, algorithm)


def _read_spelled(last: Call, producers: dict[int, Call]) -> _Activation | None:
    """``gelu`` by the hyperbolic tangent as ``capture.passes.slow_activations`` spells it, read from its end."""
    if last.target != _TIMES or len(last.args) != 2 or not isinstance(last.args[0], Ref):
        return None
    x, before = last.args[0], list[Call]()
    ref: Argument = last.args[1]
    for target, *more in ((_SIGMOID,), (_TIMES, x), (_PLUS, LINEAR), (_TIMES, CUBIC)):
        made = producers.get(ref.value) if isinstance(ref, Ref) else None
        if made is None or made.target != target or list(made.args[1:]) != more or made.kwargs:
            return None
        before.append(made)
        ref = made.args[0]
    square = producers.get(ref.value) if isinstance(ref, Ref) else None
    if square is None or (square.target, square.args, square.kwargs, last.kwargs) != (_TIMES, (x, x), (), ()):
        return None
    return _Activation(x.value, "gelu", "tanh", (*before, square))
