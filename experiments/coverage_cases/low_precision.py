"""Models whose weights or activations are integers or eight-bit floats, and models with regions that PyTorch exports as sub-graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from experiments.coverage_cases.made import Build, Made

_CASES: dict[str, Build] = {}
_OUT, _IN = 32, 64  # of the weights: what every packed product takes


def cases() -> dict[str, Build]:
    """Case name to builder."""
    return dict(_CASES)


def _x(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return (torch.randn(8, _IN).to(dtype),)


def _case(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a model of one input ``[8, _IN]`` of ``dtype``; options as of ``Made``."""

    def register(kind: type[nn.Module]) -> type[nn.Module]:
        _CASES[f"low:{name}"] = partial(_build, kind, dtype, options)
        return kind

    return register


def _build(kind: type[nn.Module], dtype: torch.dtype, options: dict[str, Any]) -> Made:
    return Made(kind(), _x(dtype), lively=False, **options)


def _quantised(bits: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight ``[_OUT, _IN]`` as signed integers of that many bits, and a scale for each row."""
    weight = torch.randn(_OUT, _IN)
    most = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1) / most
    return (weight / scale[:, None]).round().clamp(-most - 1, most).to(torch.int8), scale


class Quantised(nn.Module):
    """A weight of eight bits, with scales."""

    def __init__(self) -> None:
        super().__init__()
        weight, scale = _quantised()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)


# Weights alone.


@_case("weight-int8-dequantised")
class Dequantised(Quantised):
    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight.to(x.dtype) * self.scale[:, None])


@_case("weight-int8-scaled-after", torch.bfloat16)
class ScaledAfter(Quantised):
    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)


@_case("weight-int8-packed", torch.bfloat16)
class Int8Packed(Quantised):
    def forward(self, x: Any) -> Any:
        return torch.ops.aten._weight_int8pack_mm(x, self.weight, self.scale.to(x.dtype))


@_case("weight-int4-packed", torch.bfloat16)
class Int4Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randint(0, 16, (_OUT, _IN), dtype=torch.int32)
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight, 1))
        self.register_buffer("scales", torch.rand(_IN // 32, _OUT, 2).to(torch.bfloat16))

    def forward(self, x: Any) -> Any:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, 32, self.scales)


@_case("weight-int4-unpacked")
class Int4Unpacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(0, 256, (_OUT, _IN // 2), dtype=torch.uint8))

    def forward(self, x: Any) -> Any:
        low, high = self.weight & 15, self.weight >> 4
        return functional.linear(x, torch.stack([low, high], -1).reshape(_OUT, _IN).to(x.dtype) - 8)


@_case("weight-float8")
class Float8Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(_OUT, _IN).to(torch.float8_e4m3fn))
        self.register_buffer("other", torch.randn(_OUT, _IN).to(torch.float8_e5m2))

    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight.to(x.dtype)) + functional.linear(x, self.other.to(x.dtype))


@_case("weight-float8-other-kinds")
class Float8Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
            self.register_buffer(str(dtype).removeprefix("torch."), torch.randn(_OUT, _IN).to(dtype))
        self.register_buffer("scale", torch.tensor([0.5, 1, 2, 4] * (_OUT // 4)).to(torch.float8_e8m0fnu))

    def forward(self, x: Any) -> Any:
        one, other = functional.linear(x, self.float8_e4m3fnuz.to(x.dtype)), functional.linear(x, self.float8_e5m2fnuz.to(x.dtype))
        return (one + other) * self.scale.to(x.dtype)


@_case("wide-unsigned")
class WideUnsigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.randint(0, 60_000, (_IN,), dtype=torch.uint16))
        self.register_buffer("middle", torch.randint(0, 2**31, (_IN,), dtype=torch.uint32))
        self.register_buffer("large", torch.randint(0, 2**31, (_IN,), dtype=torch.uint64))

    def forward(self, x: Any) -> Any:
        return x * self.small.to(x.dtype), x * self.middle.to(x.dtype), x * self.large.to(x.dtype)


@_case("weight-float4")
class Float4Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(0, 256, (_OUT, _IN // 2), dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
        self.register_buffer("table", torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]))

    def forward(self, x: Any) -> Any:
        codes = self.weight.view(torch.uint8)
        return functional.linear(x, self.table[torch.stack([codes & 15, codes >> 4], -1).reshape(_OUT, _IN).long()])


# Activations too.


@_case("dynamic-int8")
class DynamicInt8(Quantised):
    def forward(self, x: Any) -> Any:
        scale = x.abs().amax(1, keepdim=True) / 127
        return torch._int_mm((x / scale).round().to(torch.int8), self.weight.t()).to(x.dtype) * scale * self.scale


@_case("scaled-product-float8")
class ScaledProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(_OUT, _IN).to(torch.float8_e4m3fn))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Any) -> Any:
        scale = x.abs().max() / 448
        eight = (x / scale).to(torch.float8_e4m3fn)
        return torch._scaled_mm(eight, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=torch.bfloat16).relu()


@_case("gives-and-takes-float8", torch.float8_e4m3fn)
class GivesFloat8(nn.Module):
    def forward(self, x: Any) -> Any:
        wide = x.to(torch.float32).relu() * 1.5
        return wide.to(torch.float8_e4m3fn), wide.to(torch.float8_e5m2), x.t(), wide.sum(1)


@_case("gives-and-takes-int8", torch.int8)
class GivesInt8(Quantised):
    def forward(self, x: Any) -> Any:
        product = torch._int_mm(x, self.weight.t())
        return product, (product >> 8).clamp(-128, 127).to(torch.int8)


def _exported_quantised() -> Made:
    """What PT2E writes: quantise and dequantise around a product and a convolution."""
    import torch.ao.quantization.fx._decomposed as _  # noqa: F401 (registers the operators)

    return Made(ExportedQuantised(), (torch.randn(2, 3, 16, 16),), lively=False)


class ExportedQuantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(16, 3, 3, 3)
        scale = weight.abs().amax((1, 2, 3)) / 127
        self.register_buffer("kernel", (weight / scale[:, None, None, None]).round().to(torch.int8))
        self.register_buffer("kernel_scale", scale)
        self.register_buffer("kernel_zero", torch.zeros(16, dtype=torch.int64))
        matrix = torch.randn(10, 16)
        scale = matrix.abs().amax(1) / 127
        self.register_buffer("matrix", (matrix / scale[:, None]).round().to(torch.int8))
        self.register_buffer("matrix_scale", scale)
        self.register_buffer("matrix_zero", torch.zeros(10, dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        ops = torch.ops.quantized_decomposed
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, 0.04, 120, 0, 255, torch.uint8), 0.04, 120, 0, 255, torch.uint8)
        kernel = ops.dequantize_per_channel(self.kernel, self.kernel_scale, self.kernel_zero, 0, -128, 127, torch.int8)
        x = functional.conv2d(x, kernel).relu()
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, 0.1, 0, 0, 255, torch.uint8), 0.1, 0, 0, 255, torch.uint8)
        x = x.mean((2, 3))
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, 0.05, 0, 0, 255, torch.uint8), 0.05, 0, 0, 255, torch.uint8)
        matrix = ops.dequantize_per_channel(self.matrix, self.matrix_scale, self.matrix_zero, 0, -128, 127, torch.int8)
        return functional.linear(x, matrix)


_CASES["low:exported-quantised"] = _exported_quantised


@_case("fake-quantised")
class FakeQuantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_IN, _OUT)
        self.register_buffer("scale", torch.full((_OUT,), 0.01))
        self.register_buffer("zero", torch.zeros(_OUT, dtype=torch.int32))

    def forward(self, x: Any) -> Any:
        weight = torch.fake_quantize_per_channel_affine(self.layer.weight, self.scale, self.zero, 0, -128, 127)
        return functional.linear(torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127), weight, self.layer.bias)


@_case("quantised-tensors-inside")
class QuantisedInside(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()


def _statically() -> Made:
    model = nn.Sequential(torch.ao.quantization.QuantStub(), nn.Linear(_IN, _OUT), nn.ReLU(), torch.ao.quantization.DeQuantStub()).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("onednn")
    prepared = torch.ao.quantization.prepare(model)
    prepared(*_x())
    return Made(torch.ao.quantization.convert(prepared), _x(), lively=False)


_CASES["low:quantised-statically"] = _statically


def _embedding_bytes() -> Made:
    return Made(EmbeddingBytes(), (torch.randint(0, 50, (12,)),), lively=False, custom_operators=("quantized",))


class EmbeddingBytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ops.quantized.embedding_bag_byte_prepack(torch.randn(50, 16)))
        self.register_buffer("offsets", torch.tensor([0, 4, 9]))

    def forward(self, indices: Any) -> Any:
        return torch.ops.quantized.embedding_bag_byte_rowwise_offsets(self.table, indices, self.offsets, False, 0, False, None, None, False)


_CASES["low:embedding-bag-of-bytes"] = _embedding_bytes


# Regions.


class Mixed(nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_IN, _IN), nn.Linear(_IN, _OUT)


@_case("autocast-inside")
class AutocastInside(Mixed):
    def forward(self, x: Any) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = torch.softmax(self.first(x).relu(), -1) * x
        return self.second(y.float())


@_case("autocast-switched-off-inside")
class AutocastNested(Mixed):
    def forward(self, x: Any) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.first(x)
            with torch.autocast(x.device.type, enabled=False):
                y = self.second(y.float() + 1)
            return y, self.first(x) + 1


@_case("autocast-decorated")
class AutocastDecorated(Mixed):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: Any) -> Any:
        return {"out": self.second(self.first(x).relu())}


@_case("autocast-branches")
class AutocastBranches(Mixed):
    def forward(self, x: Any) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            left, right = self.first(x), self.first(x + 1)
        return (left + right).float() + x


@_case("no-grad-inside")
class NoGradInside(Mixed):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            y = self.first(x)
        with torch.enable_grad():
            z = self.second(y)
        torch.set_grad_enabled(False)
        return z.relu()


@_case("inference-mode-inside")
class InferenceInside(Mixed):
    def forward(self, x: Any) -> Any:
        with torch.inference_mode():
            y = self.first(x)
        return self.second(y)


@_case("checkpointed")
class Checkpointed(Mixed):
    def forward(self, x: Any) -> Any:
        return self.second(checkpoint(self.first, x, use_reentrant=False) + 1)


@_case("checkpointed-reentrant")
class CheckpointedOld(Mixed):
    def forward(self, x: Any) -> Any:
        return self.second(checkpoint(self.first, x, use_reentrant=True) + 1)


def _flex() -> Made:
    return Made(Flex(), tuple(torch.randn(1, 2, 128, 16) for _ in range(3)))


class Flex(nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -float("inf")))


_CASES["low:flex-attention"] = _flex


def _flex_block() -> Made:
    return Made(FlexBlock(), tuple(torch.randn(1, 2, 128, 16) for _ in range(3)))


class FlexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import create_block_mask

        self.mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu")

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, block_mask=self.mask)


_CASES["low:flex-attention-block-mask"] = _flex_block


@_case("nested-tensors-inside")
class NestedInside(Mixed):
    def forward(self, x: Any) -> Any:
        nested = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)
        return self.second(nested).values()


@_case("half-complex", torch.float16)
class HalfComplex(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.view_as_real(torch.complex(x, x + 1) * 2)


@_case("float16-eager", torch.float16)
class Float16(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.half()

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).relu()).float().softmax(-1)
