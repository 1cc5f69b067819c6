"""Products without a bias through cuBLASLt: offered where PyTorch would take cuBLAS, chosen for the call alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.variants import Lowering, Variant
from autosched.runtime.calls import Slots
from autosched.runtime.cuda import blas_lt
from autosched.runtime.cuda.switches import products_library
from autosched.runtime.inductor.common import Refused
from autosched.runtime.regions import library as regions
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.regions.pieces import offered_variants
from tests.conformance.waiting import at_once

GPU = torch.device("cuda:0")


class Net(nn.Module):
    """A product of each kind; ``kind`` chooses one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.plain, self.biased = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "bmm":
            made = torch.bmm(x, x)
        elif self.kind == "mm":
            made = torch.mm(x[0], x[0])
        elif self.kind in ("matrix", "vector"):
            made = torch.addmm(x[0] if self.kind == "matrix" else x[0, 0], x[0], x[1])
        elif self.kind == "batch":
            made = torch.baddbmm(x, x, x)
        else:
            made = self.plain(x) if self.kind == "plain" else self.biased(x)
        return torch.cumsum(made, 0)


class Library:
    """Stands in for PyTorch's process-wide choice; ``seen`` is what each call of a kernel found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.preferred = "default"
        self.seen: list[str] = []
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", self._prefer)

    def _prefer(self, library: str | None = None) -> str:
        self.preferred = library or self.preferred
        return self.preferred

    def kernel(self, slots: Slots) -> None:
        self.seen.append(self.preferred)


def offered(kind: str, dtype: torch.dtype, lowering: Lowering, device: str = "cuda") -> int:
    program = capture(Net(kind).eval().to(dtype), (torch.randn(2, 8, 8).to(dtype),), lowering=lowering).program
    return sum(Variant.CUBLASLT in row for row in offered_variants(program, device))


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, Lowering.FUSED])
@pytest.mark.parametrize(
    ("kind", "expected"), [("plain", 1), ("mm", 1), ("bmm", 1), ("biased", 0), ("matrix", 1), ("vector", 0), ("batch", 1)]
)
def test_products_without_a_bias_that_is_a_vector_have_the_variant_on_a_gpu(kind: str, expected: int, lowering: Lowering) -> None:
    assert offered(kind, torch.float32, lowering) == expected
    assert offered(kind, torch.float32, lowering, "cpu") == 0


def test_other_dtypes_and_other_lowerings_have_not() -> None:
    assert offered("plain", torch.bfloat16, Lowering.REWRITTEN) == 1
    assert offered("plain", torch.float64, Lowering.REWRITTEN) == 0
    assert offered("plain", torch.float32, Lowering.ATEN) == 0


def test_without_the_interface_it_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.backends.cuda, "preferred_blas_library")
    assert offered("plain", torch.float32, Lowering.REWRITTEN) == 0
    assert "has no choice of a library" in blas_lt.refusal(GPU)


def test_a_call_prefers_it_and_leaves_the_choice_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch)
    blas_lt.through_lt(library.kernel)([])
    assert library.seen == ["cublaslt"]
    assert library.preferred == "default"

    def broken(slots: Slots) -> None:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        blas_lt.through_lt(broken)([])
    assert library.preferred == "default"


def test_calls_of_two_threads_leave_the_choice_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one puts back last would be what the other one had set, and every later product of the process would go to cuBLASLt."""
    library, inside = Library(monkeypatch), list[int]()
    both, first_left = threading.Event(), threading.Event()

    def call(number: int) -> None:
        def kernel(slots: Slots) -> None:
            inside.append(number)
            # Were both let in, the first would leave first.
            if inside[0] == number:
                both.wait(0.2)
            else:
                both.set()
                first_left.wait(0.2)

        blas_lt.through_lt(kernel)([])
        first_left.set()

    at_once(call, range(2))
    assert sorted(inside) == [0, 1]
    assert library.preferred == "default"


def test_another_thread_is_told_what_the_process_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a file meanwhile would find another setting than it was made under."""
    preferred, told = [SimpleNamespace(name="Default")], list[str]()

    def prefer(library: Any = None) -> SimpleNamespace:
        if library is not None:
            preferred[0] = SimpleNamespace(name=library.capitalize()) if isinstance(library, str) else library
        return preferred[0]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    reader = threading.Thread(target=lambda: told.append(products_library()))

    def kernel(slots: Slots) -> None:
        assert products_library() == "cublaslt"
        reader.start()
        reader.join(0.1)

    blas_lt.through_lt(kernel)([])
    reader.join()
    assert told == [""]


def test_the_library_gives_the_calls_and_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch)
    monkeypatch.setattr(regions, "missing_compiler", lambda kind: "Triton is not installed")
    monkeypatch.setattr(regions, "compile_call", lambda call, device: library.kernel)
    program = capture(Net("plain").eval(), (torch.randn(2, 8, 8),), lowering=Lowering.REWRITTEN).program
    graph = program.graph
    product = next(operator.index for operator in graph.operators if blas_lt.is_product(operator, graph))
    made: Any = RegionLibrary(program, GPU, "scope").kernel(product, 1, Variant.CUBLASLT)
    assert not isinstance(made, Refused)
    made([None] * len(graph.values))
    assert set(library.seen) == {"cublaslt"}
    other = next(operator.index for operator in graph.operators if operator.index != product)
    for device, index, reason in ((GPU, other, "without a bias"), (torch.device("cpu"), product, "on cpu")):
        refused = RegionLibrary(program, device, "scope").kernel(index, 1, Variant.CUBLASLT)
        assert isinstance(refused, Refused)
        assert reason in refused.reason
