"""What belongs to the calling thread, kept although an exception of a signal's handler may come at any instruction of Python's.

One that comes while a context is entered or left takes the place of what would have put things back. A request that had its time would
leave its thread without gradients, or with one core, or a mode of ours that takes its operators, for as long as the thread lives.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from autosched.core.custom_operators import trust_for_good, trusted
from autosched.runtime.float32 import give_turn_back, has_turn
from autosched.runtime.thread_count import use_threads

_cuda: Any = torch.cuda  # its Python side is not typed
_modes = torch._C._len_torch_dispatch_stack

inference_mode: Any = torch._C._InferenceMode
"""All of ``torch.inference_mode`` that is not Python. Where an exception came in the middle of that, it would be left when the exception
goes, and put back what was around it: a mode that may have been left by then.
"""


class ThreadKept:
    """The outermost of several contexts: where an exception comes out of them, the calling thread has afterwards what it had before.

    Whether it has gradients, how many threads its operators have, which modes take these, which custom ones are trusted, whether it has its
    turn with the rounding of float32; on a GPU, which one is current, and which stream, and whether Python collects garbage.

    Args:
        device: where it is going to work.
    """

    __slots__ = ("_collects", "_current", "_device", "_gradients", "_has_turn", "_modes", "_on_gpu", "_stream", "_threads", "_trusted")

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._threads = torch.get_num_threads()
        self._modes = _modes()
        self._trusted = trusted()
        self._has_turn = has_turn()
        self._on_gpu = self._device.type == "cuda" and _cuda.is_initialized()
        if self._on_gpu:
            self._stream, self._current = _cuda.current_stream(self._device), _cuda.current_device()
            self._collects = gc.isenabled()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            return
        torch._C._set_grad_enabled(self._gradients)
        while _modes() > self._modes:
            try:
                torch._C._get_dispatch_stack_at(_modes() - 1).__exit__(None, None, None)
            except IndexError:  # it was half left
                torch._C._pop_torch_dispatch_stack(None)
        if torch.get_num_threads() != self._threads:
            use_threads(self._threads)
        trust_for_good(self._trusted)
        if not self._has_turn:
            give_turn_back()
        if self._on_gpu:
            _cuda.set_stream(self._stream)  # which makes its device the current one, too
            _cuda.set_device(self._current)
            if self._collects:
                gc.enable()
