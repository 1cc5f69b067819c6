"""What this machine can do for autosched, and what is missing."""

from __future__ import annotations

import enum
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autosched.core.extras import install_command

_WATCHED_S = 1.0
# PyTorch from the first release to before the second, as pyproject.toml says to pip, which one may have been made to disregard.
_TORCH = ((2, 11), (2, 16))


class State(enum.StrEnum):
    """How a finding stands."""

    OK = "ok"
    MISSING = "missing"  # something optional is not there
    BUSY = "busy"  # other processes use what is to be measured
    PROBLEM = "problem"  # something needed does not work

    @property
    def exit_code(self) -> int:
        """Of a command that says so: for a busy machine that of a tuning job on it, for a problem that of a faulty device."""
        return {State.BUSY: 3, State.PROBLEM: 5}.get(self, 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``advice`` is empty where nothing needs doing."""

    what: str
    state: State
    detail: str
    advice: str


def examine() -> list[Finding]:
    """Look at PyTorch, the devices, the compiler, the cache, the cost model and the optional packages."""
    import torch

    gpus = _looked("cuda", _cuda)
    findings = [_versions(), _torch(), *_looked("cpu lanes", lambda: [_cpu()]), *gpus, _compiler()]
    findings += _looked("native lanes", lambda: [_native_lanes()]) + _looked("own kernels", lambda: [_own_kernels()])
    findings += [_cache(), *_looked("cost model, cpu", lambda: [_cost_model("cpu")])]
    if gpus[0].state in (State.OK, State.BUSY):
        findings += _looked("cost model, cuda", lambda: [_cost_model(name) for name in _different_gpus()])
    findings += [_package(*item) for item in _PACKAGES]
    # On a CPU build of PyTorch they would be of no use.
    if torch.version.cuda is None:
        return findings
    bindings = [_package(*_BINDINGS)] if gpus[0].state is State.MISSING else _looked(_BINDINGS[0], lambda: [_bindings(*_BINDINGS)])
    return [*findings, _triton(), *bindings, _package(*_NVML)]


def _looked(what: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """What ``look`` finds; where a machine is such that it breaks, that, and the others are found all the same."""
    try:
        return look()
    except Exception as error:
        detail = f"looking at it failed: {type(error).__name__}: {error}"
        return [Finding(what, State.PROBLEM, detail, "the rest may work; report this, it is not how it should be")]


_PACKAGES = (
    ("torchvision", "zoo", "models named torchvision:NAME"),
    ("timm", "zoo", "models named timm:NAME"),
    ("transformers", "zoo", "models named transformers:NAME"),
    ("ortools", "exact", "the exact search"),
    ("plotly", "report", "the HTML report"),
    ("jinja2", "report", "the HTML report"),
)
_BINDINGS = ("cuda-bindings", "cuda", "auditing captured graphs, and what kernels launch, on a GPU")
_NVML = ("nvidia-ml-py", "cuda", "clocks and power beside each sample, on a GPU")


def _versions() -> Finding:
    from autosched import __version__

    return Finding("autosched", State.OK, f"{__version__}, Python {platform.python_version()}", "")


def _torch() -> Finding:
    import torch

    version = str(torch.__version__)
    known = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    first, end = _TORCH
    if first <= known < end:
        return Finding("torch", State.OK, version, "")
    advice = "install a version from {}.{} up to, not including, {}.{}".format(*first, *end)
    return Finding("torch", State.PROBLEM, version, advice)


def _cpu() -> Finding:
    from autosched.datasets.facts import DISTURBED
    from autosched.device import host
    from autosched.runtime.cores import usable_cores

    usable, physical = usable_cores(), host.physical_cores()
    detail = f"{usable} core{'s' if usable > 1 else ''}{_why_so_few(usable)}"
    if physical < usable:
        # As Linux counts them; lanes and wide operators have one thread for each of those that are more than a name.
        detail += f"; hardware threads of {physical} physical core{'s' if physical > 1 else ''}, which are what schedules use"
    if physical < 2:
        return Finding("cpu lanes", State.MISSING, detail, "lanes need at least 2 physical cores; schedules will stay sequential")
    taken = _taken_now(usable)
    if taken > DISTURBED:
        detail += f", {100 * taken:.0f} % of them taken by other processes now"
        return Finding("cpu lanes", State.BUSY, detail, "stop other work before tuning: what is timed beside it says nothing")
    return Finding("cpu lanes", State.OK, detail, "")


def _why_so_few(usable: int) -> str:
    """What keeps this process from the other cores of the machine; empty if it has all of them."""
    from autosched.config import openmp_binding
    from autosched.runtime.cpu_quota import quota_cores

    cores, quota = os.cpu_count() or 1, quota_cores()
    if usable >= cores:
        return ""
    if quota is not None and max(1, int(quota)) == usable:
        return f" of {cores}: a control group's CPU quota of {quota:g}"
    if binding := openmp_binding():
        return f" of {cores}: OpenMP binds threads to cores ({binding}); unset that"
    return f" of {cores}: the process's affinity mask (taskset)"


def _taken_now(usable: int) -> float:
    """Share (0 to 1) of the cores that other processes take at this moment: a tuning job that has just ended counts no more."""
    from autosched.device.contamination import foreign_load, mark_load

    start = mark_load()
    time.sleep(_WATCHED_S)
    taken = foreign_load(start, mark_load())
    if taken >= 0.0 or not hasattr(os, "getloadavg"):
        return max(taken, 0.0)
    # Only Linux tells more than the mean of the last minute.
    return min(1.0, os.getloadavg()[0] / usable)


def _cuda() -> list[Finding]:
    """One finding of CUDA; where there are several GPUs, one of each follows it."""
    import torch

    from autosched.core.errors import DeviceError, DeviceMissing
    from autosched.runtime.cuda.key import gpu_count, gpu_facts

    if torch.version.cuda is None:
        advice = "install a CUDA build of torch on a machine with an NVIDIA GPU"
        return [Finding("cuda", State.MISSING, "this PyTorch is a CPU build", advice)]
    try:
        # Asks the driver: a look must not create a context on a GPU that others use.
        first, count = gpu_facts(), gpu_count()
    except DeviceMissing as error:
        return [Finding("cuda", State.MISSING, "no GPU answers", str(error))]
    except DeviceError as error:
        return [Finding("cuda", State.PROBLEM, "PyTorch cannot use the GPU", str(error))]
    if count == 1:
        return [_gpu("cuda", 0, first.name)]
    every = enumerate(gpu_facts(index) for index in range(count))
    named = [_gpu(f"cuda:{index}", index, f"{facts.name}, {facts.details()['memory_gib']} GiB") for index, facts in every]
    return [Finding("cuda", State.OK, f"{count} GPUs", ""), *named]


def _gpu(what: str, index: int, named: str) -> Finding:
    """One GPU: whether PyTorch can use it, and whether others do."""
    from autosched.core.errors import DeviceError
    from autosched.datasets.facts import DISTURBED
    from autosched.device.cuda.meter import GpuMeter
    from autosched.runtime.cuda.key import require_kernels

    try:
        require_kernels(index)
    except DeviceError as error:
        return Finding(what, State.PROBLEM, named, str(error))
    meter = GpuMeter(index)
    share, use = meter.others_share(), meter.use()
    if share is None or use is None:
        return Finding(what, State.OK, named, "")
    held = f"{use.held_bytes / 2**30:.0f} of {use.memory_bytes / 2**30:.0f} GiB of its memory taken"
    if share > DISTURBED:
        detail = f"{named}; other processes keep it busy {100 * share:.0f} % of the time now, {held}"
        return Finding(what, State.BUSY, detail, "stop other work on it before tuning: what is timed beside it says nothing")
    return Finding(what, State.OK, f"{named}; {held}" if use.held_bytes > use.memory_bytes * DISTURBED else named, "")


def _different_gpus() -> list[str]:
    """As devices are named, the first GPU of each kind: those that are alike share everything that is learned of them."""
    from autosched.runtime.cuda.key import cuda_device_key, gpu_count

    keys = [cuda_device_key(index) for index in range(gpu_count())]
    return [f"cuda:{keys.index(key)}" for key in dict.fromkeys(keys)] if len(set(keys)) > 1 else ["cuda"]


def _compiler() -> Finding:
    from autosched.config import cpp_compiler

    # As PyTorch looks for it: another that is installed is not found unless CXX names it.
    named = cpp_compiler() or ("clang++" if sys.platform == "darwin" else "g++")
    if found := shutil.which(named):
        return Finding("C++ compiler", State.OK, found, "")
    advice = "install it, or name another in CXX: the lowerings fused and inductor on a CPU need one, and so does torch.compile"
    return Finding("C++ compiler", State.MISSING, f"there is no {named}", advice)


def _native_lanes() -> Finding:
    from autosched.runtime.native.build import native_library, obstacle

    if native_library() is not None:
        return Finding("native lanes", State.OK, "built for this PyTorch", "")
    if why := obstacle():
        return Finding("native lanes", State.MISSING, why, "without them lanes are threads of Python, which small operators lose by")
    return Finding("native lanes", State.OK, "not built yet; the first tuning job on the CPU does it, in some ten seconds", "")


def _own_kernels() -> Finding:
    from autosched.runtime.cpu_kernels.library import kernel_library, kernels_built
    from autosched.runtime.cpu_kernels.ways import WAYS, missing_kernel

    why = next(filter(None, map(missing_kernel, WAYS)), "")
    if not why and kernels_built() and isinstance(found := kernel_library(), str):
        why = found  # what is there may be none that this system runs
    if why:
        advice = "without them, convolutions, small matrix products, recurrent layers and attention on a CPU may take several times as long"
        return Finding("own kernels", State.MISSING, why, advice)
    if kernels_built():
        return Finding("own kernels", State.OK, "built for this processor", "")
    return Finding("own kernels", State.OK, "not built yet; the first job with a use for them does it, in some five seconds", "")


def _cache() -> Finding:
    from autosched.config import cache_dir

    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return Finding("cache", State.PROBLEM, f"{folder}: {error.strerror}", "set AUTOSCHED_CACHE to a folder you can write")
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding("cache", State.PROBLEM, f"{folder} cannot be written", "set AUTOSCHED_CACHE to a folder you can write")
    return _kept_in(folder)


def _kept_in(folder: Path) -> Finding:
    """Of the folders in the cache: one may be another user's (a job under sudo has made it), and jobs say so of some of them only."""
    from autosched import config
    from autosched.runtime.regions.store import private_folder

    advice = "let this user have it (chown), remove it, or set AUTOSCHED_CACHE to a folder of your own"
    # What is to be run as code may be root's, as in an image; what a job has found there is said under "native lanes".
    for place in (config.regions_dir(), config.native_dir()):
        if os.path.isdir(place) and not private_folder(place):
            why = "belongs to another user, or others may write there, so no code is kept there or taken from there"
            return Finding("cache", State.PROBLEM, f"{place} {why}", advice)
    data = (config.schedules_dir(), config.measurements_dir(), config.loops_dir(), config.runs_dir(), config.studies_path().parent)
    for place in (*data, config.cost_models_dir(), config.regions_dir()):
        if os.path.lexists(place) and not (os.path.isdir(place) and os.access(place, os.R_OK | os.W_OK | os.X_OK)):
            return Finding("cache", State.PROBLEM, f"{place} is no folder that can be written, so nothing is kept there", advice)
    return Finding("cache", State.OK, str(folder), "")


def _triton() -> Finding:
    from autosched.runtime.regions.triton_needs import lacking_for_triton

    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "triton", State.MISSING, "not installed", "pip install triton, in the version of this torch, for fused regions on a GPU"
        )
    if lacking := lacking_for_triton():
        advice = "without it nothing can be compiled for a GPU: no lowering but aten and rewritten, and no torch.compile"
        return Finding("triton", State.MISSING, f"{version}; {lacking}", advice)
    return Finding("triton", State.OK, version, "")


