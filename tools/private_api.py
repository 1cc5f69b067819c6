"""Whether what this package asks of PyTorch, Triton and cuda-bindings is there in the versions installed, and takes what it is given.

    python -P tools/private_api.py [FOLDER]

Reads every file of the package, resolves each dotted name under the modules below, and binds each call's arguments to its signature where
Python knows one. Prints what is absent, for a reader to judge (the package may look before it leaps), what does not fit, and the compiler
options that this version would leave out; ends with 1 if a call does not fit. Methods of objects and what ``getattr`` finds are not seen.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MODULES = ("torch", "triton", "cuda.bindings")
_OF_TORCH = (
    "cuda", "_C", "_inductor", "_functorch", "_dynamo", "_guards", "_subclasses", "_ops", "backends", "fx", "export", "library", "utils",
)  # fmt: skip
_WATCHED = (*(f"torch.{name}" for name in _OF_TORCH), "triton", "cuda.bindings")


@dataclass(frozen=True, slots=True)
class Use:
    """A dotted name in the package; ``call`` if it is called there."""

    name: str
    where: str
    call: ast.Call | None


def uses_in(path: Path) -> Iterator[Use]:
    """Every name of the watched modules that a file uses, under whatever name it imported it."""
    tree = ast.parse(path.read_text())
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                if item.name.startswith(_MODULES):
                    known[item.asname or item.name.partition(".")[0]] = item.name if item.asname else item.name.partition(".")[0]
                    yield Use(item.name, f"{path.name}:{node.lineno}", None)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(_MODULES) and not node.level:
            for item in node.names:
                known[item.asname or item.name] = f"{node.module}.{item.name}"
                yield Use(f"{node.module}.{item.name}", f"{path.name}:{node.lineno}", None)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            root, *rest = _parts(node)
            if root in known:
                yield Use(".".join([known[root], *rest]), f"{path.name}:{node.lineno}", called.get(id(node)))


def _parts(node: ast.expr) -> list[str]:
    found: list[str] = []
    while isinstance(node, ast.Attribute):
        found.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(found)]


def resolve(name: str) -> Any:
    """The object under a dotted name; ``LookupError`` if there is none."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:place]))
            except ImportError as error:
                raise LookupError(name) from error
    return found


def misfit(found: Any, call: ast.Call) -> str:
    """Why the arguments of ``call`` do not fit ``found``; empty if they do or nobody can say."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return ""
    if any(isinstance(item, ast.Starred) for item in call.args) or any(item.arg is None for item in call.keywords):
        return ""
    try:
        signature.bind(*call.args, **{str(item.arg): None for item in call.keywords})
    except TypeError as error:
        return f"{error}; it takes {signature}"
    return ""


def left_out() -> Iterator[str]:
    """Options of Inductor that the package sets and this version does not have: they are dropped without a word."""
    import torch._inductor.config as config

    from autosched.core.variants import WHOLE
    from autosched.runtime.inductor import compile as inductor_compile
    from autosched.runtime.inductor.common import known_options
    from autosched.runtime.inductor.modes import Mode
    from autosched.runtime.regions import compile as region_compile

    modes = [inductor_compile._options(Mode(lowering)) for lowering in WHOLE]
    sets = [*modes, region_compile._FORCED, *region_compile._OF_VARIANT.values()]
    for options in sets:
        yield from sorted(set(options) - set(known_options(config, options)))


def main() -> int:
    """Print what does not fit."""
    import torch

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "autosched"
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {folder.name}")
    wrong, absent, names = 0, {}, set()
    for path in sorted(folder.rglob("*.py")):
        for use in uses_in(path):
            if not use.name.startswith(_WATCHED):
                continue
            names.add(use.name)
            try:
                found = resolve(use.name)
            except (LookupError, ImportError):
                absent.setdefault(use.name, use.where)
                continue
            if use.call is not None and (why := misfit(found, use.call)):
                wrong += 1
                print(f"does not fit: {use.where}: {use.name}: {why}")
    for name, where in sorted(absent.items()):
        print(f"absent: {where}: {name}")
    for name in dict.fromkeys(left_out()):
        print(f"option left out: {name}")
    print(f"{len(names)} names, {len(absent)} absent, {wrong} calls do not fit")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
