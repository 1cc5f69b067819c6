"""Hand-written models with one oddity each: what they return, what they take, and what memory they share or change."""

# ruff: noqa: E501 (one case a line)
from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import library, nn
from torch.nn import functional

from experiments.coverage_cases.made import Build, Made

_CASES: dict[str, Build] = {}


def cases() -> dict[str, Build]:
    """Case name to builder."""
    return dict(_CASES)


def _x() -> tuple[Any, ...]:
    return (torch.randn(4, 8),)


def _case(name: str, inputs: Callable[[], tuple[Any, ...]] = _x, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a model class; ``kwargs`` among the options makes the keyword arguments."""

    def register(kind: type[nn.Module]) -> type[nn.Module]:
        _CASES[f"odd:{name}"] = partial(_build, kind, inputs, options)
        return kind

    return register


def _function(name: str, inputs: Callable[[], tuple[Any, ...]] = _x, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a model without parameters, given as its forward."""

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        class Plain(nn.Module):
            pass

        # Beside itself, the function's own signature.
        Plain.forward = forward  # type: ignore[method-assign]
        _CASES[f"odd:{name}"] = partial(_build, Plain, inputs, options)
        return forward

    return register


def _build(kind: type[nn.Module], inputs: Callable[[], tuple[Any, ...]], options: dict[str, Any]) -> Made:
    kwargs = options["kwargs"]() if "kwargs" in options else {}
    return Made(kind(), inputs(), kwargs, options.get("training", False), options.get("lively", True), options.get("custom_operators", ()))


class Linear(nn.Module):
    """What most of the cases stand on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)


# What a model returns.

Point = namedtuple("Point", ["left", "right"])


class Typed(NamedTuple):
    value: torch.Tensor
    count: int


@dataclasses.dataclass
class Boxed:
    value: torch.Tensor
    other: torch.Tensor | None = None


@dataclasses.dataclass
class Registered:
    value: torch.Tensor
    scale: float


torch.export.register_dataclass(Registered, serialized_type_name="experiments.coverage_cases.odd.Registered")


@_case("returns-nested-dict")
class NestedDict(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return {"a": {"b": [y, (y + 1,)]}, "c": OrderedDict(z=y.relu(), w=y.sum())}


@_case("returns-namedtuple")
class ReturnsNamedtuple(Linear):
    def forward(self, x: Any) -> Any:
        return Point(self.layer(x), x * 2)


@_case("returns-typed-namedtuple")
class ReturnsTyped(Linear):
    def forward(self, x: Any) -> Any:
        return Typed(self.layer(x), 3)


@_case("returns-dataclass")
class ReturnsDataclass(Linear):
    def forward(self, x: Any) -> Any:
        return Boxed(self.layer(x))


@_case("returns-registered-dataclass")
class ReturnsRegistered(Linear):
    def forward(self, x: Any) -> Any:
        return Registered(self.layer(x), 0.5)


@_case("returns-nones-and-numbers")
class NonesAndNumbers(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), None, 3, 2.5, True, "text", float("inf"), [None, x.shape[0]]


@_case("returns-shape")
class ReturnsShape(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), x.shape


@_case("returns-defaultdict")
class ReturnsDefaultdict(Linear):
    def forward(self, x: Any) -> Any:
        found: Any = defaultdict(list)
        found["a"].append(self.layer(x))
        return found


@_case("returns-dict-with-numbers-as-keys")
class IntegerKeys(Linear):
    def forward(self, x: Any) -> Any:
        return {0: self.layer(x), 1: x + 1, ("a", 1): x * 2}


@_function("returns-empty-containers")
def _empty_containers(self: Any, x: Any) -> Any:
    return [], {}, (), x + 1


@_function("returns-nothing")
def _nothing(self: Any, x: Any) -> Any:
    return None


@_function("returns-only-numbers")
def _only_numbers(self: Any, x: Any) -> Any:
    return 3


@_case("returns-the-same-twice")
class SameTwice(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return y, y, y.t()


@_function("returns-its-input")
def _input(self: Any, x: Any) -> Any:
    return x


@_function("returns-its-input-and-more")
def _input_and_more(self: Any, x: Any) -> Any:
    return x, x + 1, x


@_function("returns-views-of-its-input")
def _views(self: Any, x: Any) -> Any:
    return x[1:], x.t(), x.view(2, 16), x.unsqueeze(0).expand(3, 4, 8)


@_function("returns-clone-of-its-input")
def _clone(self: Any, x: Any) -> Any:
    return x.clone(), x.contiguous(), x.to(torch.float32), x.to(torch.float32, copy=True)


@_function("returns-detached")
def _detached(self: Any, x: Any) -> Any:
    return x.detach(), (x * 2).detach(), x.data


@_case("returns-its-parameter")
class ReturnsParameter(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), self.layer.weight, self.layer.weight.t(), self.layer.bias + 0


@_case("returns-constants")
class ReturnsConstants(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), torch.arange(4), torch.zeros(2, 3), torch.ones_like(x), torch.tensor([1.5, 2.5])


@_function("returns-sum-of-constants", lambda: ())
def _no_inputs(self: Any) -> Any:
    return torch.arange(6).reshape(2, 3) * 2.5


@_case("returns-transposed-strides")
class Transposed(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return y.t(), y.t().contiguous(), y.as_strided((2, 3), (1, 2), 1), y.t() + 1, torch.stack([y, y], -1).sum(-1)


@_case("returns-channels-last", lambda: (torch.randn(1, 3, 8, 8),))
class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        y = self.conv(x.to(memory_format=torch.channels_last))
        return y, y.contiguous(), y.permute(0, 2, 3, 1), y.relu(), y.flatten(1)


# What a model takes.


@_case("keyword-arguments", _x, kwargs=lambda: {"scale": torch.tensor(2.0), "shift": None})
class Keywords(Linear):
    def forward(self, x: Any, *, scale: Any = None, shift: Any = None) -> Any:
        y = self.layer(x) * scale
        return y if shift is None else y + shift


@_case("variadic", lambda: (torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 8)), kwargs=lambda: {"extra": torch.randn(8)})
class Variadic(Linear):
    def forward(self, *items: Any, **named: Any) -> Any:
        return self.layer(sum(items)) + named["extra"]


@_case("numbers-and-flags", lambda: (torch.randn(4, 8), 3, 0.5, True, "gelu", None))
class NumbersAndFlags(Linear):
    def forward(self, x: Any, times: int, scale: float, flag: bool, kind: str, nothing: Any) -> Any:
        for _ in range(times):
            x = getattr(functional, kind)(self.layer(x)) * scale
        return x if flag else -x


@_case("nested-inputs", lambda: ({"a": torch.randn(4, 8), "b": [torch.randn(8), (torch.randn(4, 8),)]},))
class NestedInputs(Linear):
    def forward(self, batch: Any) -> Any:
        return self.layer(batch["a"]) + batch["b"][0] + batch["b"][1][0]


@_case("namedtuple-input", lambda: (Point(torch.randn(4, 8), torch.randn(4, 8)),))
class NamedtupleInput(Linear):
    def forward(self, point: Any) -> Any:
        return self.layer(point.left) - point.right


@_case("dataclass-input", lambda: (Registered(torch.randn(4, 8), 2.0),))
class DataclassInput(Linear):
    def forward(self, box: Any) -> Any:
        return self.layer(box.value) * box.scale


@_case("unused-input", lambda: (torch.randn(4, 8), torch.randn(3)))
class UnusedInput(Linear):
    def forward(self, x: Any, unused: Any) -> Any:
        return self.layer(x)


def _shared() -> tuple[Any, ...]:
    x = torch.randn(4, 8)
    return x, x[1:3], x


@_case("inputs-that-share-memory", _shared)
class SharedInputs(Linear):
    def forward(self, x: Any, part: Any, again: Any) -> Any:
        return self.layer(x) + again, part * 2


@_case("transposed-input", lambda: (torch.randn(8, 4).t(),))
class TransposedInput(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), x + 1, x.reshape(-1)


@_case("sliced-input", lambda: (torch.randn(8, 16)[::2, ::2],))
class SlicedInput(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), x * 2, x.flatten()


@_case("expanded-input", lambda: (torch.randn(1, 8).expand(4, 8),))
class ExpandedInput(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), x * 2


@_case("zero-dimensional", lambda: (torch.tensor(2.5), torch.tensor(3), torch.randn(4, 8)))
class ZeroDimensional(Linear):
    def forward(self, scale: Any, count: Any, x: Any) -> Any:
        # A tensor without dimensions does not widen the dtype of one with them.
        return scale * count, self.layer(x) * scale, x + count, scale.double() * x, count / 2, scale.reshape(1)


@_case("empty-tensors", lambda: (torch.randn(0, 8), torch.zeros(3, 0)))
class EmptyTensors(Linear):
    def forward(self, x: Any, y: Any) -> Any:
        return self.layer(x), y.sum(1), torch.cat([x, torch.ones(2, 8)]), x.sum(), y @ y.t()


@_function(
    "bool-and-integers", lambda: (torch.tensor([True, False, True]), torch.tensor([3, -7, 2]), torch.tensor([250, 7, 1], dtype=torch.uint8))
)
def _integers(self: Any, flags: Any, numbers: Any, small: Any) -> Any:
    return (
        flags & (numbers > 0), ~flags, numbers // 2, numbers % 4, numbers / 2, small + 10, small + numbers, flags + 1, flags.sum(), small.sum(),
        numbers.float().mean(), numbers << 2, numbers ^ 5, -numbers, small * 2.5, torch.where(flags, numbers, small), numbers**2,
    )  # fmt: skip


@_function(
    "promotion", lambda: (torch.randn(3).half(), torch.randn(3), torch.randn(3).double(), torch.tensor(2), torch.randn(3).bfloat16())
)
def _promotion(self: Any, half: Any, single: Any, double: Any, number: Any, brain: Any) -> Any:
    return (
        half + single,
        single * double,
        half * number,
        half + 1,
        half * 2.5,
        brain + half,
        number + 0.5,
        torch.cat([half, single]),
        brain.sum(),
        half**2,
    )


@_case("half", lambda: (torch.randn(4, 8).half(),))
class Half(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.half()

    def forward(self, x: Any) -> Any:
        return self.layer(x).softmax(-1), x.sum(), x.mean(), functional.layer_norm(x, (8,)), x.float().exp().half()


@_case("bfloat16", lambda: (torch.randn(4, 8).bfloat16(),))
class Brain(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Any) -> Any:
        return functional.gelu(self.layer(x)) + x, x.cumsum(0), (x.float() * 2).to(x.dtype)


@_case("complex", lambda: (torch.randn(4, 8, dtype=torch.complex64),))
class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Any) -> Any:
        y = x @ self.weight
        return y, y.conj(), y.real, y.imag, y.abs(), torch.view_as_real(y), y * 2, y.conj() @ self.weight, y.angle()


@_function("fourier", lambda: (torch.randn(2, 16),))
def _fourier(self: Any, x: Any) -> Any:
    spectrum = torch.fft.rfft(x)
    return spectrum, torch.fft.irfft(spectrum * 2, n=16), torch.stft(x, 8, return_complex=True, window=torch.hann_window(8)).abs()


@_function("special-values", lambda: (torch.tensor([0.0, -0.0, float("inf"), float("nan"), -3.0]),))
def _special(self: Any, x: Any) -> Any:
    return (
        x + 0,
        x * 1,
        x * 0,
        1 / x,
        x - 0,
        x.sqrt(),
        x.relu(),
        torch.maximum(x, -x),
        x.isnan(),
        x.clamp(-1, 1),
        x.sign(),
        x / 1,
        (-x).neg(),
    )


@_case("returns-views-of-copies")
class ViewsOfCopies(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 8))

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        folded = (self.table * 2).t()
        return x.clone().t(), y, y.clone().t(), y.clone().t(), torch.tensor([[1.0, 2.0]]).t(), folded, y.t() + folded


class Blocks(nn.Module):
    """Convolutions, norms and linears of every kind that rewriting folds or packs."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.second = nn.Conv2d(8, 8, 3, groups=8, stride=2, padding=1), nn.BatchNorm2d(8, affine=False)
        self.pointwise = nn.Conv2d(8, 16, 1)
        self.up, self.third = nn.ConvTranspose2d(16, 4, 2, 2), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self.to(dtype)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.first(x)).relu()
        z = functional.hardswish(self.second(self.depthwise(y))) + functional.avg_pool2d(y, 2)
        w = self.third(self.up(functional.silu(self.pointwise(z))))
        return self.head(w.mean((2, 3))), self.head(w.permute(0, 2, 3, 1)), y, w


