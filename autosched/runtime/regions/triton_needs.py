"""What Triton compiles the launchers of its kernels with: a C compiler and Python's headers. Nothing here imports Triton or PyTorch."""

from __future__ import annotations

import os
import shutil
import sysconfig

from autosched.config import c_compiler


def lacking_for_triton() -> str:
    """What of it is not here, as Triton looks for that itself; empty if nothing is."""
    named = c_compiler()
    if not (shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")):
        return f"there is no C compiler {named} (CC)" if named else "there is no C compiler: install gcc or clang, or name one in CC"
    # Debian's scheme may name a folder for headers that pip installs; Triton looks where Python's own are.
    scheme = "posix_prefix" if sysconfig.get_default_scheme() == "posix_local" else sysconfig.get_default_scheme()
    headers = os.path.join(sysconfig.get_paths(scheme)["include"], "Python.h")
    return "" if os.path.exists(headers) else f"{headers} is missing: install the headers of this Python (python3-dev or python3-devel)"
