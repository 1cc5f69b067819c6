"""Which products, and which activations behind them, are read from calls. Nothing is captured or compiled here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from autosched.core.gelu import CUBIC, LINEAR
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Many, Ref
from autosched.runtime.cpu_kernels.convolution import Follows
from autosched.runtime.cpu_kernels.following import read_product
from autosched.runtime.cpu_kernels.linear import Linear, may_be_linear

X, WEIGHT, PRODUCT, MADE, FIRST_BETWEEN = range(5)
ROWS, CHANNELS, FEATURES = 4, 32, 48


def spec(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(shape, dtype, torch.empty(shape, device="meta").stride() if strides is None else strides)


def graph_with(**changes: TensorSpec) -> OpGraph:
    """Rows, a weight, their product, what is made of it, and values for what is between."""
    specs = {"x": spec(ROWS, CHANNELS), "weight": spec(FEATURES, CHANNELS), "product": spec(ROWS, FEATURES), "made": spec(ROWS, FEATURES)}
    specs |= {f"between{place}": spec(ROWS, FEATURES) for place in range(5)} | changes
    roles = {X: ValueRole.INPUT, WEIGHT: ValueRole.CONSTANT}
    values = [Value(index, each, roles.get(index, ValueRole.INTERMEDIATE), index) for index, each in enumerate(specs.values())]
    return OpGraph((), tuple(values), (X,), (MADE,))


LINEAR_CALL = Call("aten::linear.default", (Ref(X), Ref(WEIGHT)), (), (PRODUCT,))
SILU = Call("aten::silu.default", (Ref(PRODUCT),), (), (MADE,))
GELU = Call("aten::gelu.default", (Ref(PRODUCT),), (("approximate", "tanh"),), (MADE,))


def read(calls: Sequence[Call], graph: OpGraph | None = None, writes: tuple[int, ...] = (MADE,)) -> Linear | None:
    """What the last of ``calls`` ends."""
    return read_product(calls[-1], graph_with() if graph is None else graph, calls, writes, {})


def spelled(at: int = -1, **changes: object) -> list[Call]:
    """``gelu`` by the hyperbolic tangent in calls behind a product, the call ``at`` changed."""
    x, (square, cubic, plus, times, gate) = Ref(PRODUCT), (Ref(FIRST_BETWEEN + place) for place in range(5))
    calls = [
        Call("aten::mul.Tensor", (x, x), (), (square.value,)),
        Call("aten::mul.Tensor", (square, CUBIC), (), (cubic.value,)),
        Call("aten::add.Tensor", (cubic, LINEAR), (), (plus.value,)),
        Call("aten::mul.Tensor", (plus, x), (), (times.value,)),
        Call("aten::sigmoid.default", (times,), (), (gate.value,)),
        Call("aten::mul.Tensor", (x, gate), (), (MADE,)),
    ]
    calls[at] = dataclasses.replace(calls[at], **changes)  # type: ignore[arg-type]
    return [LINEAR_CALL, *calls]


def test_an_activation_behind_a_product_is_read_with_it() -> None:
    assert (read([LINEAR_CALL]) or pytest.fail("it is none")).follows.nothing
    item = read([LINEAR_CALL, SILU]) or pytest.fail("it is none")
    assert (item.source, item.made, item.before, item.follows) == (X, MADE, (LINEAR_CALL,), Follows(1))
    by_tanh = read([LINEAR_CALL, GELU]) or pytest.fail("it is none")
    calls = spelled()
    item = read(calls) or pytest.fail("it is none")
    assert item.follows == by_tanh.follows != Follows()
    assert (item.made, set(map(id, item.before))) == (MADE, set(map(id, calls[:-1])))


@pytest.mark.parametrize(
    "graph",
    [
        graph_with(made=spec(ROWS, FEATURES, strides=(1, ROWS))),
        graph_with(made=spec(ROWS, FEATURES, dtype="float64")),
        graph_with(made=spec(FEATURES, ROWS)),
    ],
)
def test_a_result_that_lies_otherwise_than_the_product_is_made_by_a_call(graph: OpGraph) -> None:
    assert read([LINEAR_CALL], graph) is not None
    assert read([LINEAR_CALL, SILU], graph) is None


def test_one_activation_alone_is_computed_with_a_product() -> None:
    limited = Call("mkldnn::_linear_pointwise.default", (Ref(X), Ref(WEIGHT), None, "relu", Many(()), ""), (), (PRODUCT,))
    assert (read([limited]) or pytest.fail("it is none")).follows == Follows(least=0.0)
    assert read([limited, SILU]) is None
    plain = dataclasses.replace(limited, args=(*limited.args[:3], "none", *limited.args[4:]))
    assert read([plain, SILU]) is not None


@pytest.mark.parametrize(
    "last",
    [
        dataclasses.replace(SILU, args=(Ref(PRODUCT), 1)),
        dataclasses.replace(SILU, args=(1.0,)),
        dataclasses.replace(SILU, kwargs=(("beta", 2.0),)),
        dataclasses.replace(SILU, outputs=(-1,)),
        dataclasses.replace(SILU, outputs=(MADE, FIRST_BETWEEN)),
        dataclasses.replace(SILU, target="aten::elu.default"),
        dataclasses.replace(GELU, kwargs=(("approximate", "other"),)),
        dataclasses.replace(GELU, kwargs=(("approximate", 1),)),
    ],
)
def test_activations_with_other_arguments_are_not_read(last: Call) -> None:
    assert read([LINEAR_CALL, last]) is None


@pytest.mark.parametrize(
    ("at", "changes"),
    [
        (0, {"args": (Ref(PRODUCT), Ref(X))}),
        (0, {"kwargs": (("alpha", 2),)}),
        (0, {"target": "aten::add.Tensor"}),
        (1, {"args": (Ref(FIRST_BETWEEN), 2 * CUBIC)}),
        (1, {"args": (Ref(X), CUBIC)}),
        (1, {"args": (2.0, CUBIC)}),
        (2, {"args": (Ref(FIRST_BETWEEN + 1), LINEAR + 1.0)}),
        (2, {"kwargs": (("alpha", 2),)}),
        (3, {"args": (Ref(FIRST_BETWEEN + 2), Ref(X))}),
        (4, {"target": "aten::tanh.default"}),
        (5, {"args": (Ref(X), Ref(FIRST_BETWEEN + 4))}),
        (5, {"args": (Ref(PRODUCT), Ref(FIRST_BETWEEN + 4), 1)}),
        (5, {"target": "aten::div.Tensor"}),
        (5, {"args": (2.0, Ref(FIRST_BETWEEN + 4))}),
        (5, {"args": (Ref(PRODUCT), 2.0)}),
        (5, {"kwargs": (("alpha", 2),)}),
    ],
)
def test_what_is_spelled_otherwise_is_not_taken_for_gelu(at: int, changes: dict[str, object]) -> None:
    assert read(spelled(at, **changes)) is None


def test_an_activation_behind_something_else_is_no_product() -> None:
    assert read([SILU]) is None
    assert read([Call("aten::exp.default", (Ref(X),), (), (PRODUCT,)), SILU]) is None
    assert read([LINEAR_CALL, Call("aten::exp.default", (Ref(PRODUCT),), (), (MADE,))]) is None


@pytest.mark.parametrize("value", [PRODUCT, *range(FIRST_BETWEEN, FIRST_BETWEEN + 5)])
def test_what_others_read_of_what_is_between_is_made(value: int) -> None:
    calls = spelled()
    assert read(calls, writes=(MADE, value)) is None
    other = Call("aten::sum.default", (Ref(value),), (), (-1,))
    assert read([other, *calls]) is None


def operator_of(*calls: Call) -> Operator:
    reads = tuple(dict.fromkeys(value for call in calls for value in call.reads()))
    return Operator(0, "one", calls, reads, (MADE,), (), 0, 0, 0, "", "")


def launched(*outputs: int, name: str = "inductor::addmm.abc", reads: tuple[int, ...] = (X, WEIGHT), **changes: TensorSpec) -> bool:
    """Whether a launch of Inductor's code may be a product."""
    call = Call(name, tuple(Ref(value) for value in reads), (), outputs or (MADE,))
    return may_be_linear(operator_of(call), graph_with(**changes))