def _typed_blocks(dtype: torch.dtype) -> Made:
    return Made(Blocks(dtype), (torch.randn(2, 3, 8, 8, dtype=dtype),))


_CASES |= {f"odd:blocks-{dtype}": partial(_typed_blocks, getattr(torch, dtype)) for dtype in ("float16", "bfloat16", "float64")}
_case("blocks-without-rows", lambda: (torch.randn(0, 3, 8, 8),))(Blocks)
_case("blocks-channels-last-input", lambda: (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),))(Blocks)
_case("blocks-cropped-input", lambda: (torch.randn(2, 5, 12, 12)[:, 1:4, 2:10, 2:10],))(Blocks)


@_case("linears", lambda: (torch.randn(8), torch.randn(2, 3, 8), torch.randn(8, 4), torch.randn(1, 8).expand(5, 8), torch.randn(0, 8)))
class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.plain, self.narrow = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 1)

    def forward(self, row: Any, cube: Any, turned: Any, spread: Any, none: Any) -> Any:
        found = [layer(item) for layer in (self.layer, self.plain, self.narrow) for item in (row, cube, turned.t(), spread, none)]
        bias = torch.addmm(self.layer.bias, turned.t(), self.layer.weight, beta=0.5, alpha=2)
        return (
            found,
            bias,
            torch.baddbmm(cube[:, :, :1], cube, cube.transpose(1, 2)),
            functional.linear(cube[..., ::2], self.layer.weight[:, ::2]),
        )


