"""What can come of one model of the coverage sweep."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """In the order of the table's columns."""

    WORKS = "works"
    FALLS_BACK = "falls back"  # loading runs the model as it came, with a warning
    REFUSED = "refused"  # autosched raises UnsupportedGraph
    WRONG = "wrong"
    ERROR = "error"
    CRASH = "crash"  # this and the next two are seen by the parent alone
    TIMEOUT = "timeout"
    MEMORY = "memory"
    BROKEN = "broken"  # the model itself does not run here
