"""Modes and thread counts of the calling thread, kept although an exception of a signal's handler may come at any instruction of Python's.

One that comes while a context is entered or left takes the place of what would have put things back. A request that had its time would
leave its thread without gradients, or with one core, or a mode of ours that takes its operators, for as long as the thread lives.
"""

from __future__ import annotations

from typing import Any

import torch

from autosched.runtime.thread_count import use_threads

_modes = torch._C._len_torch_dispatch_stack

inference_mode: Any = torch._C._InferenceMode
"""All of ``torch.inference_mode`` that is not Python. Where an exception came in the middle of that, it would be left when the exception
goes, and put back what was around it: a mode that may have been left by then.
"""


class ThreadState:
    """Whether the calling thread has gradients, how many threads its operators have, and which modes take these."""

    __slots__ = ("_gradients", "_modes", "_threads")

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._threads = torch.get_num_threads()
        self._modes = _modes()

    def put_back(self) -> None:
        """Put it back, when every context that was entered meanwhile was left, or failed to be."""
        torch._C._set_grad_enabled(self._gradients)
        while _modes() > self._modes:
            try:
                torch._C._get_dispatch_stack_at(_modes() - 1).__exit__(None, None, None)
            except IndexError:  # it was half left
                torch._C._pop_torch_dispatch_stack(None)
        if torch.get_num_threads() != self._threads:
            use_threads(self._threads)