@_function("attentions", lambda: (torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.rand(2, 1, 6, 6) > 0.4))
def _attentions(self: Any, query: Any, key: Any, mask: Any) -> Any:
    attend = functional.scaled_dot_product_attention
    wide = key.repeat_interleave(2, 1)
    mask = mask | torch.eye(6, dtype=torch.bool)
    return (
        attend(query, wide, wide), attend(query, wide, wide, mask), attend(query, wide, wide, is_causal=True, scale=0.3),
        attend(query, key, key, enable_gqa=True), attend(query[:, :, :3], wide, wide), attend(query.double(), wide.double(), wide.double()),
        attend(query, wide, wide, torch.zeros(6, 6).masked_fill(~mask[0, 0], float("-inf"))), attend(query.transpose(1, 2), wide.transpose(1, 2), wide.transpose(1, 2)),
    )  # fmt: skip


# What memory a model changes.


@_case("buffer-updated")
class Buffer(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4, 8))

    def forward(self, x: Any) -> Any:
        self.count += 1
        self.last.copy_(x)
        return self.layer(x) * self.count + self.last


@_case("buffer-read-then-updated")
class ReadThenUpdated(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.randn(4, 8))

    def forward(self, x: Any) -> Any:
        before = self.memory * 1
        seen = self.memory.sum()
        self.memory.mul_(0.5).add_(x)
        return self.layer(before), seen, self.memory.sum()