def _bindings(what: str, extra: str, purpose: str) -> Finding:
    """cuda-bindings: not only whether it is installed, but whether it can be used with this driver."""
    from autosched.runtime.cuda.bindings import NOT_INSTALLED, why_unread

    found, why = _package(what, extra, purpose), why_unread()
    if found.state is not State.OK or not why:
        return found
    if why == NOT_INSTALLED:  # as far as pip knows it is
        why = "it cannot be imported"
    return Finding(
        what,
        State.MISSING,
        f"{found.detail}; {why}",
        f"another version of it (pip install -U {what}) or of the driver, for {purpose}",
    )


def _cost_model(device: str) -> Finding:
    from autosched.core.errors import AutoschedError
    from autosched.device.registry import device_named
    from autosched.pipeline.model_choice import NONE_YET, engine_of, model_in_use

    try:
        found = device_named(device)
        chosen = model_in_use(found.key, engine_of(found))
    except AutoschedError as error:
        return Finding(f"cost model, {device}", State.PROBLEM, "the device does not answer", str(error))
    if chosen.settled:
        return Finding(f"cost model, {device}", State.OK, f"the analytic prior: {chosen.why}", "")
    if chosen.folder is None:
        detail = "the analytic prior" if chosen.why == NONE_YET else f"the analytic prior: {chosen.why}"
        return Finding(f"cost model, {device}", State.MISSING, detail, "'autosched collect -o runs', then 'autosched train runs'")
    return Finding(f"cost model, {device}", State.OK, f"{chosen.name}, {chosen.why}", "")


def _package(name: str, extra: str, purpose: str) -> Finding:
    try:
        return Finding(name, State.OK, importlib.metadata.version(name), "")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, State.MISSING, "not installed", f"{install_command(extra)} for {purpose}")
