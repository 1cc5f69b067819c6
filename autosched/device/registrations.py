"""What a measuring process must import so that the custom operators of this one exist there too.

PyTorch has no list of who registered what, so it is put together from what there is: ``custom_op`` knows its function,
a fake implementation its source line, a ``Library`` stands in a module, shared libraries are listed, and a package, or one in it, may be
named like its namespace. The only file that reads those private tables; where one is absent, the others are used.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator

import msgspec
import torch
from torch import library

from autosched.core.custom_operators import trust_for_good, trusted
from autosched.core.decoding import decode_json
from autosched.core.errors import UsageError


class Registrations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the operators of ``namespaces`` come from.

    Args:
        modules: to import; ``path`` is searched for them after what that process searches by itself.
        libraries: shared libraries to load before. As ``path``, not as text: the name of a file need not be UTF-8.
    """

    namespaces: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    libraries: tuple[bytes, ...] = ()
    path: tuple[bytes, ...] = ()


def describe_registrations() -> str:
    """Those of the namespaces trusted now, as text for :func:`register_there`.

    Raises:
        UsageError: if the main program registers one, which another process cannot import, or nothing says who registers them.
    """
    namespaces = sorted(trusted())
    if not namespaces:
        return ""
    libraries = [os.fsencode(path) for path in sorted(getattr(torch.ops, "loaded_libraries", ()))]
    modules = {namespace: _own_first(_modules_of(namespace)) or _named_like(namespace) for namespace in namespaces}
    for namespace, found in modules.items():
        if "__main__" in found:
            raise UsageError(
                f"the custom operators of {namespace!r} are registered by the main program, which a measuring process cannot import; "
                "expected a module. Move them to a file of their own and import that."
            )
        if not found and not libraries and _exists(namespace):
            raise UsageError(
                f"nothing says which module registers the custom operators of {namespace!r}, and a measuring process must import it; "
                "expected a fake implementation of one (register_fake) or the Library object in a module, or a shared "
                "library loaded with torch.ops.load_library. Register it so."
            )
    path = [os.fsencode(os.path.abspath(entry)) for entry in sys.path]
    every = dict.fromkeys(module for found in modules.values() for module in found)
    return msgspec.json.encode(Registrations(tuple(namespaces), tuple(every), tuple(libraries), tuple(path))).decode()


def register_there(text: str) -> None:
    """In a measuring process: import what ``text`` names, and trust its namespaces as long as the process lives.

    Raises:
        ImportError: naming the module.
    """
    if not text:
        return
    wanted = decode_json(text.encode(), Registrations)
    sys.path.extend(entry for item in wanted.path if (entry := os.fsdecode(item)) not in sys.path)
    for library_file in wanted.libraries:
        torch.ops.load_library(os.fsdecode(library_file))  # type: ignore[no-untyped-call]
    for module in wanted.modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ImportError(f"cannot import {module}, which registers custom operators: {type(error).__name__}: {error}") from error
    trust_for_good(wanted.namespaces)


def _own_first(found: Iterator[str]) -> list[str]:
    """What PyTorch's own modules register for others counts only where nobody else is seen to: they are there after its import anyway."""
    every = sorted({module for module in found if module})
    return [module for module in every if not module.startswith("torch.")] or every


def _named_like(namespace: str) -> list[str]:
    """The outermost module called ``namespace`` in any package: ``library.define`` and ``impl`` with a name leave no other trace."""
    found = [name for name in list(sys.modules) if name.rpartition(".")[2] == namespace and not name.startswith("torch.")]
    return sorted(found, key=lambda name: name.count("."))[:1]


def _modules_of(namespace: str) -> Iterator[str]:
    prefix = f"{namespace}::"
    if namespace in sys.modules:
        yield namespace
    for name, definition in _table("torch._library.custom_ops", "OPDEFS").items():
        if name.startswith(prefix):
            # triton_op wraps its function in one of PyTorch's own, and gives the user's as the fake implementation.
            for key in ("_init_fn", "_abstract_fn"):
                yield getattr(getattr(definition, key, None), "__module__", "")
    files: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(file := getattr(module, "__file__", None), str):
            files.setdefault(os.path.abspath(file), name)
        # By type: what some modules hold answers a question for its class with a warning, or worse.
        if any(issubclass(type(item), library.Library) and item.ns == namespace for item in list(vars(module).values())):
            yield name
    registered = getattr(getattr(importlib.import_module("torch._library"), "simple_registry", None), "singleton", None)
    for name, entry in dict(getattr(registered, "_data", {})).items():
        kernel = getattr(getattr(entry, "fake_impl", None), "kernel", None)
        if name.startswith(prefix) and kernel is not None:
            yield files.get(os.path.abspath(str(getattr(kernel, "source", "")).rpartition(":")[0]), "")


def _exists(namespace: str) -> bool:
    """Whether this process has operators of ``namespace``."""
    names: list[str] = getattr(torch._C, "_dispatch_get_all_op_names", list)()
    return any(name.startswith(f"{namespace}::") for name in names)


def _table(module: str, name: str) -> dict[str, object]:
    try:
        return dict(getattr(importlib.import_module(module), name, {}))
    except ImportError:
        return {}
