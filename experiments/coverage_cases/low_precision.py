"""Models whose weights or activations are integers or floats of sixteen bits and fewer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from experiments.coverage_cases.case_list import CaseList
from experiments.coverage_cases.made import Build, Made

_OUT, _IN = 32, 64  # of the weights: what every packed product takes


def _rows(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return (torch.randn(8, _IN).to(dtype),)


CASES = CaseList("low", _rows, lively=False)


def cases() -> dict[str, Build]:
    """Case name to builder."""
    return CASES.builders


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


@CASES.model("weight-int8-dequantised")
class Dequantised(Quantised):
    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight.to(x.dtype) * self.scale[:, None])


@CASES.model("weight-int8-scaled-after", partial(_rows, torch.bfloat16))
class ScaledAfter(Quantised):
    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)


@CASES.model("weight-int8-packed", partial(_rows, torch.bfloat16))
class Int8Packed(Quantised):
    def forward(self, x: Any) -> Any:
        return torch.ops.aten._weight_int8pack_mm(x, self.weight, self.scale.to(x.dtype))


@CASES.model("weight-int4-packed", partial(_rows, torch.bfloat16))
class Int4Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randint(0, 16, (_OUT, _IN), dtype=torch.int32)
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight, 1))
        self.register_buffer("scales", torch.rand(_IN // 32, _OUT, 2).to(torch.bfloat16))

    def forward(self, x: Any) -> Any:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, 32, self.scales)


@CASES.model("weight-int4-unpacked")
class Int4Unpacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(0, 256, (_OUT, _IN // 2), dtype=torch.uint8))

    def forward(self, x: Any) -> Any:
        low, high = self.weight & 15, self.weight >> 4
        return functional.linear(x, torch.stack([low, high], -1).reshape(_OUT, _IN).to(x.dtype) - 8)


@CASES.model("weight-float8")
class Float8Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(_OUT, _IN).to(torch.float8_e4m3fn))
        self.register_buffer("other", torch.randn(_OUT, _IN).to(torch.float8_e5m2))

    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight.to(x.dtype)) + functional.linear(x, self.other.to(x.dtype))


@CASES.model("weight-float8-other-kinds")
class Float8Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
            self.register_buffer(str(dtype).removeprefix("torch."), torch.randn(_OUT, _IN).to(dtype))
        self.register_buffer("scale", torch.tensor([0.5, 1, 2, 4] * (_OUT // 4)).to(torch.float8_e8m0fnu))

    def forward(self, x: Any) -> Any:
        one, other = functional.linear(x, self.float8_e4m3fnuz.to(x.dtype)), functional.linear(x, self.float8_e5m2fnuz.to(x.dtype))
        return (one + other) * self.scale.to(x.dtype)


@CASES.model("wide-unsigned")
class WideUnsigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.randint(0, 60_000, (_IN,), dtype=torch.uint16))
        self.register_buffer("middle", torch.randint(0, 2**31, (_IN,), dtype=torch.uint32))
        self.register_buffer("large", torch.randint(0, 2**31, (_IN,), dtype=torch.uint64))

    def forward(self, x: Any) -> Any:
        return x * self.small.to(x.dtype), x * self.middle.to(x.dtype), x * self.large.to(x.dtype)


@CASES.model("weight-float4")
class Float4Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(0, 256, (_OUT, _IN // 2), dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
        self.register_buffer("table", torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]))

    def forward(self, x: Any) -> Any:
        codes = self.weight.view(torch.uint8)
        return functional.linear(x, self.table[torch.stack([codes & 15, codes >> 4], -1).reshape(_OUT, _IN).long()])


@CASES.model("dynamic-int8")
class DynamicInt8(Quantised):
    def forward(self, x: Any) -> Any:
        scale = x.abs().amax(1, keepdim=True) / 127
        return torch._int_mm((x / scale).round().to(torch.int8), self.weight.t()).to(x.dtype) * scale * self.scale


@CASES.model("scaled-product-float8")
class ScaledProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(_OUT, _IN).to(torch.float8_e4m3fn))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Any) -> Any:
        scale = x.abs().max() / 448
        eight = (x / scale).to(torch.float8_e4m3fn)
        return torch._scaled_mm(eight, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=torch.bfloat16).relu()


@CASES.model("gives-and-takes-float8", partial(_rows, torch.float8_e4m3fn))
class GivesFloat8(nn.Module):
    def forward(self, x: Any) -> Any:
        wide = x.to(torch.float32).relu() * 1.5
        return wide.to(torch.float8_e4m3fn), wide.to(torch.float8_e5m2), x.t(), wide.sum(1)


@CASES.model("gives-and-takes-int8", partial(_rows, torch.int8))
class GivesInt8(Quantised):
    def forward(self, x: Any) -> Any:
        product = torch._int_mm(x, self.weight.t())
        return product, (product >> 8).clamp(-128, 127).to(torch.int8)


@CASES.model("exported-quantised", lambda: (torch.randn(2, 3, 16, 16),))
class ExportedQuantised(nn.Module):
    """What PT2E writes: quantise and dequantise around a product and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        import torch.ao.quantization.fx._decomposed as _  # noqa: F401 (registers the operators)

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


@CASES.model("fake-quantised")
class FakeQuantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_IN, _OUT)
        self.register_buffer("scale", torch.full((_OUT,), 0.01))
        self.register_buffer("zero", torch.zeros(_OUT, dtype=torch.int32))

    def forward(self, x: Any) -> Any:
        weight = torch.fake_quantize_per_channel_affine(self.layer.weight, self.scale, self.zero, 0, -128, 127)
        return functional.linear(torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127), weight, self.layer.bias)


@CASES.model("quantised-tensors-inside")
class QuantisedInside(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()


def _statically() -> Made:
    model = nn.Sequential(torch.ao.quantization.QuantStub(), nn.Linear(_IN, _OUT), nn.ReLU(), torch.ao.quantization.DeQuantStub()).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("onednn")
    prepared = torch.ao.quantization.prepare(model)
    prepared(*_rows())
    return Made(torch.ao.quantization.convert(prepared), _rows(), lively=False)


CASES.add("quantised-statically", _statically)


@CASES.model("embedding-bag-of-bytes", lambda: (torch.randint(0, 50, (12,)),), custom_operators=("quantized",))
class EmbeddingBytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ops.quantized.embedding_bag_byte_prepack(torch.randn(50, 16)))
        self.register_buffer("offsets", torch.tensor([0, 4, 9]))

    def forward(self, indices: Any) -> Any:
        return torch.ops.quantized.embedding_bag_byte_rowwise_offsets(self.table, indices, self.offsets, False, 0, False, None, None, False)


@CASES.model("half-complex", partial(_rows, torch.float16))
class HalfComplex(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.view_as_real(torch.complex(x, x + 1) * 2)


@CASES.model("float16-eager", partial(_rows, torch.float16))
class Float16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_IN, _IN), nn.Linear(_IN, _OUT)
        self.half()

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).relu()).float().softmax(-1)
