"""Matrix products without a bias through cuBLASLt, which PyTorch takes for those with one. All that knows how.

Read in PyTorch's ``Blas.cpp`` (2.11): ``addmm`` with a vector added goes to cuBLASLt, and every other product to plain cuBLAS, unless the
process prefers cuBLASLt (``torch.backends.cuda.preferred_blas_library``). The two choose among different kernels by different rules, and
for small products in float32 the better one may be several times faster: so both are timed.

The choice is made when a product is launched. A capture records the kernel, and replays need nothing set. The setting belongs to the whole
process: a product that another thread starts during the call goes to cuBLASLt, too, which is another choice of kernel and no more.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from autosched.core.graph import Operator, OpGraph
from autosched.core.program import Call, Ref
from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.cuda.switches import changing

_WITHOUT_BIAS = frozenset({"aten::mm", "aten::bmm", "aten::matmul"})
_LINEAR = "aten::linear"
_BIAS = 2  # place among the arguments of a linear layer
_DTYPES = frozenset({"float32", "float16", "bfloat16"})


def supported() -> bool:
    """Whether this PyTorch can be told which library to take."""
    return hasattr(torch.backends.cuda, "preferred_blas_library")


def is_product(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` calls a product that PyTorch would not give to cuBLASLt by itself."""
    return any(
        _without_bias(call) and any(graph.values[value].spec.dtype in _DTYPES for value in call.outputs if value >= 0)
        for call in operator.calls
    )


def refusal(device: torch.device) -> str:
    """Why products cannot go to cuBLASLt on ``device``; empty if they can."""
    if device.type != "cuda" or not supported():
        return f"torch {torch.__version__} has no choice of a library for products on {device.type}"
    return ""


def through_lt(kernel: Kernel) -> Kernel:
    """``kernel`` with every product in it by cuBLASLt."""
    return called_within(preferred, kernel)


def called_within(setting: Callable[[], AbstractContextManager[None]], kernel: Kernel) -> Kernel:
    """``kernel`` under a setting of PyTorch's that lasts for the call."""
    with warnings.catch_warnings():
        # Such settings warn once that they are experimental, which is known.
        warnings.simplefilter("ignore")
        with changing, setting():
            pass

    def run(slots: Slots) -> None:
        with changing, setting():
            kernel(slots)

    return run


@contextlib.contextmanager
def preferred() -> Iterator[None]:
    """Within, products go to cuBLASLt."""
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(library)


def _without_bias(call: Call) -> bool:
    name = call.target.partition(".")[0]
    if name != _LINEAR:
        return name in _WITHOUT_BIAS
    bias = call.args[_BIAS] if len(call.args) > _BIAS else dict(call.kwargs).get("bias")
    return not isinstance(bias, Ref)
