"""Keeping tuned schedules where the next process finds them. Reading is ``runtime.cache``."""

from __future__ import annotations

import os
import re
from pathlib import Path

from autosched.core.atomic_write import remove_half_written
from autosched.core.errors import AutoschedError
from autosched.export.bundle import write_bundle
from autosched.runtime.bundle.format import Bundle
from autosched.runtime.cache import SUFFIX, key_of, may_be_anyones, warn_once

_ENTRIES = rf"[0-9a-f-]+{re.escape(SUFFIX)}"


def keep(folder: str | os.PathLike[str], bundle: Bundle) -> Path | None:
    """Keep ``bundle`` in the cache folder, in one step; an older entry of the same key gives way.

    Any number of processes may do so at once: a reader sees one of their bundles, whole. A folder that cannot be written costs a
    warning, not the job.

    Returns:
        Where it is, or ``None`` if it could not be kept.

    Warns:
        CacheWarning: once for each folder that cannot be written.
    """
    target = Path(folder) / key_of(bundle).filename
    try:
        # Whatever the user's mask is, it is read only where nobody else may write.
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if may_be_anyones(target.parent) else 0o777)
        remove_half_written(target.parent, _ENTRIES)
        return write_bundle(target, bundle)
    except (OSError, AutoschedError) as error:
        why = str(error).rstrip(".")
        warn_once(
            f"{folder}: write", f"the tuned schedule is not kept in the cache: {why}. Set AUTOSCHED_CACHE to a folder that can be written."
        )
        return None
