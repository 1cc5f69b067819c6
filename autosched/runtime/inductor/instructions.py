"""Code that Inductor wrote, as instructions: what a unit of whole-model code, or the ``call`` of a region, does, statement by statement.

So that a lane of such operators runs without the interpreter (``instructions``). The statements are those that ``inductor.source`` knows;
each becomes the instructions that do exactly the same, and anything else is :class:`Unrecognised` with the statement: that kernel carries
no instructions and is called. Checked by running instructions one by one against the code itself, bit for bit (``tests/runtime``).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosched.core.program import Argument, Call, Many, Ref
from autosched.runtime.inductor.cpp_kernels import entry_of
from autosched.runtime.inductor.expressions import Schema, dtype_of, is_bias_addmm, library_of, literal_of, operator_of, schema_of
from autosched.runtime.inductor.source import Kernel, Kind, Unrecognised, dotted, integer, integers, parse_module, shown
from autosched.runtime.instruction_merging import merged
from autosched.runtime.instructions import Allocate, CallOperator, Expect, Instruction, Release, RunKernel, Same, Window, scratch

_SLOTS = "slots"  # the argument of a unit's function


def unit_instructions(text: str, kernels: Mapping[str, Kernel], namespace: Mapping[str, Any]) -> tuple[Instruction, ...]:
    """What a function of slots does.

    Args:
        text: as ``inductor.units.function_text`` writes it.
        kernels: of the module that it is from.
        namespace: the globals of that module.

    Raises:
        Unrecognised: if a statement has a form that is not known here.
    """
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    body = _Body(kernels, namespace, function.body)
    return body.instructions()


def region_instructions(source: str, namespace: Mapping[str, Any], reads: Sequence[int], writes: Sequence[int]) -> tuple[Instruction, ...]:
    """What the ``call`` of a region does, given the tensors of ``reads`` and putting what it returns into ``writes``.

    Args:
        source: text of the region's module.
        namespace: its globals.

    Raises:
        Unrecognised: as :func:`unit_instructions`.
    """
    if not source:
        raise Unrecognised("the region's module holds tensors of its own")
    kernels, statements = _parsed(source)
    return _Body(kernels, namespace, statements, reads, writes).instructions()


@functools.lru_cache(maxsize=32)
def _parsed(source: str) -> tuple[dict[str, Kernel], list[ast.stmt]]:
    # Operators that are alike have one module, and ask one after the other.
    return parse_module(source)


class _Body:
    """Statements in a row, being translated.

    Args:
        kernels, namespace: of the module.
        statements: in order.
        reads: slots of what ``args`` is unpacked into.
        writes: slots of what is returned.
    """

    def __init__(
        self,
        kernels: Mapping[str, Kernel],
        namespace: Mapping[str, Any],
        statements: Sequence[ast.stmt],
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
    ) -> None:
        self._kernels = kernels
        self._namespace = namespace
        self._statements = statements
        self._reads = tuple(reads)
        self._writes = tuple(writes)
        self._names: dict[str, int] = {}  # the slot of each name that is a tensor
        self._results: dict[str, dict[int, int]] = {}  # of each name that is several tensors, the slots of those that are used
        self._seen: set[str] = set()
        self._made: list[Instruction] = []
        self._scratch = 0
        self._windows: list[int] = []  # scratch slots that no name stands for
        self._items = _items(statements)
        self._ended = False

    def instructions(self) -> tuple[Instruction, ...]:
        """All of them; the body's own slots are empty afterwards."""
        for statement in self._statements:
            if self._ended:
                raise Unrecognised(f"line {statement.lineno}: code after the return")
            self._statement(statement)
        if self._writes and not self._ended:
            raise Unrecognised("the code returns nothing")
        self._let_go([*self._names, *self._results])
        return merged(self._made)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[ast.Tuple() | ast.List() as names], value=ast.Name(id="args")) if self._reads:
                if len(names.elts) != len(self._reads):
                    raise Unrecognised(f"call takes {len(names.elts)} tensors; expected {len(self._reads)}")
                for name, slot in zip(names.elts, self._reads, strict=True):
                    self._name(name, slot)
            case ast.Assign(targets=[ast.Name() as name], value=ast.Name(id=other)) if other in self._names:
                self._name(name, self._names[other])
            case ast.Assign(targets=[ast.Name(id=made) as name], value=ast.Call() as call):
                self._assign(made, name, call)
            case ast.Assign(targets=[ast.Name() as name], value=ast.Subscript() as item):
                self._name(name, self._slot(item))
            case ast.Assign(targets=[ast.Subscript() as target], value=value) if (number := _slot_number(target)) is not None:
                self._store(number, value)
            case ast.Expr(value=ast.Call() as call):
                self._run(call)
            case ast.Delete(targets=targets) if all(isinstance(target, ast.Name) for target in targets):
                self._let_go([target.id for target in targets if isinstance(target, ast.Name)])
            case ast.Return(value=ast.Tuple() | ast.List() as returned):
                self._return(returned.elts)
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case _:
                raise Unrecognised(f"line {statement.lineno}: {shown(statement)} has no form that is known here")

    # --- names and slots ----------------------------------------------------------------------------------------------------

    def _name(self, name: ast.expr, slot: int) -> None:
        if not isinstance(name, ast.Name) or name.id in self._seen or name.id in self._kernels:
            raise Unrecognised(f"{shown(name)} is assigned twice, or is no name")
        self._seen.add(name.id)
        self._names[name.id] = slot

    def _fresh(self) -> int:
        self._scratch += 1
        return scratch(self._scratch - 1)

    def _let_go(self, names: Sequence[str]) -> None:
        """What ``names`` alone stand for is not needed any more, nor are windows of it."""
        gone, self._windows = self._windows, []
        for name in names:
            if name not in self._names and name not in self._results:
                raise Unrecognised(f"{name} is deleted before it is made")
            dropped = [self._names.pop(name)] if name in self._names else list(self._results.pop(name).values())
            gone += [slot for slot in dropped if slot < 0 and slot not in self._held() and slot not in gone]
        if gone:
            self._made.append(Release(tuple(gone)))

    def _held(self) -> set[int]:
        return {*self._names.values(), *(slot for slots in self._results.values() for slot in slots.values())}

    def _slot(self, expression: ast.expr) -> int:
        """Where the tensor of an expression is; a window is taken first."""
        match expression:
            case ast.Name(id=name) if name in self._names:
                return self._names[name]
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(place))) if place in self._results.get(name, ()):
                return self._results[name][place]
            case ast.Subscript() if (number := _slot_number(expression)) is not None:
                return number
            case ast.Call() if _is_window(expression):
                window = self._fresh()
                self._windows.append(window)
                self._window(window, expression)
                return window
            case _:
                raise Unrecognised(f"{shown(expression)} is no tensor that is known here")

    def _window(self, slot: int, call: ast.Call) -> None:
        if call.keywords or len(call.args) not in (3, 4):
            raise Unrecognised(f"{shown(call)} has no form that is known here")
        of = self._slot(call.args[0])
        offset = integer(call.args[3]) if len(call.args) > 3 else 0
        self._made.append(Window(slot, of, integers(call.args[1]), integers(call.args[2]), offset))

    def _store(self, slot: int, value: ast.expr) -> None:
        if isinstance(value, ast.Call) and _is_window(value):
            self._window(slot, value)
        else:
            self._made.append(Same(slot, self._slot(value)))

    def _return(self, returned: Sequence[ast.expr]) -> None:
        if len(returned) != len(self._writes):
            raise Unrecognised(f"call returns {len(returned)} tensors; expected {len(self._writes)}")
        for slot, expression in zip(self._writes, returned, strict=True):
            self._store(slot, expression)
        self._ended = True

    # --- calls --------------------------------------------------------------------------------------------------------------

    def _assign(self, made: str, name: ast.Name, call: ast.Call) -> None:
        called = dotted(call.func)
        if called == "empty_strided_cpu" and len(call.args) == 3 and not call.keywords:
            slot = self._fresh()
            self._made.append(Allocate(slot, integers(call.args[0]), integers(call.args[1]), dtype_of(call.args[2])))
        elif _is_window(call):
            slot = self._fresh()
            self._window(slot, call)
        elif made in self._items and called not in self._kernels:
            self._several(made, call)
            return
        else:
            slot = self._fresh()
            target, args, kwargs = self._operator(call)
            returns = schema_of(target).returns
            if len(returns) != 1 or not isinstance(returns[0].type, torch.TensorType):
                raise Unrecognised(f"{shown(call)} does not make one tensor")
            self._made.append(CallOperator(Call(target, args, kwargs, (slot,))))
        self._name(name, slot)

    def _several(self, made: str, call: ast.Call) -> None:
        """A call whose result is taken apart."""
        target, args, kwargs = self._operator(call)
        returns = schema_of(target).returns
        wanted = self._items[made]
        if len(returns) == 1 and isinstance(returns[0].type, torch.ListType):
            count = 1 + max(wanted)
        elif max(wanted) < len(returns) and all(isinstance(returns[place].type, torch.TensorType) for place in wanted):
            count = len(returns)
        else:
            raise Unrecognised(f"{shown(call)} does not make tensors at {sorted(wanted)}")
        if made in self._seen or count < 2:
            raise Unrecognised(f"{made} is assigned twice, or an item of one")
        self._seen.add(made)
        self._results[made] = {place: self._fresh() for place in sorted(wanted)}
        outputs = tuple(self._results[made].get(place, -1) for place in range(count))
        self._made.append(CallOperator(Call(target, args, kwargs, outputs)))

    def _run(self, call: ast.Call) -> None:
        """A call of which nothing is kept."""
        called = dotted(call.func)
        if called == "args.clear":
            return
        if called in ("assert_size_stride", "assert_size_stride_grouped", "assert_tensor_metadata"):
            self._made += [Expect(self._slot(tensor), size, stride, dtype) for tensor, size, stride, dtype in _expected(called, call)]
        elif called in self._kernels:
            self._launch(called, call)
        else:
            target, args, kwargs = self._operator(call)
            self._made.append(CallOperator(Call(target, args, kwargs, (-1,) * len(schema_of(target).returns))))

    def _launch(self, name: str, call: ast.Call) -> None:
        kernel = self._kernels[name]
        if kernel.kind is not Kind.CPP or call.keywords or len(call.args) != len(kernel.parameters):
            raise Unrecognised(f"{name} is no C++ kernel of {len(call.args)} arguments")
        entry = entry_of(self._namespace.get(name), kernel.parameters, kernel.source)
        if isinstance(entry, str):
            raise Unrecognised(f"{name} {entry}")
        tensors = tuple(self._slot(argument) for argument in call.args)
        self._made.append(RunKernel(name, entry.address, tensors, entry.loaded))

    def _operator(self, call: ast.Call) -> tuple[str, tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
        called = dotted(call.func)
        owner, _, name = called.rpartition(".")
        args = list(call.args)
        if owner != "extern_kernels":
            target = operator_of(called, self._namespace)
        elif is_bias_addmm(name, self._namespace):
            target, args = "aten::addmm.out", [_row(args[0]), *args[1:]]
        else:
            target = library_of(name, self._namespace)
        kwargs = sorted((keyword.arg or "**", self._argument(keyword.value)) for keyword in call.keywords)
        given = tuple(self._argument(argument) for argument in args)
        _check(schema_of(target), len(given), [key for key, _ in kwargs], call)
        return target, given, tuple(kwargs)

    def _argument(self, expression: ast.expr) -> Argument:
        if isinstance(expression, ast.List | ast.Tuple):
            items = tuple(self._argument(item) for item in expression.elts)
            return Many(items)
        if isinstance(expression, ast.Name) and expression.id in self._names:
            return Ref(self._slot(expression))
        if isinstance(expression, ast.Subscript) or (isinstance(expression, ast.Call) and _is_window(expression)):
            return Ref(self._slot(expression))
        return literal_of(expression)


def _check(schema: Schema, positional: int, keywords: Sequence[str], call: ast.Call) -> None:
    """That every argument has its place in ``schema``, and nothing that must be given is missing."""
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    given = {*names[:positional], *keywords}
    known = {argument.name for argument in schema.arguments}
    needed = {argument.name for argument in schema.arguments if not argument.has_default_value()}
    if positional > len(names) or not given <= known or not needed <= given or set(names[:positional]) & set(keywords):
        raise Unrecognised(f"{shown(call)} has other arguments than {schema}")


def _expected(called: str, call: ast.Call) -> list[tuple[ast.expr, tuple[int, ...], tuple[int, ...], str]]:
    """What is asserted: of which tensors, and which size, strides and dtype; an empty dtype: of none."""
    match called, call.args:
        case "assert_size_stride", [tensor, size, stride, *_]:
            return [(tensor, integers(size), integers(stride), "")]
        # From PyTorch 2.14 on: of several inputs at once, and of what an operator made the dtype, too.
        case "assert_size_stride_grouped", [ast.Tuple(tensors), ast.Tuple(sizes), ast.Tuple(strides), _]:
            if len(tensors) == len(sizes) == len(strides):
                every = zip(tensors, sizes, strides, strict=True)
                return [(tensor, integers(size), integers(stride), "") for tensor, size, stride in every]
        case "assert_tensor_metadata", [tensor, size, stride, dtype, _]:
            return [(tensor, integers(size), integers(stride), dtype_of(dtype))]
    raise Unrecognised(f"{shown(call)} has no form that is known here")


def _row(bias: ast.expr) -> ast.expr:
    """What ``bias_addmm`` gives to ``addmm``: the first row of a bias that is one row, repeated."""
    if not isinstance(bias, ast.Call) or not _is_window(bias) or len(bias.args) != 4:
        raise Unrecognised(f"the shape of {shown(bias)} is not in the code")
    size, stride = integers(bias.args[1]), integers(bias.args[2])
    if not ((stride[0] == 0 and size[0] != 0) or size[0] == 1):
        return bias
    rest = [ast.parse(repr(item), mode="eval").body for item in (size[1:], stride[1:])]
    return ast.Call(bias.func, [bias.args[0], *rest, bias.args[3]], [])


def _is_window(call: ast.Call) -> bool:
    return dotted(call.func) == "reinterpret_tensor"


def _slot_number(expression: ast.expr) -> int | None:
    match expression:
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(number))) if name == _SLOTS:
            return number
    return None


def _items(statements: Sequence[ast.stmt]) -> dict[str, set[int]]:
    """For each name that is taken apart, the places that are used."""
    found: dict[str, set[int]] = {}
    for statement in statements:
        for node in ast.walk(statement):
            match node:
                case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(place))) if name != _SLOTS:
                    found.setdefault(name, set()).add(place)
    return found
