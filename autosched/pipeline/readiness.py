"""What a machine compiles once, and a job must have before its time counts: the native lanes of a CPU, and the searches."""

from __future__ import annotations

from autosched.core.progress import Progress
from autosched.runtime.native.build import build_native, native_library, obstacle


def ready_lanes(kind: str, progress: Progress) -> str:
    """Build the lanes for a job on a device of ``kind`` if they are not there; a note for its report where that cannot be done.

    What is measured with one engine says nothing of the other.

    Once on a machine for each PyTorch, some ten seconds of a compiler, which the table of stages has. Nothing is said where the user
    has switched them off.
    """
    if kind != "cpu" or native_library() is not None:
        return ""
    if not obstacle():
        progress.stage("compiling the native lanes")
    reason = build_native()
    return f"lanes are threads of Python, which share its lock: {reason}" if reason and "AUTOSCHED_NATIVE" not in reason else ""


def ready_searches(progress: Progress) -> None:
    """Load the searches, which numba compiles the first time: of a minute's budget that is what a job would lack for its measurements."""
    # Not before somebody searches: numba takes half a second to import.
    from autosched.search.compiled.ready import load_searches, searches_loaded

    if not searches_loaded():
        progress.stage("loading the searches")
        load_searches()
