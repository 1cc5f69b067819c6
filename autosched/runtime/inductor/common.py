"""What compiling a region and compiling a whole program with Inductor share: calls as FX nodes, known options, the module it writes."""

from __future__ import annotations

import contextlib
import functools
import locale
import operator
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from autosched.core.from_outside import let_through
from autosched.core.program import Argument, Call, Many, Ref
from autosched.runtime.calls import literal, resolve

_COMPILE_ERROR = "C++ compile error"
_ERROR_OF_A_COMPILER = re.compile(r"(?:fatal )?error: .+")


@dataclass(frozen=True)
class Compiled:
    """What Inductor wrote.

    Args:
        source: text of the generated module.
        namespace: its globals: kernels, helpers, frozen constants.
        constants: names of the globals that are tensors (frozen weights), in the order of the module.
        takes: for each argument of the module's ``call``, the value of the source program given there.
        choices: what was chosen by timing, as ``Program.choices``.
    """

    source: str
    namespace: dict[str, Any]
    constants: tuple[str, ...]
    takes: tuple[int, ...]
    choices: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Why Inductor's code is not used: a region then runs call by call, and a program needs another lowering."""

    reason: str


def add_calls(graph: torch.fx.Graph, nodes: dict[int, torch.fx.Node], calls: Iterable[Call], device: torch.device) -> None:
    """Append ``calls`` to ``graph``; ``nodes``, by value index, gains a node for each output."""
    for call in calls:
        overload: Any = resolve(call.target)
        args = tuple(_argument(item, nodes, device) for item in call.args)
        kwargs = {name: _argument(item, nodes, device) for name, item in call.kwargs}
        made = graph.call_function(overload, args, kwargs)
        returns = overload._schema.returns
        single = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
        for place, value in enumerate(call.outputs):
            if value >= 0:
                nodes[value] = made if single else graph.call_function(operator.getitem, (made, place))


def _argument(item: Argument, nodes: Mapping[int, torch.fx.Node], device: torch.device) -> Any:
    if isinstance(item, Ref):
        return nodes[item.value]
    if isinstance(item, Many):
        return [_argument(part, nodes, device) for part in item.items]
    return literal(item, device)


def first_line(error: BaseException) -> str:
    """An error in one line: its class, and what it says first; of a compiler that failed, the compiler's own first error as well."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
    if not said.endswith(_COMPILE_ERROR):
        return said
    # Then come the command and all that the compiler printed: of a full disk, a missing header, its own end by a signal.
    found = next((match for match in map(_ERROR_OF_A_COMPILER.search, lines[1:]) if match), None)
    return f"{said}: {found.group()[:300]}" if found else said


@functools.cache
def unusable() -> str:
    """Why Inductor cannot be used in this process; empty if it can. PyTorch 2.13 cannot read its own files in the C locale without UTF-8.

    An import that fails half-way fails in another way the next time, so nothing is tried after the first.
    """
    try:
        tempfile.gettempdir()
    except OSError:
        return "Inductor needs a folder for temporary files, and none can be written to; name one in TMPDIR"
    encoding = locale.getpreferredencoding(False)
    try:
        "\u2019".encode().decode(encoding)
    except UnicodeDecodeError:
        try:
            import torch._inductor.lowering  # noqa: F401
        except Exception as error:
            let_through(error)
            return f"Inductor cannot read its own files in this process's encoding, which is {encoding}; set PYTHONUTF8=1"
    return ""


def known_options(config: Any, wanted: Mapping[str, object]) -> dict[str, object]:
    """Those of ``wanted`` that this PyTorch's ``config`` module has; names may be dotted."""
    return {name: value for name, value in wanted.items() if _exists(config, name)}


def _exists(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


@contextlib.contextmanager
def modules_into(found: list[ModuleType]) -> Iterator[None]:
    """Note every module of a graph that this thread loads within the block; not those that the compiler writes to time one kernel."""
    from torch._inductor.codecache import PyCodeCache

    cache: Any = PyCodeCache
    # The cache is the whole process's, and another thread may compile something of its own meanwhile.
    owner = threading.get_ident()
    original = vars(cache)["load_by_key_path"]
    load = cache.load_by_key_path

    def noting(cls: Any, *args: Any, **kwargs: Any) -> ModuleType:
        module: ModuleType = load(*args, **kwargs)
        # A harness has a ``call`` too: templates are timed with and without the operators that can be fused into them.
        graph = callable(getattr(module, "call", None)) and not hasattr(module, "benchmark_all_configs")
        if graph and threading.get_ident() == owner:
            found.append(module)
        return module

    cache.load_by_key_path = classmethod(noting)
    try:
        yield
    finally:
        cache.load_by_key_path = original


def globals_of(module: ModuleType) -> dict[str, Any]:
    """A generated module's globals. Its constants are taken out of it: PyTorch holds every such module as long as the process lives."""
    from torch._inductor.codecache import PyCodeCache

    namespace = dict(vars(module))
    # One that was given none may be handed out again.
    if all(module is not shared for shared in getattr(PyCodeCache, "modules_no_attr", {}).values()):
        for name in [name for name, item in namespace.items() if isinstance(item, torch.Tensor)]:
            delattr(module, name)
    return namespace


@contextlib.contextmanager
def scalars_in_cache_keys() -> Iterator[None]:
    """Within the block, Inductor's own cache tells frozen scalars apart by their numbers, which Inductor writes into its code.

    PyTorch takes constants of one dimension alone for such, and hands out the code of another number.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.graph import GraphLowering

    lowering: Any = GraphLowering
    original = vars(lowering).get("can_inline_constant")
    if original is None:
        with inductor_config.patch(fx_graph_cache=False):
            yield
        return
    inlined = lowering.can_inline_constant
    lowering.can_inline_constant = staticmethod(lambda tensor: tensor.dim() == 0 or inlined(tensor))
    try:
        yield
    finally:
        lowering.can_inline_constant = original
