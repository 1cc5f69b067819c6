"""What a tuning job leaves for the next process: its winner, in the cache of tuned schedules."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from autosched.config import schedules_dir
from autosched.core.records import Source
from autosched.export.cache import keep
from autosched.runtime.bundle.format import Bundle
from autosched.runtime.cache import STRUCTURE, CacheWarning

if TYPE_CHECKING:
    from autosched.pipeline.result import Tuned

_log = logging.getLogger(__name__)


def remember(tuned: Tuned) -> Path | None:
    """Keep the winner of ``tuned`` for ``autosched.compile`` and ``torch.compile``; ``None`` if it was not kept.

    A job on a machine too restless for any statement leaves nothing: what it chose is no more than the default. Nor does a replay, which
    measured nothing here.

    Warns:
        CacheWarning: if the folder cannot be written.
    """
    if tuned.report.unstable or tuned.report.source is not Source.MEASURED:
        return None
    try:
        return keep(schedules_dir(), pinned(tuned.bundle, tuned._outcome.captured.structure))
    except CacheWarning as error:
        # Where warnings are errors: the job is over, and its result must not be lost for want of a place to remember it.
        _log.warning("%s", error)
        return None


def pinned(bundle: Bundle, structure: str) -> Bundle:
    """``bundle`` with its model's key (``Captured.structure``) written into its evidence: whatever its lowering, it is found by that."""
    kept = tuple(pair for pair in bundle.evidence.environment if pair[0] != STRUCTURE)
    extra = ((STRUCTURE, structure),) if structure else ()
    evidence = dataclasses.replace(bundle.evidence, environment=tuple(sorted((*kept, *extra))))
    return dataclasses.replace(bundle, evidence=evidence)