@_case("buffer-replaced")
class Replaced(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(4, 8))

    def forward(self, x: Any) -> Any:
        self.memory = self.memory + x
        return self.layer(self.memory)


@_case("batch-norm-in-training", training=True)
class BatchNorm(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        return self.norm(self.layer(x))


@_case("batch-norm-without-statistics")
class NoStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: Any) -> Any:
        return self.norm(self.conv(x.unsqueeze(0)))


@_function("input-changed-in-place")
def _in_place(self: Any, x: Any) -> Any:
    x.add_(1)
    return x * 2


@_function("view-of-input-changed-in-place")
def _in_place_view(self: Any, x: Any) -> Any:
    x[1:3].mul_(2)
    return x.sum(0)


@_case("in-place-on-intermediates")
class InPlace(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        kept = y.clone()
        view = y[1:3]
        view.mul_(2)
        y[0] = 7
        y[:, 1::2] -= 1
        y.relu_()
        z = torch.zeros(4, 8)
        z.index_add_(0, torch.tensor([0, 2]), y[:2])
        z.scatter_(1, torch.tensor([[0], [1], [2], [3]]), 5.0)
        return y, kept, view, z, y.masked_fill_(y > 3, 0)


@_case("in-place-through-views")
class ThroughViews(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        flat = y.view(-1)
        before = flat + 0
        flat[::3] = 1
        y.t().add_(torch.arange(4))
        left, right = y.chunk(2, 1)
        left += right
        return before, y * 1, left, right, flat.sum()


@_case("out-argument")
class Out(Linear):
    def forward(self, x: Any) -> Any:
        target = torch.empty(4, 8)
        torch.add(self.layer(x), 1, out=target)
        return target, torch.empty_like(x).fill_(3), x.new_empty(2).zero_(), x.new_full((2,), 4)


# What its weights are.


@_case("tied-weights", lambda: (torch.randint(0, 20, (2, 5)),))
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.second(self.first(self.embed(tokens))))


@_case("shared-module", lambda: (torch.randn(1, 4, 8, 8),))
class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.alias = self.conv

    def forward(self, x: Any) -> Any:
        first = self.norms[0](self.conv(x)).relu()
        return self.norms[1](self.alias(first)), self.conv(first)


@_case("views-of-parameters")
class ParameterViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(16, 8)
        self.left = nn.Parameter(whole[:8])
        self.right = nn.Parameter(whole[8:])
        self.register_buffer("part", whole[4:12])
        self.plain = whole[2]

    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.left) + functional.linear(x, self.right), x @ self.part.t() + self.plain


