"""What the launches of a generated module read and write, seen through views, and who owns the memory of each of its tensors.

Whether an operator writes an argument, and whether its result shares memory with one, its schema says; of a kernel, its parameters do. An
argument that is not known to be only read counts as read and written.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autosched.core.extents import overlaps_itself
from autosched.runtime.inductor.source import Kind, Launch, Module, Unrecognised, View

_MAX_FOOTPRINT = 2**28  # elements of a buffer whose windows are compared one by one


@dataclass(frozen=True, slots=True)
class Access:
    """What one launch does to one view that it is given."""

    view: View
    read: bool
    written: bool


@dataclass(frozen=True, slots=True)
class _Effects:
    """What an operator does to its tensor arguments: names or places of those it writes, and of those its result shares memory with."""

    writes: frozenset[int | str]
    aliases: frozenset[int | str]


class Accesses:
    """The accesses of every launch of a module, in the order of the code.

    Args:
        module: as it was read.
        constants: names of the module's globals that are tensors.

    Raises:
        Unrecognised: if a launch cannot be understood.
    """

    def __init__(self, module: Module, constants: frozenset[str]) -> None:
        self._module = module
        self._known = constants
        self.items: dict[str, list[str]] = {}  # name of a result -> names of its items
        for name, (result, _) in module.items.items():
            self.items.setdefault(result, []).append(name)
        self.owner: dict[str, str] = {name: name for name in (*module.arguments, *constants, *module.allocations)}
        self.by_launch = [self._of_launch(launch) for launch in module.launches]
        self._writers: dict[str, list[tuple[int, View]]] = {}
        for place, accesses in enumerate(self.by_launch):
            for access in accesses:
                if access.written:
                    self._writers.setdefault(self.owner[access.view.base], []).append((place, access.view))
        self.split = frozenset(name for name in module.allocations if self._splits(name))

    def windows_before(self, place: int, view: View) -> list[str]:
        """Windows of a buffer in ``split`` that launches before ``place`` write and that share an element with ``view``.

        ``buf7#3`` is the one that launch 3 writes.
        """
        owner = self.owner[view.base]
        return [f"{owner}#{other}" for other, window in self._writers[owner] if other < place and not disjoint(view, window)]

    def _of_launch(self, launch: Launch) -> list[Access]:
        effects = self._effects(launch)
        found: list[Access] = []
        arguments: list[tuple[int | str, ast.expr]] = [*enumerate(launch.call.args)]
        arguments += [(keyword.arg or "**", keyword.value) for keyword in launch.call.keywords]
        if launch.kind is Kind.OPERATOR and isinstance(launch.call.func, ast.Attribute) and not self._is_function(launch):
            arguments.append(("self", launch.call.func.value))
        shared: str = ""
        for where, expression in arguments:
            for view in self._module.tensors(expression, self._known):
                if view.base not in self.owner:
                    raise Unrecognised(f"line {launch.line}: {view.base} is used before it is made")
                read, written = effects(where)
                found.append(Access(view, read, written))
                if self._shares(launch, where):
                    shared = self.owner[view.base]
        for name in (launch.made, *self.items.get(launch.made, ())):
            if name:
                self.owner[name] = shared or name
        return found

    def _is_function(self, launch: Launch) -> bool:
        return launch.callee.startswith(("torch.ops.", "aten.", "inductor_ops.", "_quantized."))

    def _shares(self, launch: Launch, where: int | str) -> bool:
        if launch.kind is not Kind.OPERATOR or not launch.made:
            return False
        return where in _schema_effects(launch).aliases

    def _effects(self, launch: Launch) -> Callable[[int | str], tuple[bool, bool]]:
        """For each argument: whether it is read, whether it is written."""
        if launch.kind in (Kind.CPP, Kind.TRITON):
            kernel = self._module.kernels[launch.callee]
            names = list(kernel.parameters)

            def of_kernel(where: int | str) -> tuple[bool, bool]:
                parameter = names[where] if isinstance(where, int) and where < len(names) else str(where)
                if kernel.kind is Kind.CPP:
                    # A pointer that may be written may also be read: only a first write is known to be no more.
                    return (True, False) if parameter.startswith("const ") else (False, True)
                if parameter in kernel.changed:
                    return True, True
                if parameter.startswith(("in_ptr", "arg_")):
                    return True, False
                return not parameter.startswith("out_ptr"), True

            return of_kernel
        if launch.kind is Kind.EXTERN:
            has_output = any(keyword.arg == "out" for keyword in launch.call.keywords)
            if not has_output and not launch.made:
                return lambda where: (True, True)
            return lambda where: (where != "out", where == "out")
        if not self._is_function(launch):
            return lambda where: (True, where == "self")
        writes = _schema_effects(launch).writes
        return lambda where: (where != "out", where in writes)

    def _splits(self, name: str) -> bool:
        """Whether the launches that write buffer ``name`` write disjoint windows, none of which was read before by another."""
        writers = self._writers.get(name, [])
        if len({place for place, _ in writers}) < 2:
            return False
        for index, (place, view) in enumerate(writers):
            for other, theirs in writers[index + 1 :]:
                if place != other and not disjoint(view, theirs):
                    return False
        for place, accesses in enumerate(self.by_launch):
            for access in accesses:
                if self.owner[access.view.base] != name or not access.read:
                    continue
                late = (view for other, view in writers if other > place)
                if access.view.base != name or any(not disjoint(access.view, view) for view in late):
                    return False
                # Read and written through one argument.
                if access.written:
                    return False
        return all(view.base == name for _, view in writers)


def disjoint(first: View, second: View) -> bool:
    """Whether two views of one allocation share no element, by marking elements; false where that would take too much memory."""
    if first.base != second.base or first.size is None or second.size is None:
        return False
    reach = max(_reach(first), _reach(second))
    if reach > _MAX_FOOTPRINT or _overlaps_itself(first) or _overlaps_itself(second):
        return False
    marks = torch.zeros(reach, dtype=torch.bool, device="cpu")
    marks.as_strided(first.size, first.stride, first.offset).fill_(True)
    return not bool(marks.as_strided(second.size, second.stride, second.offset).any())


def _reach(view: View) -> int:
    assert view.size is not None
    return 1 + view.offset + sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True) if size > 0)


def _overlaps_itself(view: View) -> bool:
    assert view.size is not None
    return overlaps_itself(view.size, view.stride)


def _schema_effects(launch: Launch) -> _Effects:
    """From the schema of the operator that generated code calls ``torch.ops.ns.name.overload`` or ``aten.name``.

    Raises:
        Unrecognised: if there is none, or it has none.
    """
    unknown = Unrecognised(f"line {launch.line}: nothing is known of the operator {launch.callee}")
    parts = launch.callee.removeprefix("torch.ops.").split(".")
    namespaces = {"inductor_ops": "inductor", "_quantized": "_quantized"}
    if len(parts) not in (2, 3):
        raise unknown
    packet = getattr(getattr(torch.ops, namespaces.get(parts[0], parts[0])), parts[1], None)
    if packet is None:
        raise unknown
    names = parts[2:] or packet.overloads()
    overloads = [getattr(packet, name, None) for name in names]
    writes: set[int | str] = set()
    aliases: set[int | str] = set()
    for overload in overloads:
        schema = getattr(overload, "_schema", None)
        if schema is None:
            raise unknown
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is None:
                continue
            where: set[int | str] = {argument.name} if argument.kwarg_only else {place, argument.name}
            aliases |= where
            if argument.alias_info.is_write:
                writes |= where
    return _Effects(frozenset(writes), frozenset(aliases))
