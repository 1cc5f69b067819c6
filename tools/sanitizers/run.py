"""C++ of our own built with one of GCC's sanitizers, and its tests run on that: not part of ``make test``.

    python -P tools/sanitizers/run.py {address,thread} [ARGUMENTS OF PYTEST]

``address`` looks for wrong reads and writes of memory and for undefined behaviour, ``thread`` for memory that two threads use in no order.
Both see the files of ``autosched/runtime/native`` and ``autosched/runtime/cpu_kernels``, not PyTorch, which is built without. Ends with 1
if a test fails or something was found.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from autosched.config import native_dir
from autosched.core.scratch import Scratch
from autosched.runtime.cpu_kernels.library import kernels_recipe
from autosched.runtime.native.build import lanes_recipe

_HERE = Path(__file__).parent
_KINDS = {"address": "address,undefined", "thread": "thread"}
_BUILD_LIMIT_S = 1800.0
_TESTS = ("native", "cpu_kernels", "test_lanes.py", "test_team.py", "test_forking.py")
# That file builds lanes of its own, without a sanitizer; those tests leave a wait out, which ``thread`` is right to find, or ask for more
# memory than there is, at which ``address`` ends the process.
_SKIPPED = "not missing_wait and not lack_memory"
_DEFAULTS = ("--ignore=tests/runtime/native/test_native_build.py", "-k", _SKIPPED, *(f"tests/runtime/{name}" for name in _TESTS))
# What the system's library frees of a thread's own memory: that the thread has ended it learns from the kernel.
_KNOWN = "race:_dl_deallocate_tls\n"
_FOUND = re.compile(r"(WARNING|ERROR): \w+Sanitizer: .*")


def main(kind: str, arguments: list[str]) -> int:
    """Build, run, and show what was found."""
    with Scratch() as scratch:
        os.environ.update({"CXX": f"g++ -fsanitize={_KINDS[kind]} -fno-omit-frame-pointer -g", "AUTOSCHED_CACHE": str(scratch / "cache")})
        for recipe in (lanes_recipe(), kernels_recipe()):
            if isinstance(why := recipe.make(_BUILD_LIMIT_S), str):
                print(why)
                return 1
        # Where tests/conftest.py has them built.
        native_dir().rename(scratch / f"autosched-tests-native-{os.getuid()}")
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or _DEFAULTS)]
        status = subprocess.run(command, env=_environment(kind, scratch), check=False).returncode
        reports = [path.read_text(errors="replace") for path in sorted(scratch.glob("report.*"))]
        found = [report for report in reports if _FOUND.search(report)]
        print(*found, f"processes with a report: {len(found)}", sep="\n")
        return 1 if status or found else 0


def _environment(kind: str, scratch: Path) -> dict[str, str]:
    (scratch / "known").write_text(_KNOWN)
    # The language's library comes with them: without it, exceptions cannot be followed.
    first = [_library(f"{name}.so") for name in {"address": ("libasan", "libubsan"), "thread": ("libtsan",)}[kind]]
    if kind == "thread":
        openmp = scratch / "openmp.so"
        subprocess.run(["g++", "-shared", "-fPIC", "-O1", str(_HERE / "openmp.cpp"), "-o", str(openmp)], check=True)
        first.append(str(openmp))
    report = f"log_path={scratch / 'report'}"
    others = {name: value for name, value in os.environ.items() if name not in ("CXX", "AUTOSCHED_CACHE")}
    return {
        **others,
        "TMPDIR": str(scratch),
        "LD_PRELOAD": " ".join([*first, _library("libstdc++.so")]),
        "ASAN_OPTIONS": f"detect_leaks=0:{report}",  # the interpreter leaves its own
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": f"exitcode=0:die_after_fork=0:suppressions={scratch / 'known'}:{report}",
    }


def _library(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    return str(Path(found.strip()).resolve())


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in _KINDS:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
