"""From the launches of a generated module to units: what each one reads, makes and changes, and a function that runs it alone.

A unit is one launch with what belongs to it: it allocates the buffers that it is the first to write, takes its views anew (they are
windows, not work), asks for the current stream at the moment it is called, and stores what other units read.

Dataflow is that of buffers, seen through views (``inductor.accesses``):
- a buffer that one launch writes is a value that launch makes;
- a buffer whose writers touch *disjoint* windows (a concatenation that every branch writes its slice of) is allocated by a unit of
  its own, and each writer makes its window of it, so that branches stay independent and a reader waits for the windows it reads;
- any other buffer with several writers is made by the first and changed in place by the others, in the order of the code;
- an argument that the code overwrites (a cache that the model fills) is copied by a unit of its own, and what would change the argument
  changes the copy: units are a pure function, and whoever may overwrite the argument leaves the copy out (``runtime.in_place``);
- where the model returns a tensor of its own and the code a frozen tensor of the module's, an argument or another result, a unit of its
  own clones that, as callers own what they are given.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from autosched.runtime.inductor.accesses import Accesses
from autosched.runtime.inductor.source import Kind, Launch, Module, Unrecognised, View

_THREADS = re.compile(r"num_threads\(\d+\)")
_NUMBER = re.compile(r"(_\d+)+$")


@dataclass(slots=True)
class Unit:
    """One unit. Names are those of the generated code; a window of a buffer is ``buf7#3``, the part of it that launch 3 writes.

    Args:
        name: unique; that of the kernel.
        target: what it computes, without numbers that depend on its place in the module.
        source: text that decides its speed.
        lines: body of a function of ``slots``, values outside as ``slots['name']``; see :func:`function_text`.
        reads, makes, changes: values.
    """

    name: str
    target: str
    source: str
    lines: list[str]
    reads: dict[str, None] = field(default_factory=dict)
    makes: dict[str, str] = field(default_factory=dict)  # value -> local expression that is stored
    changes: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Overwritten:
    """An argument that the code overwrites.

    Args:
        target: that of the call that copies it (``core.in_place.copy_target``).
        allocation: an expression that allocates memory of its form.
    """

    target: str
    allocation: str


@dataclass
class Units:
    """All units in the order of the code, the owner of every value's memory, the values returned, and what overwritten arguments became."""

    units: list[Unit]
    owner: dict[str, str]
    returned: list[str]
    copies: dict[str, str] = field(default_factory=dict)


def make_units(
    module: Module,
    constants: Sequence[str],
    overwritten: Mapping[str, Overwritten] = MappingProxyType({}),
    owning: Container[int] = (),
) -> Units:
    """Units of ``module``.

    Args:
        constants: names of the module's globals that are tensors.
        overwritten: by name, the arguments that the code overwrites. A unit of its own copies each, and what would overwrite the argument
            overwrites the copy.
        owning: places among what the code returns that share memory with no argument and no other result of the model. Inductor returns
            the argument itself for a product with ones, and one result for two that are equal.

    Raises:
        Unrecognised: if a launch cannot be understood.
    """
    return _Maker(module, frozenset(constants), overwritten, owning).make()


