"""Matrix products of cuBLASLt on half of a GPU's multiprocessors: slower alone, and a better neighbour. All that knows how.

Persistent kernels start one block on every multiprocessor, and whatever runs beside them waits or takes a second wave. PyTorch can tell
cuBLASLt to aim at fewer (``torch._C._set_sm_carveout_experimental``; private, the same in PyTorch 2.11 to 2.15). What that does, as read in
PyTorch's ``CUDABlas.cpp``:

* The number goes into the description of a product that is handed to cuBLASLt, when it is handed over. A capture therefore records the
  kernel that was chosen under it, and replays need nothing set.
* Products that go to plain cuBLAS never see it: in 2.11 that is every ``mm`` and ``bmm``, only ``addmm`` with a bias goes to cuBLASLt. So
  cuBLASLt is preferred for the duration of the call as well (``blas_lt.py``).
* It steers the choice of a kernel, and is the size of the grid only of persistent kernels: on Hopper those of float16 and bfloat16.
  Products in float32 are not offered, and later GPUs, where it has no effect on the grid, refuse. Convolutions and attention do not look
  at it.

*Source:* pull requests 147966 and 183330 of PyTorch.

Both settings belong to the whole process: a product that another thread starts during the call may get them too, which changes its speed,
and of its result no more than another choice of kernel does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autosched.core.graph import Operator, OpGraph
from autosched.runtime.calls import Kernel
from autosched.runtime.cuda import blas_lt

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul"})
_DTYPES = frozenset({"float16", "bfloat16"})
_HOPPER = 9


def supported() -> bool:
    """Whether this PyTorch has the interfaces."""
    names = ("_get_sm_carveout_experimental", "_set_sm_carveout_experimental")
    return all(hasattr(torch._C, name) for name in names) and blas_lt.supported()


def is_product(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` calls a product that may run on fewer multiprocessors."""
    return any(
        call.target.partition(".")[0] in _PRODUCTS
        and any(graph.values[value].spec.dtype in _DTYPES for value in call.outputs if value >= 0)
        for call in operator.calls
    )


def refusal(device: torch.device) -> str:
    """Why products cannot run on half of ``device``; empty if they can."""
    if not supported():
        return f"torch {torch.__version__} cannot keep cuBLASLt off a part of the multiprocessors"
    major = torch.cuda.get_device_capability(device)[0]
    return "" if major == _HOPPER else f"cuBLASLt keeps off a part of the multiprocessors on Hopper only, this GPU is of generation {major}"


def on_half(kernel: Kernel, device: torch.device) -> Kernel:
    """``kernel`` with every product in it aimed at half of the multiprocessors of ``device``."""
    spared = torch.cuda.get_device_properties(device).multi_processor_count // 2
    return blas_lt.called_within(lambda: _spared(spared), kernel)


@contextlib.contextmanager
def _spared(multiprocessors: int) -> Iterator[None]:
    before = torch._C._get_sm_carveout_experimental()
    with blas_lt.preferred():
        try:
            torch._C._set_sm_carveout_experimental(multiprocessors)
            yield
        finally:
            torch._C._set_sm_carveout_experimental(before)
