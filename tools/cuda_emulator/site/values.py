"""Values for kernels that do not run: every ATen operator on the emulated device is computed by its CPU implementation.

The CUDA implementation of the operator runs first, in full: it checks, allocates and launches as on a GPU, and its launches become
nodes of a graph being captured. Then the operator is computed on the same memory, which is host memory, by the CPU's implementation: at
once, or, in a capture, at every replay of the graph, when the operator's last node comes up in the order of virtual time. So a missing
edge gives a wrong value.

What is not an ATen operator: Triton kernels of Inductor, see ``triton_values``; others (NVRTC) compute nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton_values
from torch import library as torch_library
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_LIBRARIES: list[torch_library.Library] = []
_state = threading.local()
_LATE = "EMULATED_CUDA_LATE" in os.environ

# Their CUDA implementation moves memory itself, hands out memory, or gives another view of it.
_AS_THEY_ARE = (
    "empty", "as_strided", "view", "_reshape_alias", "set_", "resize_", "_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory",
    "unfold", "view_as_real", "view_as_complex", "_fused_sdp_choice", "is_set_to", "_to_sparse", "_cudnn_rnn_flatten_weight", "alias",
    "_record_function", "new_empty", "_efficientzerotensor", "detach", "_has_same_storage_numel", "lift", "_use_cudnn_ctc_loss",
)  # fmt: skip

# The result, or its size, is a value that the CUDA implementation would read from what no kernel has written. These wait for the device.
_SIZED_BY_VALUES = (
    "equal",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
)

_driver = ctypes.CDLL("libcuda.so.1")
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Pending:
    """Work that graphs hold, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._work: dict[int, Callable[[], None]] = {}
        self._call = _Callback(self._run)
        _driver.emulated_attach_owned.argtypes = [ctypes.c_void_p, _Callback, ctypes.c_size_t]
        _driver.emulated_released.restype = ctypes.c_size_t

    def attach(self, stream: int, work: Callable[[], None]) -> None:
        while dead := _driver.emulated_released():
            self._work.pop(dead, None)
        number = next(self._numbers)
        self._work[number] = work
        code = _driver.emulated_attach_owned(ctypes.c_void_p(stream), self._call, number)
        if code:
            raise RuntimeError(f"the emulator cannot give an operator its value in this capture (error {code})")

    def _run(self, number: int) -> None:
        self._work[number]()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a CPU tensor. It does not keep the memory."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), size)
    view = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        view = torch._conj(view)
    return torch._neg_view(view) if tensor.is_neg() else view


def _twin(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            return _on_host(value)
        # A launch takes a number of the host as it is then, and a copy what is not pinned.
        return value.clone() if _LATE and not value.is_pinned() else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return torch.Generator()
    return value


def _random_state() -> int:
    generator = torch.cuda.default_generators[0]
    try:
        return hash((generator.initial_seed(), generator.get_offset())) & 0x7FFFFFFF
    except RuntimeError:  # in a capture it is known at the replay only
        return 0


def _convolution(x: Any, weight: Any, padding: Any, stride: Any, dilation: Any, groups: int, *_: Any, **__: Any) -> Any:
    return torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, False, [0] * len(padding), groups)


def _convolution_transpose(
    x: Any, weight: Any, padding: Any, more: Any, stride: Any, dilation: Any, groups: int, *_: Any, **__: Any
) -> Any:
    return torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, True, more, groups)


def _convolution_relu(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    return torch.relu(torch.ops.aten.conv2d(x, weight, bias, stride, padding, dilation, groups))


def _convolution_add_relu(x: Any, weight: Any, z: Any, alpha: Any, bias: Any, *geometry: Any) -> Any:
    return torch.relu(torch.add(torch.ops.aten.conv2d(x, weight, bias, *geometry), z, alpha=1 if alpha is None else alpha))


def _attention(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
    mask = rest[0] if rest and isinstance(rest[0], torch.Tensor) else None
    causal = named.get("is_causal", next((item for item in rest if item is True), False))
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, mask, 0.0, causal, None, scale=named.get("scale"))


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float) -> Any:
    return torch.ops.aten.native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)


