"""Settings from the environment, and where files are kept. The only file that reads environment variables; it imports core.errors alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autosched.core.errors import UsageError


def parse_seconds(text: str, what: str = "the budget") -> float:
    """``90``, ``90s``, ``2m``, ``1h`` or ``30d`` as seconds; ``what`` it is, for the message.

    Raises:
        UsageError: for anything else.

    >>> parse_seconds("2m")
    120.0
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    body, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1.0)
    try:
        seconds = float(body) * unit
    except ValueError:
        raise UsageError(f"{what} is {text!r}; expected seconds, or a number with s, m, h or d, such as 90s or 30d") from None
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{what} is {text!r}; expected a finite number that is not negative")
    return seconds


def check_seed(seed: object) -> None:
    """Look at a seed before it fails in whatever draws with it.

    Raises:
        UsageError: if it is no whole number from 0 that 63 bits hold, which all of them take.

    >>> check_seed(7)
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UsageError(f"the seed is {seed!r}; expected a whole number from 0 to {2**63 - 1}")


def cuda_environment() -> tuple[tuple[str, str], ...]:
    """Variables that CUDA and cuBLAS read once when a process first uses the GPU, and that change how kernels overlap or which are chosen.

    ``CUDA_DEVICE_MAX_CONNECTIONS``: hardware queues; work in one queue runs in order. ``CUBLAS_WORKSPACE_CONFIG``: scratch memory, and with
    it which kernels cuBLAS may choose. ``default`` stands for a variable that is not set.
    """
    names = ("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS")
    return tuple((name.lower(), os.environ.get(name) or "default") for name in names)


def allocator_frees_as_it_allocates() -> bool:
    """Whether PyTorch's allocator for GPUs was told, in a variable that it reads when it starts, what it may free when it allocates."""
    told = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    return any(setting in text for setting in ("garbage_collection_threshold", "max_split_size_mb") for text in told)


def cpu_environment() -> tuple[tuple[str, str], ...]:
    """Those variables that are set of the ones that oneDNN and MKL read once in a process, and that change which kernels they choose.

    ``ONEDNN_MAX_CPU_ISA`` and ``MKL_ENABLE_INSTRUCTIONS``: the latest instructions they may use. ``ONEDNN_DEFAULT_FPMATH_MODE`` and
    ``MKL_CBWR``: how float32 may be rounded, and whether results are the same on every processor. oneDNN's have an older name each.
    """
    names = {
        "ONEDNN_MAX_CPU_ISA": "DNNL_MAX_CPU_ISA",
        "ONEDNN_DEFAULT_FPMATH_MODE": "DNNL_DEFAULT_FPMATH_MODE",
        "MKL_ENABLE_INSTRUCTIONS": "",
        "MKL_CBWR": "",
    }
    found = ((name.lower(), os.environ.get(name) or os.environ.get(older)) for name, older in names.items())
    return tuple((name, value.lower()) for name, value in found if value)


def openmp_waiting() -> tuple[tuple[str, str], ...]:
    """Those variables that are set of the ones by which OpenMP's threads, GNU's, Intel's or LLVM's, wait for an operator asleep or awake.

    How long an operator of several threads takes depends on it, and so does what runs beside one that has just ended.
    """
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    return tuple((name.lower(), value.lower()) for name in names if (value := os.environ.get(name, "").strip()))


def openmp_binding() -> str:
    """The variable by which GNU's OpenMP binds each thread to cores of its own, as ``NAME=value``; empty if it binds none.

    It binds the thread that loads PyTorch too, and every thread that this one starts without OpenMP inherits its core.
    """
    binding = os.environ.get("OMP_PROC_BIND", "")
    if binding.strip().lower() == "false":
        return ""
    names = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "OMP_PLACES")
    return next((f"{name}={os.environ[name]}" for name in names if os.environ.get(name)), "")


# glibc's: nothing is mapped by itself, and the heap is not trimmed below 64 GiB (``mallopt(3)``).
_KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 << 30)}


def memory_kept_since_start() -> bool:
    """Whether the variables under which glibc keeps freed memory are set as :func:`keep_memory_in_new_processes` sets them."""
    return all(os.environ.get(name) == value for name, value in _KEEPING.items())


