"""Every error a user of autosched can cause, and the exit code the command line gives it.

Each message says what failed, the value that made it fail, what was expected, and what to do.
The expected failure of one *candidate* is not an error: it is a ``records.Failure`` value.
"""

from __future__ import annotations

from collections.abc import Sequence


def why_of(error: OSError | ValueError) -> str:
    """What the system says of a file that cannot be used, without its number and the path; a ``ValueError`` is for a name that none has."""
    return getattr(error, "strerror", None) or str(error)


class AutoschedError(Exception):
    """Root of all errors that autosched raises on purpose."""

    exit_code = 1


class UsageError(AutoschedError):
    """An argument, option or call that cannot be honoured as given."""

    exit_code = 2


class UnknownModel(UsageError):
    """A model name that no zoo entry, module or file answers to."""


class UnknownName(UsageError):
    """A registry (strategy, cost model, device) was asked for a name it does not hold."""


class InputMismatch(UsageError):
    """A call whose inputs differ in structure, shape or dtype from those the schedule was made for."""


class UnsupportedGraph(UsageError):
    """A model that cannot be captured or scheduled; the message names the operator and its source line."""


class HalfWritten(AutoschedError):
    """A call has changed some of what its model changes, and not all of it; to run the model would change that twice."""


class InvalidGraph(AutoschedError):
    """A graph value that breaks its own invariants (a cycle, a dangling value); a bug or a forged file."""

    exit_code = 4


class IllegalSchedule(AutoschedError):
    """A schedule that would not compute what its graph says."""

    exit_code = 4


class UnstableMeasurement(AutoschedError):
    """The machine was too noisy for any statement about which schedule is faster."""

    exit_code = 3


class NoFeasibleCandidate(AutoschedError):
    """Every candidate failed; the message lists the failures by kind."""

    exit_code = 5


_MOST_LINES = 6


class ArtifactError(AutoschedError):
    """A file that cannot be used."""

    exit_code = 4


_OWN_FILE = (
    "a file written by autosched; make it again (a schedule: 'autosched tune', runs: 'autosched collect', a cost model: 'autosched train')"
)


class ArtifactCorrupt(ArtifactError):
    """A file whose bytes are not what its writer wrote, or that was never such a file; ``expected`` is what it should be."""

    def __init__(self, path: str, why: str, expected: str = _OWN_FILE) -> None:
        super().__init__(f"cannot read {path}: {why}. Expected {expected}.")
        self.path = path
        self.why = why


class IncompatibleArtifact(ArtifactError):
    """A sound file made for something else; ``differences`` holds one line for each differing field, the message the first of them.

    ``what_to_do`` is the message's last line; empty where a difference says it.
    """

    def __init__(
        self,
        path: str,
        differences: Sequence[str],
        what_to_do: str = "Use it with the model and on the kind of device that it was tuned for, or tune again here.",
    ) -> None:
        shown = list(differences[:_MOST_LINES])
        if len(differences) > len(shown):
            shown.append(f"and {len(differences) - len(shown)} more; 'autosched check FILE MODEL' lists them")
        lines = "\n  ".join(shown)
        super().__init__(f"{path} does not fit here:\n  {lines}\n{what_to_do}".rstrip())
        self.path = path
        self.differences = tuple(differences)


def newer_schema(path: str, there: int, here: int, otherwise: str) -> IncompatibleArtifact:
    """The error of a file whose schema is ``there``, where at most ``here`` can be read; ``otherwise``: what else to do about it."""
    return IncompatibleArtifact(path, [f"schema: {there} there, at most {here} here"], f"Install a newer autosched, or {otherwise}.")


class DeviceError(AutoschedError):
    """The device is missing or does not answer as it should."""

    exit_code = 5


class InTheMidst(DeviceError):
    """A schedule was called in the midst of a call of another one by the same thread, with which it takes turns; later it may run."""


class TooFewCores(DeviceError):
    """A schedule was called by a thread that may use fewer cores than an operator has threads; another thread, or process, may run it."""


class ShortOfMemory(DeviceError):
    """The device had no memory for what was asked of it, which it may have a moment later."""


class DeviceMissing(DeviceError):
    """The device asked for does not exist on this machine."""


class ScratchFull(DeviceError):
    """The folder for temporary files has no room for what the measuring process must read."""


class WorkerLost(DeviceError):
    """The measuring process died again and again; the message carries its last words."""
