"""Products of whole numbers in eight bits, and what makes numbers of their sums: scales of rows and of features, a bias, an activation.

Layers whose rows are rounded to eight bits as they come end so (torchao's ``Int8DynamicActivationInt8WeightConfig``). One kernel does all
of it without writing the sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autosched.core.graph import TensorSpec
from autosched.core.program import Ref
from autosched.core.specs import is_dense

INT_MM = "aten::_int_mm.default"
_VIEWS = frozenset(
    f"aten::{name}" for name in ("view.default", "_unsafe_view.default", "reshape.default", "unsqueeze.default", "squeeze.dim")
)
_COPIES = frozenset({"aten::_to_copy.default"})
ACTIVATIONS = {
    "aten::relu.default": "relu", "aten::silu.default": "swish", "aten::sigmoid.default": "sigmoid", "aten::tanh.default": "tanh",
    "aten::gelu.default": "gelu",
}  # fmt: skip
"""oneDNN's names of what may follow a product."""
_MADE = frozenset({"float32", "bfloat16", "float16"})


class AnyCall(Protocol):
    """A call of a program or of a draft."""

    @property
    def target(self) -> str:
        """``namespace::name.overload``."""

    @property
    def args(self) -> tuple[object, ...]:
        """Those given by position."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Value of each tensor returned; -1 where it is not used."""

    def reads(self) -> tuple[int, ...]:
        """Value of every tensor argument, in order, without repetition."""


@dataclass(slots=True)
class ByteProduct:
    """One, and what follows.

    Args:
        source: whole numbers in eight bits; in memory ``[rows, channels]``.
        weight: the same, ``[channels, features]``.
        made: the last that is computed: int32 sums, or numbers.
        of_rows, of_features: scales, as many as there are rows or features, or None.
        bias: as many as there are features, or None.
        activation: by oneDNN's name for it.
        algorithm: of GELU.
        path: the calls that compute, in order.
    """

    source: int
    weight: int
    made: int
    rows: int
    channels: int
    features: int
    of_rows: int | None = None
    of_features: int | None = None
    bias: int | None = None
    activation: str = "none"
    algorithm: str = ""
    path: list[AnyCall] = field(default_factory=list)


def byte_product(
    product: AnyCall,
    specs: Mapping[int, TensorSpec],
    views: Mapping[int, int],
    readers: Mapping[int, Sequence[AnyCall]],
    kept: Collection[int],
) -> ByteProduct | None:
    """``product``, an ``_int_mm``, and what follows as long as nobody else reads what it is made from.

    Args:
        specs: of all values.
        views: by each value that is all of another's memory in the same order, that one.
        readers: of each value.
        kept: values that are read elsewhere, too.
    """
    source, weight = product.args[:2]
    if not isinstance(source, Ref) or not isinstance(weight, Ref):
        return None
    (rows, channels), features = specs[source.value].shape, specs[weight.value].shape[1]
    if not is_dense(specs[source.value]) or not is_dense(specs[product.outputs[0]]):
        return None
    found = ByteProduct(_whole(source.value, views), weight.value, product.outputs[0], rows, channels, features, path=[product])
    while found.made not in kept and len(readers.get(found.made, ())) == 1:
        following = readers[found.made][0]
        if len(following.outputs) != 1 or following.outputs[0] < 0 or not _takes(found, following, specs, views):
            break
        found.path.append(following)
        found.made = following.outputs[0]
        if found.activation != "none":
            break
    while found.path[-1].target in _VIEWS:
        # A view of the result is an operator's own business.
        found.path.pop()
        found.made = found.path[-1].outputs[0]
    # Sums alone have no activation, and no limits.
    return found if len(found.path) == 1 or specs[found.made].dtype in _MADE else None


def _takes(found: ByteProduct, call: AnyCall, specs: Mapping[int, TensorSpec], views: Mapping[int, int]) -> bool:
    """Whether ``call`` is part of it; then what it reads is noted in ``found``."""
    made = specs[call.outputs[0]]
    if not is_dense(made) or made.elements != found.rows * found.features or made.shape[-1:] != (found.features,):
        return False
    if call.target in _VIEWS:
        return True
    if made.dtype not in _MADE:
        return False
    if call.target in _COPIES:
        return True
    if call.target in ACTIVATIONS and specs[found.made].dtype in _MADE:
        found.activation = ACTIVATIONS[call.target]
        found.algorithm = _approximate(call) if found.activation == "gelu" else ""
        return True
    return call.target in ("aten::mul.Tensor", "aten::add.Tensor") and _scales_or_adds(found, call, specs, views)


def _scales_or_adds(found: ByteProduct, call: AnyCall, specs: Mapping[int, TensorSpec], views: Mapping[int, int]) -> bool:
    values = [item.value for item in call.args if isinstance(item, Ref)]
    if len(call.args) != 2 or len(values) != 2 or values.count(found.made) != 1 or dict(_named(call)):
        return False
    other = values[1 - values.index(found.made)]
    spec, shape = specs[other], specs[found.made].shape
    if spec.dtype not in _MADE or not is_dense(spec) or found.bias is not None:
        return False
    each_feature = spec.elements == found.features and spec.shape[-1:] == (found.features,)
    each_row = spec.shape == (*shape[:-1], 1)
    if call.target == "aten::add.Tensor":
        if not each_feature or specs[found.made].dtype not in _MADE:
            return False
        found.bias = _whole(other, views)
    elif each_row and found.of_rows is None and (found.features > 1 or not each_feature):
        found.of_rows = _whole(other, views)
    elif each_feature and found.of_features is None:
        found.of_features = _whole(other, views)
    else:
        return False
    return True


def whole_views(calls: Iterable[AnyCall], specs: Mapping[int, TensorSpec]) -> dict[int, int]:
    """By each value that is all of another's memory in the same order, that one."""
    found = {}
    for call in calls:
        if call.target in _VIEWS and len(call.reads()) == 1 and len(call.outputs) == 1 and call.outputs[0] >= 0:
            [of], made = call.reads(), call.outputs[0]
            if is_dense(specs[of]) and is_dense(specs[made]):
                found[made] = of
    return found


def _whole(value: int, views: Mapping[int, int]) -> int:
    while value in views:
        value = views[value]
    return value


def _named(call: AnyCall) -> Mapping[str, object]:
    return dict(getattr(call, "kwargs", ()))


def _approximate(call: AnyCall) -> str:
    given = (*call.args[1:], *_named(call).values())
    return str(given[0]) if given else "none"