def test_an_operator_with_one_product_among_its_calls_may_be_computed() -> None:
    assert may_be_linear(operator_of(LINEAR_CALL, SILU), graph_with())
    assert not may_be_linear(operator_of(SILU), graph_with())
    assert not may_be_linear(operator_of(LINEAR_CALL), graph_with(weight=spec(FEATURES, CHANNELS, dtype="float64")))


def test_launches_of_inductors_code_may_be_products_as_far_as_their_tensors_tell() -> None:
    assert launched()
    assert launched(name="inductor::_linear_pointwise")
    assert launched(reads=(X, WEIGHT, -3))
    # As [inputs, outputs], of rows of another shape, and with a second constant.
    assert launched(weight=spec(CHANNELS, FEATURES))
    assert launched(x=spec(2, 2, CHANNELS), made=spec(2, 2, FEATURES))
    assert launched(x=spec(16, 32), weight=spec(32, 32), made=spec(16, 32))
    assert not launched(name="inductor::bmm.abc")
    assert not launched(name="aten::bmm.default")
    assert not launched(MADE, FIRST_BETWEEN)
    assert not launched(-1)
    assert not launched(reads=(X, FIRST_BETWEEN, WEIGHT))
    assert not launched(reads=(WEIGHT,))
    assert not launched(reads=(X,))


@pytest.mark.parametrize(
    "changes",
    [
        {"made": spec(ROWS, FEATURES - 1)},
        {"made": TensorSpec((), "float32", ())},
        {"made": spec(ROWS, FEATURES, dtype="float64")},
        {"made": spec(ROWS, FEATURES, strides=(1, ROWS))},
        {"made": spec(ROWS, 0)},
        {"x": spec(ROWS, CHANNELS, strides=(1, ROWS))},
        {"x": spec(ROWS, CHANNELS, dtype="bfloat16")},
        {"x": spec(ROWS + 1, CHANNELS)},
        {"x": spec(ROWS, CHANNELS + 1)},
        {"weight": spec(FEATURES, CHANNELS, 1)},
        {"weight": spec(FEATURES, CHANNELS + 1)},
        {"x": spec(ROWS, 8), "weight": spec(FEATURES, 8)},
        {"weight": spec(8, CHANNELS), "made": spec(ROWS, 8)},
    ],
)
def test_launches_whose_tensors_do_not_fit_are_none(changes: dict[str, TensorSpec]) -> None:
    assert not launched(**changes)
