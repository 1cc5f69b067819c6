"""Builds the emulated CUDA libraries against the headers that come with a CUDA build of PyTorch.

Nothing of NVIDIA's is copied: enumerations and signatures are read from the installed headers, and the list of functions that stand-ins are
made for is read from the symbols that the installed libraries import.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"

_CORE = ("memory", "capture", "streams", "graphs", "kernels", "driver", "driver_graphs")


@dataclass(frozen=True)
class Face:
    """One library. ``missing`` is the body of what is imported from it and not written in ``source``.

    ``others``: names that begin like its own and are another library's.
    """

    soname: str
    source: str
    prefix: str
    missing: str
    others: str = ""


LIBRARIES = ("libcuda.so.1", "libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcudnn.so.9")
"""In the order in which they are preloaded."""

_FACES = (
    Face("libcudart.so.13", "runtime", "cuda", "() { return emulated_unsupported(__func__); }"),
    Face("libcublas.so.13", "cublas", "cublas", "(void* handle) { return emulated_blas_kernel(handle, __func__); }", "cublasLt"),
    Face("libcublasLt.so.13", "cublas", "cublasLt", "() { return 15; }"),
    Face("libcudnn.so.9", "cudnn", "cudnn", "() { return 3000; }"),
)


class BuildError(RuntimeError):
    """What is missing, and what to install."""


def packages() -> Path:
    """The folder that holds ``torch`` and ``nvidia`` of this interpreter."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("this Python has no torch; install a CUDA build of it, for example torch==2.11.0")
    root = Path(found.origin).parents[1]
    if not (root / "nvidia" / "cu13" / "include" / "cuda.h").exists():
        raise BuildError(f"the torch in {root} is not a build for CUDA 13; install one, for example torch==2.11.0 from the default index")
    return root


def default_output() -> Path:
    """One folder for each build of PyTorch: what it imports, and the headers beside it, differ between versions."""
    return HERE.parents[1] / "build" / "cuda_emulator" / f"torch-{importlib.metadata.version('torch')}"


def include_flags(root: Path) -> list[str]:
    """Headers of the runtime, of cuDNN, and those of the compiler that Triton brings."""
    folders = ("nvidia/cu13/include", "nvidia/cudnn/include", "triton/backends/nvidia/include")
    return [f"-I{root / folder}" for folder in folders]


def imported(root: Path, prefix: str) -> set[str]:
    """Functions of a library that PyTorch, or a library PyTorch loads, imports."""
    users = [*(root / "torch" / "lib").glob("libtorch_*.so"), root / "torch" / "lib" / "libc10_cuda.so"]
    users += (root / "nvidia" / "cu13" / "lib").glob("libcusolver.so.*")
    names: set[str] = set()
    for user in users:
        listing = _run(["nm", "-D", "--undefined-only", str(user)])
        names |= {word.partition("@")[0] for line in listing.splitlines() for word in line.split()[-1:] if word.startswith(prefix)}
    return names


def build(output: Path) -> Path:
    """Compile what has changed; returns the folder of the libraries. One process builds, others wait for it."""
    root = packages()
    output.mkdir(parents=True, exist_ok=True)
    with (output / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build(root, output)
    return output


def _build(root: Path, output: Path) -> None:
    flags = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", *include_flags(root)]
    newest_header = max(path.stat().st_mtime for path in (*SOURCES.glob("*.h"), Path(__file__)))
    stale = []
    for source in sorted(SOURCES.glob("*.cpp")):
        made = output / f"{source.stem}.o"
        if not made.exists() or made.stat().st_mtime < max(source.stat().st_mtime, newest_header):
            stale.append([_compiler(), *flags, "-c", "-o", str(made), str(source)])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for words in pool.map(_run, stale):
            print(words, end="")
    if not stale and all((output / name).exists() for name in LIBRARIES):
        return
    core = [str(output / f"{name}.o") for name in _CORE]
    _link(output / "libcuda.so.1", ["-Wl,-soname,libcuda.so.1", *core, "-ldl", "-lpthread"])
    for face in _FACES:
        _face(root, output, face)


def _link(target: Path, words: list[str]) -> None:
    """Into place in one step: the old library may be in use."""
    fresh = target.with_suffix(f".{os.getpid()}")
    _run([_compiler(), "-shared", "-fPIC", "-o", str(fresh), *words])
    fresh.replace(target)


def _face(root: Path, output: Path, face: Face) -> None:
    """A library with the name and the symbol versions that PyTorch asks for."""
    versions = output / f"{face.soname}.map"
    prefixes = "cuda*; __cuda*" if face.source == "runtime" else f"{face.prefix}*; emulated*"
    versions.write_text(f"{face.soname} {{ global: {prefixes}; local: *; }};\n", encoding="utf-8")
    written = str(output / f"{face.source}.o")
    have = {line.split()[-1] for line in _run(["nm", "--defined-only", written]).splitlines() if line}
    lacking = sorted(name for name in imported(root, face.prefix) - have if not (face.others and name.startswith(face.others)))
    hooks = ["int emulated_blas_kernel(void*, const char*);", "int emulated_unsupported(const char*);"]
    generated = output / f"{face.prefix}_others.c"
    generated.write_text("\n".join([*hooks, *(f"int {name}{face.missing}" for name in lacking)]) + "\n", encoding="utf-8")
    words = [f"-Wl,-soname,{face.soname}", f"-Wl,--version-script={versions}", "-Wl,-rpath,$ORIGIN", written]
    _link(output / face.soname, [*words, "-x", "c", str(generated), "-x", "none", f"-L{output}", "-l:libcuda.so.1"])


def _compiler() -> str:
    return "g++"


def _run(words: list[str]) -> str:
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise BuildError(f"{words[0]} is not installed; the emulator needs a C++ compiler and binutils") from error
    if done.returncode:
        raise BuildError(f"{' '.join(words)} failed:\n{done.stderr}")
    return done.stdout + done.stderr


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the libraries; default: one for this version of torch")
    try:
        print(build(parser.parse_args().out or default_output()))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
