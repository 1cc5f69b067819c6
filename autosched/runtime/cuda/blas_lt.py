"""Matrix products without a bias through cuBLASLt, which PyTorch takes for those with one. All that knows how.

Read in PyTorch's ``Blas.cpp`` (2.11): ``addmm`` with a vector added goes to cuBLASLt, and every other product to plain cuBLAS, unless the
process prefers cuBLASLt (``torch.backends.cuda.preferred_blas_library``). The two choose among different kernels by different rules, and
for small products in float32 the better one may be several times faster: so both are timed. A product that Inductor's code for a whole
model launches is one of PyTorch's own (``extern_kernels.mm``), and mostly without its bias, which Inductor adds in a kernel of its own.

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
from autosched.core.program import Argument, Call, Ref
from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.cuda.switches import changing

_WITHOUT_BIAS = frozenset({"mm", "bmm", "baddbmm", "matmul"})
_ADDED, _LINEAR = "addmm", "linear"
_BIAS = 2  # place among the arguments of a linear layer
_LIBRARIES = ("aten", "inductor")
_DTYPES = frozenset({"float32", "float16", "bfloat16"})


def supported() -> bool:
    """Whether this PyTorch can be told which library to take."""
    return hasattr(torch.backends.cuda, "preferred_blas_library")


def is_product(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` calls a product that PyTorch would not give to cuBLASLt by itself."""
    return any(
        # A launch may write into a buffer that another one made, and then it makes nothing itself.
        _without_bias(call, graph)
        and any(graph.values[value].spec.dtype in _DTYPES for value in (*call.outputs, *call.reads()) if value >= 0)
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
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(library)


def _without_bias(call: Call, graph: OpGraph) -> bool:
    library, _, name = call.target.partition("::")
    name = name.partition(".")[0]
    if library not in _LIBRARIES:
        return False
    if name == _ADDED:
        return not _is_vector(call.args[0], graph)
    if name == _LINEAR:
        bias = call.args[_BIAS] if len(call.args) > _BIAS else dict(call.kwargs).get("bias")
        return not isinstance(bias, Ref)
    return name in _WITHOUT_BIAS


def _is_vector(added: Argument, graph: OpGraph) -> bool:
    """Whether that is what is added: of a launch, the first tensor that it reads. Where kernels are chosen by timing, Inductor may hand a
    vector over as a matrix, which PyTorch gives to cuBLAS; it has timed cuBLASLt beside that.
    """
    return isinstance(added, Ref) and len(graph.values[added.value].spec.shape) == 1
