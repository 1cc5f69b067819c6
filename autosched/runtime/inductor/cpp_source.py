"""The text of Inductor's C++ kernels, before the compiler reads it: what a server cannot bear, and what AVX2 is slow at.

What PyTorch writes was seen in 2.13; another text is left alone.
"""

from __future__ import annotations

import re

import torch

# These report a division by zero through one pointer of the whole process, so two of them must not run at the same time.
_DIVIDES_INTEGERS = ("floor_divide_integral(", "remainder_integral(", "mod(")

_DIVISION_LINE = re.compile(r"^.*inductor_cpu_(?:throw_if_)?integer_div_error.*\n", re.MULTILINE)

_OPENING = re.compile(r'extern\s+"C"\s+void\s+kernel\s*\([^()]*\)\s*\{\n')
_PARALLEL = "#pragma omp parallel"
_BOUNDS = re.compile(r'(?:AOTI_)?TORCH_CHECK\((?P<holds>.+), (?P<said>"index out of bounds: [^"]*")\);')

# A load of as many numbers of eight bits as a register of AVX2 holds of float32.
_SHORT_LOAD = re.compile(r"auto (tmp\d+) = at::vec::Vectorized<(u?int8_t)>::loadu\((.+), static_cast<int64_t>\(8\)\);")


def revised(code: str) -> str:
    """The text of a kernel as autosched compiles it; it computes the same."""
    return _short_loads(_bounds_reported(_without_division(code)))


def divides_integers(code: str) -> bool:
    """Whether a kernel reports a division by zero."""
    return any(name in code for name in _DIVIDES_INTEGERS)


def _without_division(code: str) -> str:
    """Without the report of divisions by zero where nothing divides: each kernel would overwrite the pointer of one that does."""
    return code if divides_integers(code) else _DIVISION_LINE.sub("", code)


def _bounds_reported(code: str) -> str:
    """With indices out of bounds reported behind the parallel part: thrown within it, the exception would end the process.

    A number that cannot be looked up is skipped, and so is what its turn of the loop would have written.
    """
    opening, closing = _OPENING.search(code), code.rfind("\n}")
    if _PARALLEL not in code or opening is None or closing < 0 or not _BOUNDS.search(code):
        return code
    lines = code[opening.end() : closing].split("\n")
    if not all(_may_skip(lines, place) for place, line in enumerate(lines) if _BOUNDS.search(line)):
        return re.sub(r"^ *#pragma omp .*\n", "", code, flags=re.MULTILINE)  # on one thread it may throw
    body = _BOUNDS.sub(r"if (C10_UNLIKELY(!(\g<holds>))) { out_of_bounds.store(\g<said>); continue; }", "\n".join(lines))
    begun = "    std::atomic<const char*> out_of_bounds{nullptr};\n"
    ended = "\n    if (const char* said = out_of_bounds.load()) throw std::runtime_error(said);"
    return code[: opening.end()] + begun + body + ended + code[closing:]


def _may_skip(lines: list[str], place: int) -> bool:
    """Whether a ``continue`` in that line goes on with a loop: the innermost thing around it that it could leave is one."""
    depth = 0
    for above in range(place - 1, -1, -1):
        line = lines[above].strip()
        depth += line.count("}") - line.count("{")
        if depth < 0:  # the brace that opens what is around
            depth = 0
            head = line if line != "{" else next((item.strip() for item in reversed(lines[:above]) if item.strip()), "")
            if head.startswith("for(") or "[&]" in head:
                return head.startswith("for(")
    return False


def _short_loads(code: str) -> str:
    """With loads of eight bytes on AVX2 made by one instruction, where each is only widened to float32.

    PyTorch's own fills a register in memory, copies the eight numbers over its front and reads all of it back, which waits for both
    stores: some twenty cycles. What it leaves behind the eight numbers differs, so nothing else may read them.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return code

    def shortened(found: re.Match[str]) -> str:
        name, dtype, address = found.groups()
        rest = code[found.end() :]
        again = rest.find(f"auto {name} = ")
        read = rest if again < 0 else rest[:again]
        widened = read.count(f"at::vec::convert<float>({name})")
        if not widened or widened != len(re.findall(rf"\b{name}\b", read)):
            return found.group()
        return f"auto {name} = at::vec::Vectorized<{dtype}>::loadu_one_fourth({address});"

    return _SHORT_LOAD.sub(shortened, code)
