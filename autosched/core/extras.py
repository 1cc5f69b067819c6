"""What to type where a package is missing that only some features need."""

from __future__ import annotations

import contextlib
import importlib.metadata


def install_command(extra: str) -> str:
    """The command that installs the packages of ``extra``, and leaves PyTorch as it is.

    Each torchvision is made for one PyTorch, and pip takes the newest of both: another build than the one that is here, and what was tuned
    with that one is tuned for another version.

    >>> install_command("report")
    "pip install 'autosched[report]'"
    """
    command = f"pip install 'autosched[{extra}]'"
    if extra == "zoo":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            command += f" 'torch=={importlib.metadata.version('torch').partition('+')[0]}'"
    return command
