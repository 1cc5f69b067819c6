"""Values of Triton kernels, against the same functions on a CPU; run as ``test_emulator.py`` is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

if not torch.cuda.is_available() or not torch.cuda.get_device_name().startswith("Emulated"):
    pytest.skip("needs the emulated device: see README.md", allow_module_level=True)

Function = Callable[..., torch.Tensor]


def made(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "elements": (lambda x, y: torch.relu(x) * torch.sigmoid(y) + torch.tanh(x), (made(37, 53), made(37, 53))),
    "library": (lambda x: torch.erf(x) + torch.expm1(x) + torch.log1p(x.abs()) + torch.pow(x.abs(), 1.3), (made(1000),)),
    "sum of rows": (lambda x: (x * 2).sum(-1), (made(64, 3000),)),
    "maximum of rows": (lambda x: (x + 1).amax(-1), (made(19, 77),)),
    "softmax": (lambda x: torch.softmax(x * 0.5, -1), (made(128, 96),)),
    "layer norm": (lambda x: functional.layer_norm(x, (x.shape[-1],)), (made(50, 300),)),
    "variance": (lambda x: x.var(0), (made(3000, 5),)),
    "argmax": (lambda x: torch.argmax(x * 2, -1), (made(33, 1500),)),
    "running sum": (lambda x: torch.cumsum(x, -1), (made(6, 100),)),
    "running maximum": (lambda x: torch.cummax(x, -1).values, (made(6, 64),)),
    "transposed": (lambda x: (x.transpose(0, 1) + 1).contiguous(), (made(70, 90),)),
    "gather": (lambda x, i: functional.embedding(i, x).relu(), (made(30, 16), torch.arange(20) % 7)),
    "pooling": (lambda x: functional.max_pool2d(x.relu(), 3, 2, 1), (made(2, 3, 15, 15),)),
    "half precision": (lambda x: functional.gelu(x.bfloat16()).float(), (made(40, 64),)),
    "everything": (lambda x: (x * x).mean(), (made(300, 400),)),
}  # fmt: skip


def check(function: Function, args: tuple[torch.Tensor, ...], tolerance: float = 1e-4, **options: object) -> None:
    torch.compiler.reset()
    compiled = torch.compile(function, dynamic=False, options={"triton.cudagraphs": False, "fx_graph_cache": False, **options})
    with torch.no_grad():
        wanted = function(*args)
        got = compiled(*(item.cuda() for item in args))
    got, wanted = (got, wanted) if isinstance(got, tuple) else ((got,), (wanted,))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_what_the_function_does(name: str) -> None:
    function, args = CASES[name]
    check(function, args, tolerance=2e-2 if name == "half precision" else 1e-4)


def test_a_product_by_a_template() -> None:
    check(
        lambda x, y: torch.relu(x @ y) + 1.0,
        (made(64, 128), made(128, 96)),
        tolerance=1e-2,
        max_autotune=True,
        max_autotune_gemm_backends="TRITON",
    )


def test_kernels_combined() -> None:
    def several(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.relu(x) + 1, torch.sigmoid(y) * 2, torch.softmax(x, -1), y.sum(-1)

    check(several, (made(40, 96), made(30, 128)), combo_kernels=True)  # type: ignore[arg-type]


def test_kernels_combined_and_tuned() -> None:
    def several(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.relu(x) + 1, torch.sigmoid(y) * 2, torch.softmax(x, -1), y.sum(-1)

    options = {"combo_kernels": True, "benchmark_combo_kernel": True, "coordinate_descent_tuning": True, "max_autotune": True}
    check(several, (made(40, 96), made(30, 128)), **options)  # type: ignore[arg-type]