def _assert_or_break(value: torch.Tensor, *_: Any) -> None:
    if not bool(value):
        _driver.emulated_break(710)  # cudaErrorAssert: only a new process cures it


def _of_type(product: Callable[..., Any]) -> Callable[..., Any]:
    """A product whose result has a type of its own."""

    def compute(*given: Any, out: torch.Tensor | None = None, **scales: Any) -> Any:
        *tensors, wanted = given
        made = product(*(tensor.to(wanted) for tensor in tensors), **scales)
        return made if out is None else out.copy_(made)

    return compute


# Operators, or overloads of one, that only CUDA has.
_ELSEWHERE: dict[str, Callable[..., Any]] = {
    "cudnn_convolution": _convolution,
    "cudnn_convolution_transpose": _convolution_transpose,
    "cudnn_convolution_relu": _convolution_relu,
    "cudnn_convolution_add_relu": _convolution_add_relu,
    "cudnn_batch_norm": _batch_norm,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    **{f"{name}.{end}": _of_type(getattr(torch, name)) for name in ("mm", "bmm", "addmm", "baddbmm") for end in ("dtype", "dtype_out")},
}


# Operators that round what they multiply to TF32, by the setting that lets them.
_CONVOLUTIONS = ("cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu", "cudnn_convolution_add_relu")
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "_addmm_activation": (1, 2)}


def _rounded_arguments(name: str) -> tuple[int, ...]:
    """Which arguments of an operator that is launched now are rounded, if they are float32."""
    if name in _CONVOLUTIONS:
        return (0, 1) if torch.backends.cudnn.conv.fp32_precision == "tf32" else ()
    return _PRODUCTS.get(name, ()) if torch.backends.cuda.matmul.fp32_precision == "tf32" else ()


def _to_tf32(item: Any) -> Any:
    """With the ten bits of mantissa that TF32 keeps of 23."""
    if not isinstance(item, torch.Tensor) or item.dtype != torch.float32:
        return item
    bits = torch.empty_like(item).copy_(item).view(torch.int32)
    return bits.add_(0x1000).bitwise_and_(~0x1FFF).view(torch.float32)


class _Operator:
    """One overload's override."""

    def __init__(self, name: str, overload: Any) -> None:
        full = name.partition("::")[2]
        self.name = full.partition(".")[0]
        self.overload = overload
        self.compute = _ELSEWHERE.get(full, _ELSEWHERE.get(self.name, overload))
        self.original = torch_library.get_kernel(name, "CUDA")
        schema = overload._schema
        self.written = [i for i, item in enumerate(schema.arguments) if item.alias_info is not None and item.alias_info.is_write]
        self.aliases = [item.alias_info is not None for item in schema.returns]
        self.sized_by_values = self.name in _SIZED_BY_VALUES
        self.tensors = [i for i, item in enumerate(schema.arguments) if str(item.type) in ("Tensor", "Optional[Tensor]")]

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if self.sized_by_values:
            return self._sized(args, kwargs)
        if getattr(_state, "inside", False):
            return self._run(keys, args, kwargs)
        seed = _random_state()
        _state.inside = True
        try:
            result = self._run(keys, args, kwargs)
        finally:
            _state.inside = False
        outputs = [item for item, alias in zip(_as_list(result), self.aliases, strict=False) if not alias]
        self._give(args, kwargs, outputs, seed)
        return result

    def _run(self, keys: Any, args: Any, kwargs: Any) -> Any:
        # PyTorch hands Python a number where C++ has a tensor that wraps one; it takes no number back.
        if any(i < len(args) and isinstance(args[i], (int, float, complex)) for i in self.tensors):
            like = next((item.dtype for item in args if isinstance(item, torch.Tensor)), None)
            args = [_wrapped(item, like) if i in self.tensors else item for i, item in enumerate(args)]
        if not torch._C._len_torch_dispatch_stack():
            return self.original.call_boxed(keys, *args, **kwargs)
        # PyTorch 2.13 has kernels in Python (``torch._native``), and beside a mode such a kernel is looked up by name: it finds this one.
        with _disable_current_modes():
            return self.original.call_boxed(keys, *args, **kwargs)

    def _give(self, args: Any, kwargs: Any, outputs: list[Any], seed: int) -> None:
        twins, named = pytree.tree_map(_twin, (args, kwargs))
        targets = pytree.tree_map(_twin, outputs)
        if not any(isinstance(item, torch.Tensor) and item.numel() for item in pytree.tree_leaves((targets, twins, named))):
            return
        compute = self.compute
        rounded = _rounded_arguments(self.name)

        if self.name == "_assert_async":
            compute = _assert_or_break

        def work() -> None:
            for item in pytree.tree_leaves((twins, named)):
                if isinstance(item, torch.Generator):
                    item.manual_seed(seed)
            with torch.inference_mode():
                given = [_to_tf32(item) if place in rounded else item for place, item in enumerate(twins)]
                made = _as_list(compute(*given, **named))
                for target, value in zip(pytree.tree_leaves(targets), pytree.tree_leaves(made), strict=False):
                    if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor) and target.shape == value.shape:
                        target.copy_(value)

        _now_or_at_replay(work)

    def _sized(self, args: Any, kwargs: Any) -> Any:
        torch.cuda.current_stream().synchronize()
        twins, named = pytree.tree_map(_twin, (args, kwargs))
        with torch.inference_mode(torch.is_inference_mode_enabled()):
            made = self.overload(*twins, **named)
        return pytree.tree_map(lambda item: item.cuda() if isinstance(item, torch.Tensor) else item, made)


