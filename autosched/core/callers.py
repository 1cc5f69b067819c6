"""Warnings that point at who called: a line of ours, or of PyTorch's, says nothing to who reads them."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_BACKEND = "autosched.plugin"
_DYNAMO = "torch._dynamo"
# Calls of what torch.compile returned go through it, and so do those that the model's code, translated, then makes of a backend's graph.
_COMPILED = "torch._dynamo.eval_frame"


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn with the line that called this package; from the backend of ``torch.compile`` with the one that called the compiled model."""
    frame = _caller(sys._getframe(1))
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, _module(frame) or None, registry)


def _caller(inner: FrameType) -> FrameType:
    """The first frame outside of this package and PyTorch; the outermost one if there is none."""
    frame, ours = _beyond(inner, "autosched")
    frame, theirs = _beyond(frame, "torch", "")  # what PyTorch generates has no module
    if _BACKEND in ours and not _from_the_start(theirs):
        # This is the model's code: it calls its graph, or has come to a part that is compiled only now.
        outer: FrameType | None = frame
        while outer is not None and _module(outer) != _COMPILED:
            outer = outer.f_back
        frame, _ = _beyond(outer or frame, "torch", "")
    return frame


def _from_the_start(modules: list[str]) -> bool:
    """Whether these, from the backend outwards, are all between it and the call of the compiled model, which compiles its first graph."""
    dynamo = [module for module in modules if module.startswith(_DYNAMO)]
    return len(set(dynamo)) > 1 and dynamo[-1] == _COMPILED


def _beyond(frame: FrameType, *packages: str) -> tuple[FrameType, list[str]]:
    """The first frame from ``frame`` outwards that is of none of ``packages``, or the last one; and the modules on the way."""
    passed: list[str] = []
    while _module(frame).partition(".")[0] in packages:
        passed.append(_module(frame))
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame, passed


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__") or "")
