"""What Inductor wrote for a whole program, kept on this machine: the text of the module, and how its constants come from the model's.

With ``inductor.compile``, all that touches Inductor's compiler for this lowering. Kept in the store of compiled regions, under its rules of
trust; nothing of it travels in a bundle. No weight is kept: what Inductor computed from constants while it compiled (folded batch norms,
packed weights) was seen operator by operator, and is computed again from the constants at hand when a text is found. The text itself
depends on values of frozen constants (small ones are written into it), so those are part of the key. Any doubt is a miss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import msgspec
import torch

import autosched
from autosched.config import regions_dir
from autosched.core.decoding import decode_json
from autosched.core.from_outside import let_through
from autosched.core.program_json import encode_program
from autosched.runtime.host_key import compiler_key, cpu_device_key
from autosched.runtime.inductor.common import Compiled, first_line
from autosched.runtime.inductor.cpp_kernels import kernels_release_gil
from autosched.runtime.inductor.modes import Mode
from autosched.runtime.inductor.settings import settings_digest
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.regions.store import WHOLE, RegionStore
from autosched.runtime.thread_state import inference_mode

_log = logging.getLogger(__name__)

_SCHEMA = 4


@dataclass
class Counts:
    """Whole programs that this process found kept, and that it kept, for tests and benchmarks."""

    found: int = 0
    kept: int = 0


counts = Counts()


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A generated module.

    Args:
        source: its text.
        takes: as in ``Compiled``.
        constants: names of its globals that are tensors, in its own order.
        recipe: text of a function ``forward(self, ...)`` that returns those tensors.
        leaves: values of the source program that it is given.
        choices: as in ``Compiled``.
    """

    source: str
    takes: tuple[int, ...]
    constants: tuple[str, ...]
    recipe: str
    leaves: tuple[int, ...]
    choices: tuple[tuple[str, str], ...] = ()


@dataclass
class Folds:
    """What Inductor computed on constants: for each result, by identity, the operator and its arguments.

    Args:
        complete: whether this PyTorch computes constants where it is known to.
        results: held, so that no other object gets their identity.
    """

    complete: bool = True
    results: dict[int, tuple[Any, Callable[..., Any], Any, Any]] = field(default_factory=dict)


def key_of(
    bound: BoundProgram,
    constants: Sequence[int],
    inputs: Sequence[torch.Tensor],
    options: Mapping[str, object],
    mode: Mode,
    overwritten: Sequence[int] = (),
) -> str:
    """Under what a compiled program is kept; empty if it cannot be said.

    Args:
        constants: values that are constants of the code, or given to it.
        options: Inductor's options that are set for ``mode``.
        overwritten: of the program's inputs, by value, those that the code overwrites.
    """
    device = bound.device
    settings = settings_digest(device.type)
    if not settings:
        return ""
    # Not of what the example inputs looked like: the code does not depend on it.
    digest = hashlib.sha256(encode_program(dataclasses.replace(bound.program, inputs=())))
    if device.type == "cuda":
        from autosched.runtime.cuda.key import cuda_device_key, cuda_software_key

        machine = cuda_device_key(device.index or 0), cuda_software_key(device.index or 0)
    else:
        machine = cpu_device_key(), compiler_key()
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    values = [bound.constants[value] for value in constants]
    set_here = sorted((name, repr(value)) for name, value in options.items())
    about = [str(device), threads, mode.frozen, mode.choices, set_here, settings, autosched.__version__, list(overwritten)]
    digest.update(msgspec.json.encode((_SCHEMA, about, machine, list(constants), [_described(item) for item in (*values, *inputs)])))
    for item in values if mode.frozen else ():
        digest.update(_bytes(item).cpu().numpy().data)
    return f"{WHOLE}{digest.hexdigest()}"


