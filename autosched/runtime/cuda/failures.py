"""What an exception of a capture, or of anything else on a GPU, says of the candidate that was worked on."""

from __future__ import annotations

import traceback

from autosched.core.from_outside import let_through
from autosched.core.records import Failure, FailureKind
from autosched.runtime.no_memory import lacks_memory


def failure_of(error: BaseException, doing: str) -> Failure:
    """The failure a candidate's exception means."""
    text = f"{doing}: {type(error).__name__}: {error}".splitlines()[0][:500]
    return Failure(FailureKind.OOM if lacks_memory(error) else FailureKind.CAPTURE, text)


def released(error: BaseException) -> BaseException | None:
    """Drop the tensors that the frames of a capture's exception hold; what is no failure of the capture, to be raised once that is undone.

    An interrupt, and what a signal's handler has raised, says nothing of what was captured. It keeps its traceback, by which it is known
    further out.
    """
    outside = error if not isinstance(error, Exception) else _from_outside(error)
    if outside is None:
        error.__traceback__ = None
    else:
        traceback.clear_frames(outside.__traceback__)
    return outside


def _from_outside(error: BaseException) -> BaseException | None:
    try:
        let_through(error)
    except BaseException as outside:
        return outside
    return None
