"""Streams that nobody else in the process is given.

PyTorch hands its own out round robin, so that a server that takes a stream for each request comes to all of them. On one of ours it would
launch into a capture of ours, and its products would have the workspaces that our graphs hold the addresses of.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from autosched.core.errors import DeviceMissing
from autosched.runtime.cuda.key import driver_library

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: waits for nothing on the default stream, as PyTorch's do not


def private_stream(index: int, priority: int) -> int:
    """A new stream on visible GPU ``index``, as its ``cudaStream_t``; it lives as long as the process. 0 if the driver makes none.

    Args:
        priority: as CUDA counts, negative more urgent; what is beyond the device's range is the end of that.
    """
    try:
        library, context = driver_library(), _primary_context(index)
    except DeviceMissing:
        return 0
    stream = ctypes.c_void_p()
    # Of a new thread no device is the current one yet.
    if not context or library.cuCtxPushCurrent_v2(context) != 0:
        return 0
    try:
        code = library.cuStreamCreateWithPriority(ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(priority))
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return int(stream.value or 0) if code == 0 else 0


@functools.cache
def _primary_context(index: int) -> Any:
    """The context that PyTorch uses; held for good, since streams lie in it."""
    library, device, context = driver_library(), ctypes.c_int(), ctypes.c_void_p()
    library.cuInit(0)
    if library.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    return context if library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0 else None
