"""No values: every tensor of the emulated device is zero, and what a tuning job holds against it is made zero too.

So that whole jobs go through without a kernel being computed, three answers are changed, none of them in autosched's own files: the model
as it came answers zeros, whatever is compared is compared on the host, and two tensors of one shape on the device are equal. Nothing is
proved of numbers in such a run; the device's name is in whatever it writes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from after_import import after_import
from torch import library as torch_library

_LIBRARIES: list[torch_library.Library] = []


def install() -> None:
    """Once for each process, after PyTorch and before autosched."""
    if _LIBRARIES or torch.version.cuda is None:
        return
    library = torch_library.Library("aten", "IMPL", "CUDA")
    _LIBRARIES.append(library)
    # Computed there, and read back as what no kernel has written: false.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("equal", lambda one, other: one.shape == other.shape, "CUDA", allow_override=True)
    after_import("autosched.pipeline.references", _answer_zeros)
    after_import("autosched.runtime.numerics", _compare_on_host)


def _answer_zeros(references: Any) -> None:
    answer: Callable[..., tuple[torch.Tensor, ...]] = references.answer_of

    def zeros(*args: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in answer(*args))

    references.answer_of = zeros


def _compare_on_host(numerics: Any) -> None:
    compare = numerics.compare

    def on_host(outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor], **options: Any) -> Any:
        return compare([tensor.cpu() for tensor in outputs], [tensor.cpu() for tensor in references], **options)

    numerics.compare = on_host