def keep_memory_in_new_processes() -> None:
    """Set them, for processes that this one starts."""
    os.environ.update(_KEEPING)


def compile_limit_s(default_s: float) -> float:
    """How long a ``torch.compile`` baseline may take to compile: ``AUTOSCHED_COMPILE_LIMIT_S`` (seconds), else the default.

    Raises:
        UsageError: if the variable holds no positive number.
    """
    return _limit_s("AUTOSCHED_COMPILE_LIMIT_S", default_s)


def compile_total_s(default_s: float) -> float:
    """How long all compilers of whole models together may take in one job: ``AUTOSCHED_COMPILE_TOTAL_S`` (seconds), else the default.

    Raises:
        UsageError: if the variable holds no positive number.
    """
    return _limit_s("AUTOSCHED_COMPILE_TOTAL_S", default_s)


def compile_modes(known: Sequence[str]) -> tuple[str, ...]:
    """Modes of ``torch.compile`` to measure as baselines: names in ``AUTOSCHED_COMPILE_MODES``, with commas, else all ``known`` ones.

    Raises:
        UsageError: if one is not known.
    """
    names = [name.strip() for name in os.environ.get("AUTOSCHED_COMPILE_MODES", "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"AUTOSCHED_COMPILE_MODES names {unknown[0]!r}; expected some of {', '.join(known)}, with commas between them")
    return tuple(name for name in known if not names or name in names)


def region_limit_s(default_s: float) -> float:
    """How long one region may take to compile in a process of its own: ``AUTOSCHED_REGION_LIMIT_S`` (seconds), else the default.

    Raises:
        UsageError: if the variable holds no positive number.
    """
    return _limit_s("AUTOSCHED_REGION_LIMIT_S", default_s)


def compile_workers(default: int) -> int:
    """Processes that compile regions at the same time: ``AUTOSCHED_COMPILE_WORKERS`` (1: none but this one), else the default.

    Raises:
        UsageError: if the variable holds no positive whole number.
    """
    given = os.environ.get("AUTOSCHED_COMPILE_WORKERS")
    if not given:
        return default
    if not given.isascii() or not given.isdigit() or int(given) < 1:
        raise UsageError(f"AUTOSCHED_COMPILE_WORKERS is {given!r}; expected a whole number of processes from 1")
    return int(given)


def native_lanes_wanted() -> bool:
    """Whether CPU lanes may run without the interpreter: not if ``AUTOSCHED_NATIVE`` is 0.

    Raises:
        UsageError: if the variable is neither 0 nor 1.
    """
    return _switched_on("AUTOSCHED_NATIVE", "lanes that are threads of Python")


def winograd_wanted() -> bool:
    """Whether convolutions on a CPU may be computed by Winograd's algorithm: not if ``AUTOSCHED_WINOGRAD`` is 0.

    Raises:
        UsageError: if the variable is neither 0 nor 1.
    """
    return _switched_on("AUTOSCHED_WINOGRAD", "convolutions that are oneDNN's alone")


def own_products_wanted() -> bool:
    """Whether matrix products on a CPU may be computed by a kernel of our own: not if ``AUTOSCHED_PRODUCTS`` is 0.

    Raises:
        UsageError: if the variable is neither 0 nor 1.
    """
    return _switched_on("AUTOSCHED_PRODUCTS", "products that are those of libraries alone")


def own_convolutions_wanted() -> bool:
    """Whether convolutions on a CPU may be summed by a kernel of our own: not if ``AUTOSCHED_CONVOLUTIONS`` is 0.

    Raises:
        UsageError: if the variable is neither 0 nor 1.
    """
    return _switched_on("AUTOSCHED_CONVOLUTIONS", "convolutions that are oneDNN's or Winograd's alone")


def own_recurrence_wanted() -> bool:
    """Whether recurrent layers on a CPU may be computed by a kernel of our own: not if ``AUTOSCHED_RECURRENCE`` is 0.

    Raises:
        UsageError: if the variable is neither 0 nor 1.
    """
    return _switched_on("AUTOSCHED_RECURRENCE", "recurrent layers that are those of libraries alone")


def own_attention_wanted() -> bool:
    """Whether attention on a CPU may be computed by a kernel of our own: not if ``AUTOSCHED_ATTENTION`` is 0.

    Raises:
        UsageError: if the variable is neither 0 nor 1.
    """
    return _switched_on("AUTOSCHED_ATTENTION", "attention that is PyTorch's alone")


def own_pooling_wanted() -> bool:
    """Whether pictures on a CPU may be pooled by a kernel of our own: not if ``AUTOSCHED_POOLING`` is 0.

    Raises:
        UsageError: if the variable is neither 0 nor 1.
    """
    return _switched_on("AUTOSCHED_POOLING", "pooling that is PyTorch's alone")


def _switched_on(variable: str, otherwise: str) -> bool:
    given = os.environ.get(variable, "1")
    if given not in ("", "0", "1"):
        raise UsageError(f"{variable} is {given!r}; expected 1, or 0 for {otherwise}")
    return given != "0"


def cpp_compiler() -> str:
    """The C++ compiler that ``CXX`` names, as PyTorch reads it; empty if it names none."""
    return os.environ.get("CXX", "")


def c_compiler() -> str:
    """The C compiler that ``CC`` names, as Triton reads it; empty if it names none."""
    return os.environ.get("CC", "")


def _limit_s(name: str, default_s: float) -> float:
    given = os.environ.get(name)
    if not given:
        return default_s
    try:
        limit_s = float(given)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < float("inf"):
        raise UsageError(f"{name} is {given!r}; expected seconds, such as 120")
    return limit_s


def cache_dir() -> Path:
    """Where finished measurements and tuned schedules are kept: ``AUTOSCHED_CACHE``, else the platform's cache folder.

    A user without a home folder that he can write into, as a container's may be, has one of his own among temporary files.

    Raises:
        UsageError: if the variable begins with a home folder that there is not.
    """
    chosen = os.environ.get("AUTOSCHED_CACHE")
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise UsageError(f"AUTOSCHED_CACHE is {chosen!r}, and no such home folder is known here; expected an absolute path") from None
    import platformdirs

    # Releases differ in what they make of a home folder that is not there: an error, or a folder called "~".
    with contextlib.suppress(RuntimeError):
        usual = Path(platformdirs.user_cache_dir("autosched", appauthor=False))
        if usual.is_absolute() and _is_or_can_be_made(usual):
            return usual
    return _among_temporary_files()


def _is_or_can_be_made(folder: Path) -> bool:
    if os.path.exists(folder):
        # If only to be read: it may have been filled when an image was built.
        return True
    nearest = next(parent for parent in folder.parents if os.path.exists(parent))
    return os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)


def _among_temporary_files() -> Path:
    try:
        base = Path(tempfile.gettempdir())
    except FileNotFoundError:
        # A container in which nothing can be written: whoever would keep something there finds out, and a server goes on without.
        base = Path("/tmp")
    folder = base / f"autosched-{os.getuid()}"
    # For nobody else. Somebody may have made it before; code and schedules are then not taken from there, and loading goes on without.
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    return folder


def schedules_dir() -> Path:
    """The cache of tuned schedules."""
    return cache_dir() / "schedules"


def measurements_dir() -> Path:
    """Journals of operators and pairs, one file for each device with its software."""
    return cache_dir() / "measurements"


def loops_dir() -> Path:
    """Diaries of device loops that were interrupted, by what they ask."""
    return cache_dir() / "loops"


def studies_path() -> Path:
    """The database of Optuna's studies."""
    return cache_dir() / "studies" / "optuna.sqlite3"


def regions_dir() -> Path:
    """Compiled code of regions and of whole programs."""
    return cache_dir() / "regions"


NATIVE_LIBRARY = r"(?:lanes|kernels|winograd)-[0-9a-f]{24}-[0-9a-f]{16}\.so"
"""How a file in :func:`native_dir` is called: after what it was built of, and its own digest. ``winograd``: by earlier versions."""


def native_dir() -> Path:
    """C++ of our own: that of the lanes, compiled for each PyTorch that was used, and that of kernels, for each processor."""
    return cache_dir() / "native"


def runs_dir() -> Path:
    """What tuning jobs measured, by device: stores that ``autosched train`` learns from."""
    return cache_dir() / "runs"


def cost_models_dir() -> Path:
    """Cost models trained on this machine, by device."""
    return cache_dir() / "costmodel"
