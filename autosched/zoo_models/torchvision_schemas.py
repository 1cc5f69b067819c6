"""Import torchvision beside a torch it was not built for (a CPU-only torch beside the CUDA build of torchvision, say).

Its compiled operators then do not load, and its import stops at the first Python kernel registered for one of them. No image
classifier uses those operators: declaring their schemas lets the import go on.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from torch import library

_SCHEMAS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))
_declared: list[library.Library] = []


def import_torchvision() -> ModuleType:
    """The ``torchvision`` package with ``torchvision.models`` imported.

    Raises:
        ImportError: if it is not installed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("No module named 'torchvision'", name="torchvision")
    if not _declared and not _operators_load(Path(spec.submodule_search_locations[0])):
        fragment = library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in _SCHEMAS:
            fragment.define(schema)  # type: ignore[no-untyped-call]
        _declared.append(fragment)
    importlib.import_module("torchvision.models")
    return importlib.import_module("torchvision")


def _operators_load(folder: Path) -> bool:
    if hasattr(torch.ops.torchvision, "nms"):
        return True
    # Each release names them otherwise: ``_C.so``, ``_C_stable.so``. What is declared before its library is loaded ends the process.
    for file in sorted(folder.glob("_C*")):
        if file.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
            try:
                torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]
            except OSError:
                continue
    return hasattr(torch.ops.torchvision, "nms")