@_case("plain-attributes")
class PlainAttributes(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(8)
        self.items = [torch.randn(8), {"a": torch.randn(8)}]
        self.register_buffer("hidden", torch.randn(8), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.layer(x) + self.table + self.items[0] * self.items[1]["a"] + self.hidden


@_case("constant-folding")
class Folding(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position", torch.arange(8.0))

    def forward(self, x: Any) -> Any:
        angles = (self.position[:, None] * self.position[None, :] / 10).sin()
        scaled = self.layer.weight * 2 + self.layer.weight.t()
        return x @ angles, functional.linear(x, scaled), angles, scaled.sum()


@_case("weight-norm")
class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: Any) -> Any:
        return self.layer(x)


@_case("spectral-norm")
class SpectralNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Any) -> Any:
        return self.layer(x)


@_case("orthogonal")
class Orthogonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))

    def forward(self, x: Any) -> Any:
        return self.layer(x)


@_case("old-weight-norm")
class OldWeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.weight_norm(nn.Linear(8, 8))

    def forward(self, x: Any) -> Any:
        return self.layer(x)


@_case("lazy-modules")
class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(4)
        self.layer(torch.randn(1, 8))

    def forward(self, x: Any) -> Any:
        return self.layer(x)


@_case("parameters-made-in-inference-mode")
class InferenceParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.layer = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


_CASES["odd:parameters-made-in-inference-mode"] = partial(_build, InferenceParameters, _x, {"lively": False})


@_case("channels-last-weights", lambda: (torch.randn(2, 3, 8, 8),))
class ChannelsLastWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 36, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.conv(x)).relu()
        return self.head(y.flatten(1)), y


# How it is run.


@_case("autocast")
class Autocast(Linear):
    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x)
            z = y.float() @ x.t()
        return y, z, self.layer(x)


@_case("gradients-inside")
class GradientsInside(Linear):
    def forward(self, x: Any) -> Any:
        with torch.enable_grad():
            y = self.layer(x).sum(0)
        with torch.no_grad():
            return y * 2


@_case("jacobian")
class Jacobian(Linear):
    def forward(self, x: Any) -> Any:
        return torch.func.vmap(torch.func.jacrev(lambda row: self.layer(row).tanh()))(x)


@_case("gradient-of-input")
class GradientOfInput(Linear):
    def forward(self, x: Any) -> Any:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.layer(leaf).square().sum(), leaf)
        return found


