"""Where the compilers that Inductor starts put what they need for a moment."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def compilers_write_into(folder: Path) -> None:
    """Have the compilers that this process starts put their own temporary files into ``folder``: a killed one leaves them.

    Inductor's cache stays where it is. Private interface, the same in PyTorch 2.11 to 2.15; without it nothing changes.
    """
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir
    except ImportError:
        return
    # Its default lies in the folder for temporary files: asked for now, it is settled.
    cache_dir()
    tempfile.gettempdir()
    os.environ["TMPDIR"] = str(folder)
