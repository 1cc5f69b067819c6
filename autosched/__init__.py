"""autosched decides when and where each operator of a PyTorch model runs.

``tune`` measures and searches, ``compare`` shows every strategy beside the others, ``load`` runs a result, ``compile`` finds it in the
cache by itself. Importing this package loads neither the tuning stack nor CUDA.
"""

import sys as _sys
from pathlib import Path as _Path
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    # For editors and type checkers; at run time each is imported when it is first asked for.
    from autosched.compiled import compile
    from autosched.core.errors import AutoschedError
    from autosched.pipeline import compare, tune
    from autosched.pipeline.shapes import tune_shapes
    from autosched.recording import record_calls
    from autosched.runtime.guard import FallbackWarning
    from autosched.runtime.kept_memory import keep_memory
    from autosched.runtime.load import load

if not getattr(_sys, "_is_gil_enabled", lambda: True)():
    # Lanes that run in Python order their accesses to memory by it.
    raise ImportError(
        "autosched needs the interpreter's lock, which is off in this process: start Python with PYTHON_GIL=1 or -X gil=1, or take a build "
        "of Python that is not free-threaded"
    )
_here = _Path(__file__).resolve().parent
if not (_here / "search").is_dir() and (_here.parent / "search" / "__init__.py").is_file():
    __path__.append(str(_here.parent))  # source checkout: sibling folders are our sub-packages

__version__ = "0.1.0"
__all__ = ["AutoschedError", "FallbackWarning", "compare", "compile", "keep_memory", "load", "record_calls", "tune", "tune_shapes"]

_LAZY = {
    "AutoschedError": "autosched.core.errors",
    "FallbackWarning": "autosched.runtime.guard",
    "tune": "autosched.pipeline",
    "compare": "autosched.pipeline",
    "tune_shapes": "autosched.pipeline.shapes",
    "load": "autosched.runtime.load",
    "compile": "autosched.compiled",
    "keep_memory": "autosched.runtime.kept_memory",
    "record_calls": "autosched.recording",
}


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'autosched' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