@contextlib.contextmanager
def _thrown_away() -> Iterator[None]:
    """Nothing is computed for what is launched here: only its time is wanted."""
    before = getattr(_state, "thrown_away", False)
    _state.thrown_away = True
    try:
        yield
    finally:
        _state.thrown_away = before


def _now_or_at_replay(work: Callable[[], None]) -> None:
    if getattr(_state, "thrown_away", False):
        return
    if _LATE or torch.cuda.is_current_stream_capturing():
        _pending().attach(torch.cuda.current_stream().cuda_stream, work)
    else:
        work()


def _wrapped(item: Any, like: torch.dtype | None) -> Any:
    if isinstance(item, torch.Tensor) or item is None:
        return item
    same_kind = like is not None and (like.is_floating_point if isinstance(item, float) else like is not torch.bool)
    return torch.tensor(item, dtype=like if same_kind else None, device="cpu")


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [] if result is None else [result]


def _pending() -> _Pending:
    if not hasattr(_pending, "one"):
        _pending.one = _Pending()  # type: ignore[attr-defined]
    return _pending.one  # type: ignore[attr-defined]


def _wanted(name: str, overload: Any) -> bool:
    full = name.partition("::")[2]
    base = full.partition(".")[0]
    if not name.startswith("aten::") or any(base == one or base.startswith(f"{one}_") for one in _AS_THEY_ARE if one != "view"):
        return False
    if base == "view" or "backward" in base or "sparse" in base or "quantized" in base:
        return False
    return (
        base == "copy_" or torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU") or base in _ELSEWHERE or full in _ELSEWHERE
    )


def install() -> None:
    """Override the CUDA implementations; once for each process."""
    if _LIBRARIES or torch.version.cuda is None:
        return
    library = torch_library.Library("aten", "IMPL", "CUDA")
    _LIBRARIES.append(library)
    # Copies have no CUDA registration: one implementation for all devices launches their kernels.
    for name in ["aten::copy_", *torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")]:
        base, _, overload_name = name.partition("::")[2].partition(".")
        packet = getattr(torch.ops.aten, base, None) if name.startswith("aten::") else None
        overload = getattr(packet, overload_name or "default", None)
        if overload is not None and _wanted(name, overload):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                library.impl(name.partition("::")[2], _Operator(name, overload), "CUDA", with_keyset=True, allow_override=True)
    triton_values.install(_twin, _now_or_at_replay, _thrown_away)
