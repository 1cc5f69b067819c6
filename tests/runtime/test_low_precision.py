"""Models in few bits, written to a bundle and loaded: dtypes, quantisers' weights, PT2E's operators, and what loading watches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autosched.capture.export import Captured, capture
from autosched.core.graph import ITEM_BYTES
from autosched.core.program import ConstantSource
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime.bundle.format import read_bundle
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.load import FallbackWarning, load
from tests.conformance.bundles import evidence_for
from tests.conformance.forked import run_forked
from tests.conformance.precision import rounding
from tests.conformance.quantised import Quantised, quantised

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def written(captured: Captured) -> bytes:
    graph, device = captured.program.graph, cpu_device_key()
    names = {item.value: item.name for item in captured.program.bindings if item.source is ConstantSource.LITERAL}
    literals = {name: captured.constants[value] for value, name in names.items()}
    evidence = evidence_for(len(graph), device, graph.hash)
    return encode_bundle(make_bundle(captured.program, sequential(graph), evidence, literals, device, software_key()))


def served(model: nn.Module, *args: torch.Tensor) -> Any:
    """The model loaded from a bundle of it; nothing is said."""
    data = written(capture(model, args))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = load(data, model)
    assert loaded.report().scheduled
    return loaded


class Written(nn.Module):
    """A tensor in the model's code, which travels in the bundle."""

    def __init__(self, bits: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.bits, self.dtype = bits.view(dtype), dtype

    def forward(self, x: Any) -> Any:
        return self.bits.view(torch.uint8).float() + x


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_a_tensor_in_the_models_code_travels_in_any_dtype(name: str) -> None:
    bits = torch.randint(0, 2, (2, 16), dtype=torch.uint8)
    captured = capture(Written(bits, getattr(torch, name)).eval(), (torch.zeros(2, 16),))
    literals = read_bundle(written(captured)).literals
    assert [(str(item.dtype), item.contiguous().view(torch.uint8).tolist()) for item in literals.values()] == [
        (f"torch.{name}", bits.tolist())
    ]


class Float8(nn.Module):
    """Activations and an output in eight bits."""

    def forward(self, x: Any) -> Any:
        small = (x * 1.5).to(torch.float8_e4m3fn)
        return small, small.float().relu().sum(1)


def test_outputs_of_eight_bits_are_compared() -> None:
    x = torch.randn(4, 8)
    first, total = served(Float8().eval(), x)(x)
    wanted = Float8()(x)
    assert first.view(torch.uint8).equal(wanted[0].view(torch.uint8))
    assert total.equal(wanted[1])


def test_weights_that_are_several_tensors_are_found_and_watched() -> None:
    model, x = Quantised().eval(), torch.randn(4, 8)
    loaded = served(model, x)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))
        before = loaded(x)
        # In place: the numbers are read anew at each call, and what was computed from them is computed again.
        model.first.weight.numbers.mul_(-1)  # type: ignore[union-attr,operator]
        assert not torch.allclose(loaded(x), before)
        torch.testing.assert_close(loaded(x), model(x))
        # Replaced as a whole.
        model.second.weight = quantised(torch.randn(8, 8))
        torch.testing.assert_close(loaded(x), model(x))


class Exported(nn.Module):
    """What PT2E writes around a product."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (4, 8), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(4) + 0.1)
        self.register_buffer("zero", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        ops = torch.ops.quantized_decomposed
        small = ops.quantize_per_tensor(x, 0.04, 120, 0, 255, torch.uint8)
        x = ops.dequantize_per_tensor(small, 0.04, 120, 0, 255, torch.uint8)
        return functional.linear(x, ops.dequantize_per_channel(self.weight, self.scale, self.zero, 0, -128, 127, torch.int8))


def test_what_pt2e_writes_is_taken_without_trust() -> None:
    import torch.ao.quantization.fx._decomposed as registers  # noqa: F401

    model, x = Exported().eval(), torch.randn(3, 8)
    loaded = served(model, x)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))


_RESOLVES = """
import torch
from autosched.runtime.calls import resolve
assert not hasattr(torch.ops.quantized_decomposed, "quantize_per_tensor")
print(resolve("quantized_decomposed::quantize_per_tensor.default"))
"""


def test_a_process_that_never_quantised_anything_finds_pt2es_operators() -> None:
    """PyTorch registers them when a module of its own is imported; that of a server never was."""
    done = run_forked(_RESOLVES)
    assert done.returncode == 0, done.stderr
    assert "quantize_per_tensor" in done.stdout


class Autocast(nn.Module):
    """A region in bfloat16 that ends in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.softmax(self.first(x).relu(), -1) * x
        return self.second(x.float())


def test_an_autocast_region_is_part_of_the_schedule() -> None:
    model, x = Autocast().eval(), torch.randn(4, 64)
    loaded = served(model, x)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x), rtol=5e-2, atol=2e-2)


def _normalised(channels: int) -> nn.Module:
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    norm.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), norm, nn.ReLU())


def test_what_the_process_lets_onednn_round_is_no_error_of_a_schedule_and_part_of_its_key() -> None:
    """Normalisations are folded into other weights than the model's, so both are rounded, each to numbers of its own."""
    model, x = nn.Sequential(*(_normalised(32) for _ in range(4))).eval(), torch.randn(1, 32, 24, 24)
    with rounding(conv="bf16"):
        data = written(capture(model, (x,)))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert load(data, model).report().scheduled
    with pytest.warns(FallbackWarning, match="setting float32_convolutions: bf16 there, absent here"):
        load(data, model)