class _Maker:
    def __init__(self, module: Module, constants: frozenset[str], overwritten: Mapping[str, Overwritten], owning: Container[int]) -> None:
        self._module = module
        self._known = constants
        self._overwritten = overwritten
        self._owning = owning
        self._taken = set(module.arguments)  # whose memory no result may own any more
        self._copies: dict[str, str] = {}  # of the arguments overwritten so far, the names of their copies
        self._accesses = Accesses(module, constants)
        self._owner = self._accesses.owner
        self._names: dict[str, int] = {}

    def make(self) -> Units:
        units: list[Unit] = []
        allocated: set[str] = set()
        for place, launch in enumerate(self._module.launches):
            units += self._copied_before(place, launch)
            touched = dict.fromkeys(self._owner[access.view.base] for access in self._accesses.by_launch[place])
            for name in touched:
                if name in self._accesses.split and name not in allocated:
                    allocated.add(name)
                    units.append(self._allocation(name))
            units.append(
                self._unit(place, launch, [name for name in touched if name in self._module.allocations and name not in allocated])
            )
            allocated.update(name for name in touched if name in self._module.allocations)
        # Nothing is launched for what has no elements.
        bases = dict.fromkeys(self._module.view(item, self._known).base for item in self._module.returned)
        units += [self._allocation(name) for name in bases if name in self._module.allocations and name not in allocated]
        returned = [self._returned(expression, units, owns=place in self._owning) for place, expression in enumerate(self._module.returned)]
        if missing := sorted(self._overwritten.keys() - self._copies.keys()):
            raise Unrecognised(f"no launch overwrites {missing[0]}, as the graph does")
        self._drop_private(units, [*returned, *self._copies.values()])
        return Units(units, self._owner, returned, self._copies)

    # --- units --------------------------------------------------------------------------------------------------------------

    def _unit(self, place: int, launch: Launch, first: list[str]) -> Unit:
        unit = Unit(self._fresh(self._title(launch)), self._target(launch), self._source(launch), [])
        mine: set[str] = set()
        for access in self._accesses.by_launch[place]:
            base = access.view.base
            owner = self._owner[base]
            if owner in self._accesses.split:
                unit.reads[owner] = None
                if access.read:
                    unit.reads.update(dict.fromkeys(self._accesses.windows_before(place, access.view)))
                if access.written:
                    window = f"{owner}#{place}"
                    self._owner[window] = owner
                    unit.makes[window] = self._text(_expression(access.view), mine)
            elif owner in first:
                # A kernel says of each argument whether it writes it, and may read what nobody writes: of torch.empty, as circular padding
                # is written, all that it takes is masked. Of anything else this is a sign of having misread the code.
                written = any(item.written for item in self._accesses.by_launch[place] if self._owner[item.view.base] == owner)
                if not written and launch.kind not in (Kind.CPP, Kind.TRITON):
                    raise Unrecognised(f"line {launch.line}: {owner} is read before it is written")
                if owner not in mine:
                    mine.add(owner)
                    unit.lines.append(f"{owner} = {ast.unparse(self._module.allocations[owner])}")
                    unit.makes[owner] = owner
            elif access.written:
                if owner in self._module.arguments and owner not in self._overwritten:
                    raise Unrecognised(f"line {launch.line}: {owner} is overwritten, and the graph does no such thing")
                unit.changes[self._name(base)] = None
                unit.reads.pop(self._name(base), None)
            elif self._name(base) not in unit.changes:
                unit.reads[self._name(base)] = None
        streams = sorted(name for name in _names(launch.call) if name in self._module.streams)
        unit.lines += [f"{name} = {ast.unparse(self._module.streams[name])}" for name in streams]
        call = self._text(launch.call, mine)
        self._finish(unit, launch, call)
        return unit

    def _copied_before(self, place: int, launch: Launch) -> list[Unit]:
        """A copy of each argument that this launch is the first to overwrite."""
        found: list[Unit] = []
        for access in self._accesses.by_launch[place]:
            base, owner = access.view.base, self._owner[access.view.base]
            if owner not in self._overwritten or (owner not in self._copies and not access.written):
                continue
            if base != owner:
                raise Unrecognised(f"line {launch.line}: {base} lies in {owner}, which is overwritten")
            if owner not in self._copies:
                asked, copied = self._overwritten[owner], f"{owner}_copy"
                original = self._text(ast.Name(owner, ast.Load()), set())
                lines = [f"{copied} = {asked.allocation}", f"torch.ops.aten.copy_.default({copied}, {original})"]
                unit = Unit(self._fresh("copy"), asked.target, asked.allocation, lines, {owner: None}, {copied: copied})
                self._copies[owner] = self._owner[copied] = copied
                found.append(unit)
        return found

    def _name(self, base: str) -> str:
        """What the code calls ``base``: an argument's name stands for its copy from where it is overwritten."""
        return self._copies.get(base, base)

    def _finish(self, unit: Unit, launch: Launch, call: str) -> None:
        items = self._accesses.items.get(launch.made, [])
        if not launch.made:
            unit.lines.append(call)
            return
        unit.lines.append(f"{launch.made} = {call}")
        if not items:
            unit.makes[launch.made] = launch.made
        for name in items:
            unit.makes[name] = f"{launch.made}[{self._module.items[name][1]}]"

    def _allocation(self, name: str) -> Unit:
        expression = self._module.allocations[name]
        unit = Unit(self._fresh(f"allocate_{name}"), "inductor::allocate", ast.unparse(expression), [f"{name} = {ast.unparse(expression)}"])
        unit.makes[name] = name
        return unit

    def _returned(self, expression: ast.expr, units: list[Unit], *, owns: bool) -> str:
        view = self._module.view(expression, self._known)
        base = self._name(view.base)
        if base in self._known or (owns and self._owner[base] in self._taken):
            return self._cloned(base, view, expression, units)
        if owns:
            self._taken.add(self._owner[base])
        if view.size is None:
            return base
        # A window that is returned is a value of its own, in the memory of its buffer.
        text = ast.unparse(expression)
        name = f"{base}@{hashlib.sha256(repr(view).encode()).hexdigest()[:8]}"
        if name not in self._owner:
            self._owner[name] = self._owner[base]
            unit = Unit(self._fresh("view"), f"inductor::view.{_digest(repr((view.size, view.stride, view.offset)))}", text, [])
            owner = self._owner[base]
            unit.reads[base] = None
            if owner in self._accesses.split:
                unit.reads.update(dict.fromkeys(self._accesses.windows_before(len(self._module.launches), view)))
            unit.makes[name] = self._text(_expression(view), set())
            units.append(unit)
        return name

    def _cloned(self, base: str, view: View, expression: ast.expr, units: list[Unit]) -> str:
        """A copy of a tensor that is the module's own, or somebody else's: callers may write to what they are given."""
        unit = Unit(self._fresh("clone"), "inductor::clone", "", [])
        name = f"returned_{unit.name.replace('.', '_')}"
        unit.reads[base] = None
        if self._owner[base] in self._accesses.split:
            unit.reads.update(dict.fromkeys(self._accesses.windows_before(len(self._module.launches), view)))
        unit.lines.append(f"{name} = torch.ops.aten.clone.default({self._text(expression, set())})")
        unit.makes[name] = name
        units.append(unit)
        return name

    def _drop_private(self, units: list[Unit], returned: list[str]) -> None:
        """What only its maker touches is no value: it lives and dies inside the unit."""
        used = set(returned)
        for unit in units:
            used.update(unit.reads, unit.changes)
        for unit in units:
            unit.makes = {name: text for name, text in unit.makes.items() if name in used}

    def _text(self, expression: ast.expr, mine: set[str]) -> str:
        """The expression as code, views written out and values outside as ``slots['name']``."""
        changed = _Inline(self._module, self._known, mine, self._copies).visit(copy.deepcopy(expression))
        return ast.unparse(ast.fix_missing_locations(changed))

    # --- names --------------------------------------------------------------------------------------------------------------

    def _fresh(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return name if count == 0 else f"{name}.{count}"

    def _title(self, launch: Launch) -> str:
        if launch.kind is Kind.OPERATOR:
            parts = launch.callee.removeprefix("torch.ops.").split(".")
            return parts[1] if len(parts) > 1 else parts[0]
        title = launch.callee.rpartition(".")[2]
        kernel = self._module.kernels.get(launch.callee)
        # Triton's templates say so in their names.
        templated = kernel is not None and kernel.kind is Kind.CPP and "_micro_gemm" in kernel.source
        return title.replace("cpp_", "cpp_tem_", 1) if templated else title

    def _target(self, launch: Launch) -> str:
        title = _NUMBER.sub("", self._title(launch)) if launch.kind in (Kind.CPP, Kind.TRITON) else self._title(launch)
        kernel = self._module.kernels.get(launch.callee)
        plain = _Anonymous(self._module, self._known, (), {}).visit(copy.deepcopy(launch.call))
        plain.func = ast.Name("f", ast.Load())
        parameters = kernel.parameters if kernel is not None else ()
        return f"inductor::{title}.{_digest(repr((parameters, launch.callee if kernel is None else '', ast.unparse(plain))))}"

    def _source(self, launch: Launch) -> str:
        kernel = self._module.kernels.get(launch.callee)
        return _THREADS.sub("num_threads()", kernel.source.replace(launch.callee, "kernel")) if kernel is not None else ""


class _Inline(ast.NodeTransformer):
    """Views written out; values that are not local looked up in ``slots``, overwritten arguments as their copies."""

    def __init__(self, module: Module, known: frozenset[str], mine: Container[str], copies: Mapping[str, str]) -> None:
        self._module = module
        self._known = known
        self._mine = mine
        self._copies = copies

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._module.views:
            inner: ast.expr = self.visit(copy.deepcopy(self._module.views[node.id]))
            return inner
        return self._named(node)

    def _named(self, node: ast.Name) -> ast.expr:
        if node.id in self._mine or not self._module.is_tensor(node.id, self._known):
            return node
        return ast.Subscript(ast.Name("slots", ast.Load()), ast.Constant(self._copies.get(node.id, node.id)), ast.Load())


class _Anonymous(_Inline):
    """Views written out; tensors and streams without their names, so that equal launches have equal texts."""

    def _named(self, node: ast.Name) -> ast.expr:
        if self._module.is_tensor(node.id, self._known):
            return ast.Name("tensor", ast.Load())
        return ast.Name("stream", ast.Load()) if node.id in self._module.streams else node


def function_text(unit: Unit, place: Mapping[str, int]) -> str:
    """A function ``unit(slots)``; ``place`` says where in ``slots`` each value is."""
    lines = [_placed(line, place) for line in unit.lines]
    lines += [f"slots[{place[name]}] = {_placed(text, place)}" for name, text in unit.makes.items()]
    return "def unit(slots):\n" + "".join(f"    {line}\n" for line in lines or ["pass"])


def _placed(text: str, place: Mapping[str, int]) -> str:
    return re.sub(r"slots\['([^']+)'\]", lambda match: f"slots[{place[match[1]]}]", text)


def _expression(view: View) -> ast.expr:
    base = ast.Name(view.base, ast.Load())
    if view.size is None:
        return base
    arguments: list[ast.expr] = [base, *(ast.parse(repr(item), mode="eval").body for item in (view.size, view.stride, view.offset))]
    return ast.Call(ast.Name("reinterpret_tensor", ast.Load()), arguments, [])


def _names(expression: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
