"""A saved ``torch.export`` program (``.pt2``) as a model that can be captured."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from autosched.core.errors import ArtifactCorrupt, UsageError

_WRITTEN = "a program written by torch.export.save of this or an earlier release; export it again"


def load_pt2(path: str | Path) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model of a ``.pt2`` file, its example arguments and keyword arguments.

    Raises:
        UsageError: if the file does not exist, or was saved without example inputs.
        ArtifactCorrupt: if it is no file that ``torch.export.save`` wrote.
    """
    file = Path(path)
    if not os.path.isfile(file):  # unlike pathlib's, an answer also where the folder may not be looked into
        raise UsageError(f"there is no file {file}; expected a program saved with torch.export.save. Check the path.")
    if not zipfile.is_zipfile(file):
        raise ArtifactCorrupt(str(file), "it is no .pt2 archive (not a zip file, or cut short)", _WRITTEN)
    try:
        with warnings.catch_warnings():
            # torch before 2.13 makes tensors of bytes that cannot be written to, and says so of its own doing.
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
            exported = torch.export.load(file)
    except Exception as error:  # torch raises whatever its parser of the day stumbles over.
        if _is_compiled(file):
            raise ArtifactCorrupt(
                str(file),
                "it is a package of AOTInductor, compiled code without the program",
                "the program that it was compiled from, written by torch.export.save",
            ) from error
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArtifactCorrupt(str(file), f"torch.export.load cannot read it ({type(error).__name__}: {first})", _WRITTEN) from error
    if exported.example_inputs is None:
        raise UsageError(
            f"{file} was saved without example inputs; expected them, to know the shapes. Export it again with torch.export.export."
        )
    args, kwargs = exported.example_inputs
    model: torch.nn.Module = exported.module(check_guards=False)
    return model, tuple(args), dict(kwargs)


def _is_compiled(file: Path) -> bool:
    """Whether it holds what ``torch._inductor.aoti_compile_and_package`` writes."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any("data/aotinductor/" in name for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False
