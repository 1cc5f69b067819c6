"""Having the native lanes of a CPU ready before anything is measured: what is measured with one engine says nothing of the other."""

from __future__ import annotations

from autosched.core.progress import Progress
from autosched.runtime.native.build import build_native, native_library, obstacle


def ready_lanes(kind: str, progress: Progress) -> str:
    """Build them for a job on a device of ``kind`` if they are not there; a note for its report where that cannot be done.

    Once on a machine for each PyTorch, some ten seconds of a compiler, which the table of stages has. Nothing is said where the user
    has switched them off.
    """
    if kind != "cpu" or native_library() is not None:
        return ""
    if not obstacle():
        progress.stage("compiling the native lanes")
    reason = build_native()
    return f"lanes are threads of Python, which share its lock: {reason}" if reason and "AUTOSCHED_NATIVE" not in reason else ""
