"""Where in the model's own code an operator came from."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import TracebackType

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# With the separator: torchvision lies beside torch and is no part of it.
_TORCH = str(Path(torch.__file__).parent) + os.sep
# Beside torch too, and like it never where the user's own line is.
_TRITON = str(Path(torch.__file__).parent.with_name("triton")) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def source_of(stack_trace: str | None) -> str:
    """``file:line`` of the innermost frame outside torch itself; empty if the trace has none.

    The file is given relative to the longest entry of ``sys.path`` that holds it, so that a file written on one machine reads
    the same on another.
    """
    found = ""
    for file, line in _FRAME.findall(stack_trace or ""):
        if not file.startswith(_TORCH) and not file.startswith("<"):
            found = f"{_short(file)}:{line}"
    return found


def source_of_traceback(traceback: TracebackType | None) -> tuple[str, str]:
    """``(file:line, code)`` of the innermost frame outside torch and outside autosched; two empty strings if there is none."""
    found = ("", "")
    here = str(Path(__file__).parent)
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        installed = f"{os.sep}site-packages{os.sep}" in file
        if not file.startswith((_TORCH, _TRITON, here, "<")) and (installed or not file.startswith(_STANDARD)):
            code = linecache.getline(file, traceback.tb_lineno).strip()
            found = (f"{_short(file)}:{traceback.tb_lineno}", code)
        traceback = traceback.tb_next
    return found


@functools.cache
def _short(file: str) -> str:
    best = ""
    for entry in sys.path:
        if entry and file.startswith(entry.rstrip("/") + "/") and len(entry) > len(best):
            best = entry.rstrip("/")
    return file[len(best) + 1 :] if best else Path(file).name