def find(key: str, bound: BoundProgram) -> Compiled | None:
    """The module kept under ``key``, with constants computed from those of ``bound``; ``None`` if there is none that is right."""
    text = RegionStore(regions_dir()).get(key) if key else None
    if text is None:
        return None
    try:
        kept = decode_json(text, _Kept)
        tensors = _evaluate(kept.recipe, [_plain(bound.constants[value]) for value in kept.leaves])
        given = dict(zip(kept.constants, tensors, strict=True))
        module = ModuleType("autosched_whole")
        with kernels_release_gil(), inference_mode(False), torch.no_grad():
            exec(compile(kept.source, "<inductor module>", "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        let_through(error)
        _log.info("the kept code cannot be loaded, the program is compiled again: %s", first_line(error))
        return None
    namespace = dict(vars(module))
    if not callable(namespace.get("call")) or not given.keys() <= namespace.keys():
        return None
    namespace.update(given)
    if tensor_names(namespace) != kept.constants:
        return None
    counts.found += 1
    return Compiled(kept.source, namespace, kept.constants, kept.takes, kept.choices)


def keep(keys: Sequence[str], bound: BoundProgram, found: Compiled, leaves: Mapping[int, torch.Tensor], folds: Folds) -> bool:
    """Keep a module that was just compiled; whether it was.

    Args:
        keys: what it is to be found under.
        leaves: the constants as they were given to Inductor, by value.
        folds: what it computed from them.
    """
    if not all(keys) or not folds.complete:
        return False
    tensors = [found.namespace[name] for name in found.constants]
    try:
        recipe = _recipe(tensors, leaves, folds)
        again = _evaluate(recipe, [_plain(bound.constants[value]) for value in leaves])
        if not all(_same(mine, theirs) for mine, theirs in zip(again, tensors, strict=True)):
            raise ValueError("computed again, a constant is another")
    except Exception as error:
        let_through(error)
        _log.info("the compiled program is not kept: how its constants come from the model's is not known (%s)", first_line(error))
        return False
    kept = _Kept(found.source, found.takes, found.constants, recipe, tuple(leaves), found.choices)
    text = msgspec.json.encode(kept).decode()
    done = all([RegionStore(regions_dir()).put(key, text) for key in keys])
    counts.kept += done
    return done


@contextlib.contextmanager
def folds_into(folds: Folds) -> Iterator[None]:
    """Note in ``folds`` what Inductor computes on constants within the block. Private interface, the same in PyTorch 2.11 to 2.15."""
    try:
        from torch._inductor.constant_folding import ConstantFolder
    except ImportError:
        folds.complete = False
        yield
        return
    folder: Any = ConstantFolder
    original = vars(folder).get("run_node")
    if original is None:
        folds.complete = False
        yield
        return

    def run_node(self: Any, node: torch.fx.Node) -> Any:
        known = node.op == "call_function"
        args, kwargs = self.fetch_args_kwargs_from_env(node) if known else ((), {})
        out = original(self, node)
        if known and isinstance(out, torch.Tensor | tuple | list) and callable(node.target):
            folds.results[id(out)] = (out, node.target, args, kwargs)
        return out

    folder.run_node = run_node
    try:
        yield
    finally:
        folder.run_node = original


def tensor_names(namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the globals that are tensors, in their order."""
    return tuple(name for name, item in namespace.items() if isinstance(item, torch.Tensor))


def _recipe(tensors: Sequence[torch.Tensor], leaves: Mapping[int, torch.Tensor], folds: Folds) -> str:
    """The text of a function of the leaves that returns ``tensors``.

    Raises:
        ValueError: if it is not known how one of them came about.
    """
    graph = torch.fx.Graph()
    nodes: dict[int, torch.fx.Node] = {}
    places: dict[tuple[Any, ...], torch.fx.Node] = {}
    for value, leaf in leaves.items():
        nodes[id(leaf)] = places[_place(leaf)] = graph.placeholder(f"constant{value}")

    def node_of(item: Any) -> Any:
        if id(item) in nodes:
            return nodes[id(item)]
        if id(item) in folds.results:
            _, target, args, kwargs = folds.results[id(item)]
            nodes[id(item)] = graph.call_function(target, mapped(args), {name: mapped(part) for name, part in kwargs.items()})
            return nodes[id(item)]
        if isinstance(item, torch.Tensor):
            if _place(item) not in places:
                raise ValueError("a constant comes from nowhere that was seen")
            return places[_place(item)]
        return item

    def mapped(item: Any) -> Any:
        if id(item) not in folds.results and isinstance(item, tuple | list):
            return type(item)(mapped(part) for part in item)
        return node_of(item)

    graph.output(tuple(node_of(item) for item in tensors))
    written = graph.python_code("self")
    # The function is run before it is kept: what it lacks shows then. But a name must not mean something else than it did here.
    for name, item in written.globals.items():
        if name in _GLOBALS and name not in ("inf", "nan") and _GLOBALS[name] is not item:
            raise ValueError(f"{name} is not what it is elsewhere")
    return written.src


def window(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> torch.Tensor:
    """As ``as_strided``, from the tensor's own beginning on and not from that of its storage."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + (storage_offset or 0))


_GLOBALS: Mapping[str, Any] = {
    "torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan"), "NoneType": type(None),
    window.__module__.replace(".", "_") + "_window": window,
}  # fmt: skip


def _evaluate(recipe: str, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    scope: dict[str, Any] = dict(_GLOBALS)
    exec(compile(recipe, "<inductor constants>", "exec", dont_inherit=True), scope)
    with inference_mode(False), torch.no_grad():
        made: list[torch.Tensor] = list(scope["forward"](None, *leaves))
    return made


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """As Inductor is given it: it cannot compute with tensors of inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _described(tensor: torch.Tensor) -> list[object]:
    return [list(tensor.shape), list(tensor.stride()), tensor.storage_offset(), str(tensor.dtype)]


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if (mine.layout, mine.dtype, mine.shape, mine.device) != (theirs.layout, theirs.dtype, theirs.shape, theirs.device):
        return False
    if mine.layout is not torch.strided:
        # Packed: there are bytes in it that nobody writes or reads, so two packings of one weight may differ.
        return True
    return mine.stride() == theirs.stride() and torch.equal(_bytes(mine), _bytes(theirs))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Of conjugated or negated numbers the memory holds others.
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
