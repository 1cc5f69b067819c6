"""Modes of the calling thread that a schedule does not heed, asked at each call: tracing, autocast, modes that take calls, captures."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

_compiling = torch.compiler.is_dynamo_compiling
_tracing_state = torch._C._get_tracing_state
_any_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
WithoutFunctionModes = torch._C.DisableTorchFunction
_any_function_mode = torch._C._is_torch_function_mode_enabled
_function_transform = torch._C._functorch.peek_interpreter_stack


def foreign_mode(kind: str) -> str:
    """Why this thread's modes forbid running operators on a device of ``kind`` on other threads or from a recording, or nothing."""
    # Not is_compiling(), which is true in every thread while any of them compiles; export and make_fx show as fake inputs or modes.
    if _compiling() or _tracing_state() is not None:
        return "the call is being traced or compiled"
    # For which device takes several times as long to ask as whether for any.
    if _any_autocast() and torch.is_autocast_enabled(kind):
        return "autocast is on, which the schedule was not made for"
    if _dispatch_modes() or _function_transform() is not None:
        return "a dispatch mode or function transform is active, which lanes would not see"
    if has_function_mode():
        return "a mode that takes the calls of PyTorch's functions is active, which lanes would not see"
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return "forward-mode gradients are on, and a schedule computes none"
    # A graph of ours is launched from the host, and asking the stream of an earlier call would end the caller's recording.
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the call is being captured into a CUDA graph of the caller's, which cannot hold the schedule's graph"
    return ""


def has_function_mode() -> bool:
    """Whether something takes this thread's calls of PyTorch's functions; a default device is of no use to tensors that are there."""
    if not _any_function_mode():
        return False
    modes = (torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack()))
    return not all(isinstance(mode, DeviceContext) for mode in modes)
