"""The command line, called in this process."""

from __future__ import annotations

import pytest

from autosched.cli import main


def run(*arguments: str) -> int:
    """Its exit code."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    code = stopped.value.code
    assert isinstance(code, int)
    return code
