"""Products on half of the multiprocessors: offered where they can be, set for the call alone, and refused with a reason elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.variants import Lowering, Variant
from autosched.runtime.calls import Slots
from autosched.runtime.cuda import sm_share
from autosched.runtime.inductor.common import Refused
from autosched.runtime.regions import compile as region_compile
from autosched.runtime.regions import library as regions
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.regions.pieces import variants_of

GPU = torch.device("cuda:0")


class Net(nn.Module):
    """A product, and a normalisation that is none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(torch.mm(x, x), 0)


def captured(dtype: torch.dtype) -> Captured:
    return capture(Net().eval(), (torch.randn(8, 8).to(dtype),), lowering=Lowering.FUSED)


class Settings:
    """Stands in for PyTorch's two process-wide settings; ``seen`` is what each call of a kernel found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, generation: int = 9) -> None:
        self.carveout: int | None = None
        self.preferred = "default"
        self.seen: list[tuple[str, int | None]] = []
        monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: self.carveout, raising=False)
        monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", self._set, raising=False)
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", self._prefer)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))

    def _set(self, spared: int | None) -> None:
        self.carveout = spared

    def _prefer(self, library: str | None = None) -> str:
        self.preferred = library or self.preferred
        return self.preferred

    def kernel(self, slots: Slots) -> None:
        self.seen.append((self.preferred, self.carveout))


def test_a_call_runs_under_the_settings_and_leaves_them_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(monkeypatch)
    settings.carveout = 16
    run = sm_share.on_half(settings.kernel, GPU)
    run([])
    assert settings.seen == [("cublaslt", 66)]
    assert (settings.preferred, settings.carveout) == ("default", 16)

    def broken(slots: Slots) -> None:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        sm_share.on_half(broken, GPU)([])
    assert (settings.preferred, settings.carveout) == ("default", 16)


@pytest.mark.parametrize(("dtype", "offered"), [(torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 0)])
def test_only_products_in_half_precision_on_a_gpu_have_the_variant(
    dtype: torch.dtype, offered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Settings(monkeypatch)
    graph = captured(dtype).program.graph
    on_gpu = [variants_of(operator, graph, "cuda") for operator in graph.operators]
    assert sum(Variant.HALF_SMS in variants for variants in on_gpu) == offered
    assert not any(Variant.HALF_SMS in variants_of(operator, graph, "cpu") for operator in graph.operators)


def test_without_the_interface_it_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental", raising=False)
    graph = captured(torch.bfloat16).program.graph
    assert not any(Variant.HALF_SMS in variants_of(operator, graph, "cuda") for operator in graph.operators)
    assert "cannot keep cuBLASLt off" in sm_share.refusal(GPU)


def test_the_library_gives_the_calls_of_a_product_and_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(monkeypatch)
    monkeypatch.setattr(regions, "missing_compiler", lambda kind: "Triton is not installed")
    asked: list[Any] = []
    monkeypatch.setattr(region_compile, "compile_piece", lambda *call, **options: asked.append(call))
    monkeypatch.setattr(regions, "compile_call", lambda call, device: settings.kernel)
    found = captured(torch.bfloat16)
    graph = found.program.graph
    product = next(operator.index for operator in graph.operators if sm_share.is_product(operator, graph))
    library = RegionLibrary(found.program, GPU, "scope")
    made = library.kernel(product, 1, Variant.HALF_SMS)
    assert not isinstance(made, Refused)
    made([None] * len(graph.values))
    assert set(settings.seen) == {("cublaslt", 66)}
    assert library._jobs([(product, 1, Variant.HALF_SMS)]) == {}
    assert not asked
    other = next(operator.index for operator in graph.operators if operator.index != product)
    refused = library.kernel(other, 1, Variant.HALF_SMS)
    assert isinstance(refused, Refused)
    assert "only matrix products" in refused.reason


def test_other_generations_and_the_cpu_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    Settings(monkeypatch, generation=10)
    found = captured(torch.bfloat16)
    for device, reason in ((GPU, "generation 10"), (torch.device("cpu"), "on a GPU")):
        refused = RegionLibrary(found.program, device, "scope").kernel(0, 1, Variant.HALF_SMS)
        assert isinstance(refused, Refused)
        assert reason in refused.reason