@_case("checkpointing")
class Checkpointing(Linear):
    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False) + x


@_case("dropout-in-training", training=True)
class Dropout(Linear):
    def forward(self, x: Any) -> Any:
        return functional.dropout(self.layer(x), 0.5, self.training)


@_case("dropout-of-nothing-in-training", training=True)
class NoDropout(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Any) -> Any:
        return self.drop(self.layer(x))


@_function("random-numbers")
def _random(self: Any, x: Any) -> Any:
    return x + torch.rand_like(x)


@_function("random-numbers-seeded")
def _seeded(self: Any, x: Any) -> Any:
    return x + torch.rand(4, 8, generator=torch.Generator().manual_seed(0))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return 2 * context.saved_tensors[0] * gradient


@_case("autograd-function")
class AutogradFunction(Linear):
    def forward(self, x: Any) -> Any:
        return Square.apply(self.layer(x))


@library.custom_op("coverage::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """A custom operator without a decomposition."""
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@library.custom_op("coverage::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    """A custom operator that changes its argument."""
    x.add_(1)


@library.custom_op("coverage::tick", mutates_args=())
def tick(x: torch.Tensor) -> torch.Tensor:
    """A custom operator that gives something else each time."""
    return x + next(_ticks)


@tick.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_ticks = itertools.count()


_fragment = library.Library("coverage", "FRAGMENT")
_fragment.define("thrice(Tensor x) -> Tensor")
_fragment.impl("thrice", lambda x: x * 3, "CompositeImplicitAutograd")


@_case("custom-operator-not-trusted")
@_case("custom-operator", custom_operators=("coverage",))
class CustomOperator(Linear):
    def forward(self, x: Any) -> Any:
        return twice(self.layer(x)) + 1


@_case("custom-operator-that-decomposes")
class Decomposing(Linear):
    def forward(self, x: Any) -> Any:
        return torch.ops.coverage.thrice(self.layer(x))


@_case("custom-operator-in-place", custom_operators=("coverage",))
class CustomInPlace(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        bump(y)
        return y


@_case("custom-operator-not-deterministic", custom_operators=("coverage",))
class CustomTick(Linear):
    def forward(self, x: Any) -> Any:
        return tick(self.layer(x))


@_case("hooks")
class Hooked(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(lambda module, args, output: output * 2)
        self.layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.register_forward_hook(lambda module, args, output: {"out": output, "twice": output * 2})

    def forward(self, x: Any) -> Any:
        return self.layer(x)


@_case("scripted-part")
class ScriptedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    def forward(self, x: Any) -> Any:
        return self.layer(x) + 1


@_case("traced-part")
class TracedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(4, 8))

    def forward(self, x: Any) -> Any:
        return self.layer(x) + 1


def _scripted() -> Made:
    return Made(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), _x())


def _compiled() -> Made:
    return Made(torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="eager"), _x())


def _fx() -> Made:
    return Made(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()), _x())


def _exported() -> Made:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    images = torch.randn(1, 3, 8, 8)
    return Made(torch.export.export(model, (images,)).module(), (images,), training=True, lively=False)


def _data_parallel() -> Made:
    return Made(nn.DataParallel(nn.Linear(8, 8)), _x())


def _quantized() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    return Made(torch.ao.quantization.quantize_dynamic(model, {nn.Linear}), _x(), lively=False)


def _deep() -> Made:
    layers: list[nn.Module] = []
    for _ in range(400):
        layers += [nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)]
    return Made(nn.Sequential(*layers), _x())


_CASES |= {
    "odd:scripted": _scripted, "odd:compiled": _compiled, "odd:fx-traced": _fx, "odd:exported-program": _exported,
    "odd:data-parallel": _data_parallel, "odd:quantized-dynamically": _quantized, "odd:very-deep": _deep,
}  # fmt: skip


@_case("compiled-part")
class CompiledPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="eager")

    def forward(self, x: Any) -> Any:
        return self.layer(x) + 1


@_case("very-nested")
class Nested(nn.Module):
    def __init__(self, depth: int = 60) -> None:
        super().__init__()
        self.inner = Nested(depth - 1) if depth else nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.inner(x) + 0.01


@_function("sparse-inside")
def _sparse(self: Any, x: Any) -> Any:
    dense = torch.zeros(4, 4)
    dense[1, 2] = 3.0
    return torch.sparse.mm(dense.to_sparse(), x)


@_function("sparse-input", lambda: (torch.eye(4).to_sparse(), torch.randn(4, 8)))
def _sparse_input(self: Any, sparse: Any, x: Any) -> Any:
    return torch.sparse.mm(sparse, x)


@_case("sparse-weight")
class SparseWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(8).to_sparse_csr())

    def forward(self, x: Any) -> Any:
        return (self.weight @ x.t()).t()


# What the data decides.


@_function("branch-on-value")
def _branch(self: Any, x: Any) -> Any:
    return x if x.sum() > 0 else -x


@_function("loop-on-value")
def _loop(self: Any, x: Any) -> Any:
    while x.norm() > 1:
        x = x / 2
    return x


@_function("nonzero")
def _nonzero(self: Any, x: Any) -> Any:
    return x.nonzero()


@_function("mask-selects")
def _mask(self: Any, x: Any) -> Any:
    return x[x > 0].sum()


@_function("cond")
def _cond(self: Any, x: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))


@_function("branch-on-shape")
def _shape(self: Any, x: Any) -> Any:
    return x * 2 if x.shape[0] > 2 else x / 2


@_function("item-of-constant")
def _item(self: Any, x: Any) -> Any:
    return x * torch.tensor(2.5).item()


@_case("counts-its-calls")
class Counts(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.layer(x)


@_case("counter-decides")
class CounterDecides(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.layer(x) * self.calls


@_function("numpy-inside")
def _numpy(self: Any, x: Any) -> Any:
    return torch.from_numpy(x.numpy() * 2)


@_function("prints-and-asserts")
def _asserts(self: Any, x: Any) -> Any:
    assert x.shape[1] == 8
    torch._assert(x.shape[0] == 4, "four rows")
    return x + 1


@_function("sorts-and-picks", lambda: (torch.randn(6, 8),))
def _sorts(self: Any, x: Any) -> Any:
    values, places = x.sort(1)
    top = x.topk(3, 1)
    return (
        values,
        places,
        top,
        x.max(0),
        x.argmax(),
        x.median(1),
        x.cummax(1),
        torch.searchsorted(values, x),
    )


@_function("linear-algebra", lambda: (torch.eye(5) * 3 + torch.rand(5, 5) * 0.1,))
def _algebra(self: Any, x: Any) -> Any:
    symmetric = x @ x.t()
    return (
        torch.linalg.inv(x),
        torch.linalg.cholesky(symmetric),
        torch.linalg.solve(x, x + 1),
        torch.linalg.det(x),
        torch.linalg.norm(x),
        torch.linalg.eigvalsh(symmetric),
        torch.linalg.slogdet(x),
    )


@_function("einsum-and-indexing", lambda: (torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.tensor([2, 0])))
def _einsum(self: Any, a: Any, b: Any, where: Any) -> Any:
    return (
        torch.einsum("bij,bjk->bik", a, b), a[where], a[:, where, 1:], a[..., -1], a[:, None, ::2], a.flip(1), a.roll(1, 2), torch.take_along_dim(a, where.view(2, 1, 1), 0),
        a.gather(0, where.view(2, 1, 1).expand(2, 4, 5)), torch.meshgrid(where, where, indexing="ij"), a.unbind(1), a.split([1, 3], 1), torch.tensor_split(a, 2, 2),
    )  # fmt: skip


@_function("reduces-and-scans", lambda: (torch.randn(3, 4, 5),))
def _reduces(self: Any, x: Any) -> Any:
    return (
        x.std(), x.var(1, unbiased=False), x.logsumexp(2), x.prod(0), x.cumprod(1), x.amax((0, 2)), x.norm(dim=1), x.any(), (x > 0).all(1), x.mean((1, 2), keepdim=True),
        torch.std_mean(x, 1), torch.aminmax(x), x.diff(dim=1), x.histc(5), torch.cdist(x, x),   torch.trapezoid(x),
    )  # fmt: skip
