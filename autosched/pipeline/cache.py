"""What a tuning job leaves for the next process: its winner, in the cache of tuned schedules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autosched.config import schedules_dir
from autosched.export.cache import keep

if TYPE_CHECKING:
    from autosched.pipeline.result import Tuned


def remember(tuned: Tuned) -> Path | None:
    """Keep the winner of ``tuned`` for ``autosched.compile`` and ``torch.compile``; ``None`` if it was not kept.

    A job on a machine too restless for any statement leaves nothing: what it chose is no more than the default.

    Warns:
        CacheWarning: if the folder cannot be written.
    """
    return None if tuned.report.unstable else keep(schedules_dir(), tuned.bundle)
