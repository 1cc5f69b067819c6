"""What a tuning job gives back: the kept schedule with its evidence, ready to be saved."""

from __future__ import annotations

import dataclasses
import os

from autosched.core.atomic_write import behind_link, half_written_name
from autosched.core.errors import UsageError, why_of
from autosched.core.program import ConstantSource
from autosched.core.report import TuneReport
from autosched.export.bundle import encode_bundle, make_bundle, write_bundle
from autosched.pipeline.options import Options, Outcome
from autosched.runtime.bundle.format import Bundle, Evidence, OperatorTimes

BUILT_BATCH = "built_batch"
"""In a bundle's environment: the batch size that the model was built with, where one was named."""


class Tuned:
    """A tuned schedule. ``save`` writes it, ``summary`` says what was found, ``report`` holds every figure."""

    def __init__(self, outcome: Outcome, options: Options) -> None:
        self._outcome = outcome
        self._options = options
        self.report: TuneReport = outcome.report

    def __repr__(self) -> str:
        return f"<autosched: {self.report.model} tuned on {self.report.device.name}: {self.report.verdict}>"

    @property
    def bundle(self) -> Bundle:
        """What :meth:`save` writes."""
        outcome, options = self._outcome, self._options
        program = outcome.captured.program
        literals = {
            binding.name: outcome.captured.constants[binding.value].detach().cpu()
            for binding in program.bindings
            if binding.source is ConstantSource.LITERAL
        }
        measured = outcome.trace
        evidence = Evidence(
            report=outcome.report,
            environment=tuple(sorted(_environment(options).items())),
            seeds=(("tune", options.seed),),
            planned=OperatorTimes(*outcome.planned_us),
            measured=OperatorTimes(measured.operator_start_us, measured.operator_end_us) if measured is not None else OperatorTimes(),
            solo_us=outcome.solo_us,
            rewrites=tuple((item.name, item.applied) for item in outcome.captured.rewrites),
        )
        return make_bundle(program, outcome.schedule, evidence, literals, outcome.device.key, outcome.device.software)

    def to_bytes(self) -> bytes:
        """The bundle's bytes; ``autosched.load`` takes them as well as a path."""
        return encode_bundle(self.bundle)

    def save(self, path: str | os.PathLike[str]) -> TuneReport:
        """Write the bundle and return the report with its path filled in.

        Raises:
            UsageError: if the file cannot be written; it says where the schedule is kept all the same.
        """
        try:
            written = write_bundle(path, self.bundle)
        except UsageError as error:
            if self.report.cached is None:
                raise
            raise UsageError(f"{error} The schedule is in the cache, from where it can be copied: {self.report.cached}") from error
        self.report = dataclasses.replace(self.report, bundle=os.fspath(written))
        return self.report

    def summary(self) -> str:
        """The verdict, a line for each schedule and baseline, and what there is to know besides, as text."""
        return self.report.summary()


def _environment(options: Options) -> dict[str, str]:
    found = {"dtype": options.dtype or "float32", "effort": options.effort, "model": options.name}
    built_for = dict(options.source.options).get("batch") if options.source is not None else None
    # Not "batch", which is what one of several shapes is found by: all of them are of the model that was built for the first.
    return found if built_for is None else {**found, BUILT_BATCH: str(built_for)}


def check_writable(path: str | os.PathLike[str]) -> None:
    """Find out before an hour of tuning, not after it, that the result cannot be written.

    Raises:
        UsageError: naming the path and what is wrong with it.
    """
    target = behind_link(path)
    folder = target.parent
    if os.path.isdir(target):
        raise UsageError(f"cannot write {target}: it is a folder; name a file, such as {target / 'model.autosched'}")
    if not os.path.isdir(folder):
        raise UsageError(f"cannot write {target}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {target}: the folder {folder} does not allow it; name another")
    try:
        os.lstat(half_written_name(target))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        raise UsageError(f"cannot write {target}: {why_of(error)}; name another file") from error
