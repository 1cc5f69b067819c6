"""What this machine can do for autosched, and what is missing."""

from __future__ import annotations

import enum
import importlib.metadata
import os
import shutil
from dataclasses import dataclass


class State(enum.StrEnum):
    """How a finding stands."""

    OK = "ok"
    MISSING = "missing"  # something optional is not there
    PROBLEM = "problem"  # something needed does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``advice`` is empty where nothing needs doing."""

    what: str
    state: State
    detail: str
    advice: str


def examine() -> list[Finding]:
    """Look at PyTorch, the devices, the compiler, the cache and the optional packages."""
    return [_torch(), _cpu(), _cuda(), _compiler(), _cache(), *(_package(*item) for item in _PACKAGES)]


_PACKAGES = (
    ("torchvision", "zoo", "models named torchvision:NAME"),
    ("timm", "zoo", "models named timm:NAME"),
    ("transformers", "zoo", "models named transformers:NAME"),
    ("ortools", "exact", "the exact search"),
    ("plotly", "report", "the HTML report"),
    ("cuda-bindings", "cuda", "auditing captured graphs, and what kernels launch, on a GPU"),
    ("nvidia-ml-py", "cuda", "clocks and power beside each sample, on a GPU"),
)


def _torch() -> Finding:
    import torch

    version = str(torch.__version__)
    known = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if (2, 11) <= known < (2, 14):
        return Finding("torch", State.OK, version, "")
    return Finding("torch", State.PROBLEM, version, "install a version from 2.11 up to, not including, 2.14")


def _cpu() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if usable < 2:
        return Finding("cpu lanes", State.PROBLEM, f"{usable} core", "lanes need at least 2 cores; schedules will stay sequential")
    return Finding("cpu lanes", State.OK, f"{usable} cores", "")


def _cuda() -> Finding:
    import torch

    from autosched.core.errors import DeviceMissing
    from autosched.runtime.cuda_key import gpu_facts

    if torch.version.cuda is None:
        return Finding(
            "cuda", State.MISSING, "this PyTorch is a CPU build", "install a CUDA build of torch on a machine with an NVIDIA GPU"
        )
    try:
        # Asks the driver: a look must not create a context on a GPU that others use.
        return Finding("cuda", State.OK, gpu_facts().name, "")
    except DeviceMissing as error:
        return Finding("cuda", State.MISSING, "no GPU answers", str(error))


def _compiler() -> Finding:
    found = shutil.which("g++") or shutil.which("clang++")
    if found:
        return Finding("C++ compiler", State.OK, found, "")
    return Finding("C++ compiler", State.MISSING, "neither g++ nor clang++", "install one to compare with torch.compile")


def _cache() -> Finding:
    from autosched.config import cache_dir

    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return Finding("cache", State.PROBLEM, f"{folder}: {error.strerror}", "set AUTOSCHED_CACHE to a folder you can write")
    if not os.access(folder, os.W_OK):
        return Finding("cache", State.PROBLEM, f"{folder} cannot be written", "set AUTOSCHED_CACHE to a folder you can write")
    return Finding("cache", State.OK, str(folder), "")


def _package(name: str, extra: str, purpose: str) -> Finding:
    try:
        return Finding(name, State.OK, importlib.metadata.version(name), "")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, State.MISSING, "not installed", f"pip install 'autosched[{extra}]' for {purpose}")
