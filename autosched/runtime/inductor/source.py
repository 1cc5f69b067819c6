"""Read a module that Inductor wrote: the flat list of its launches, as text, without running it.

The body of a generated ``call`` is straight-line code over a handful of statement forms: unpack the arguments, allocate
(``empty_strided_*``), view (``reinterpret_tensor``), launch (a C++ kernel, ``triton_*.run``, ``extern_kernels.*``, an operator), take an
item of a result, assert, delete, return. Each form that was seen in PyTorch 2.11, 2.13 and 2.15 is known here (streams are named, sizes
asserted and inputs aligned otherwise in each); anything else, and any control flow, is :class:`Unrecognised` with the line. Reading the
text was chosen over recording one run with stand-ins for the kernels, because it says which view of which buffer every argument is, and
because a statement that is moved as a whole cannot lose an argument; what it says about aliases is checked afterwards by running
(``audit.audit_run``).

Nothing here imports torch.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from autosched.runtime.inductor.subgraphs import inlined

_ASSERTS = ("assert_size_stride", "assert_size_stride_grouped", "assert_tensor_metadata", "assert_alignment")
_CONTROL = (ast.For, ast.While, ast.If, ast.Try, ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.Yield, ast.Await)


class Unrecognised(Exception):
    """The generated code has a form that is not known here; the message says which. Never leaves the ``inductor_*`` files."""


class Kind(enum.StrEnum):
    """What a launch calls."""

    CPP = "cpp"  # a kernel in C++, given the tensors themselves
    TRITON = "triton"  # a Triton kernel, on a stream
    EXTERN = "extern"  # a library kernel with an output argument
    OPERATOR = "operator"  # an operator of PyTorch


@dataclass(frozen=True, slots=True)
class View:
    """A window on ``base``: sizes and strides in elements, ``offset`` from the first element of ``base``; ``None`` sizes: all of it."""

    base: str
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel defined in the module: what each of its arguments is, and its source.

    ``parameters`` are argument types for C++ (``const float*``), argument names for Triton (``in_ptr0``).
    """

    kind: Kind
    parameters: tuple[str, ...]
    changed: frozenset[str]
    source: str


@dataclass(frozen=True)
class Launch:
    """One statement that computes.

    Args:
        kind: what is called.
        callee: its dotted name, without ``.run``.
        call: the call expression.
        made: the name its result is given, or empty.
        line: number in the source.
    """

    kind: Kind
    callee: str
    call: ast.Call
    made: str
    line: int


@dataclass
class Module:
    """A generated module, read.

    Args:
        arguments: names that ``call`` unpacks its argument into, in order.
        kernels: kernels by name.
        allocations: buffer name -> the expression that allocates it.
        views: name -> the expression it stands for (a view, or another name).
        items: name -> (name of a launch's result, place in it).
        streams: name -> the expression that asks for the current stream.
        launches: in order.
        returned: the expressions returned.
        devices: indices of the devices whose guards surround the code.
    """

    arguments: list[str] = field(default_factory=list)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    allocations: dict[str, ast.Call] = field(default_factory=dict)
    views: dict[str, ast.expr] = field(default_factory=dict)
    items: dict[str, tuple[str, int]] = field(default_factory=dict)
    streams: dict[str, ast.expr] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    returned: list[ast.expr] = field(default_factory=list)
    devices: set[int] = field(default_factory=set)

    def tensors(self, expression: ast.AST, known: frozenset[str]) -> Iterator[View]:
        """Every tensor in ``expression``, as a view of an argument, an allocation, a result, an item, or one of ``known`` (constants)."""
        if isinstance(expression, ast.Call) and dotted(expression.func).endswith("reinterpret_tensor"):
            yield self.view(expression, known)
            return
        if isinstance(expression, ast.Name):
            if self.is_tensor(expression.id, known):
                yield self.view(expression, known)
            return
        for child in ast.iter_child_nodes(expression):
            yield from self.tensors(child, known)

    def is_tensor(self, name: str, known: frozenset[str]) -> bool:
        """Whether ``name`` is a tensor of ``call``, or one of ``known``."""
        tables = (self.allocations, self.views, self.items, known, self.results, self.arguments)
        return any(name in table for table in tables)

    @property
    def results(self) -> set[str]:
        """Names of what launches return."""
        return {launch.made for launch in self.launches if launch.made}

    def view(self, expression: ast.expr, known: frozenset[str]) -> View:
        """What ``expression`` shows of which buffer.

        Raises:
            Unrecognised: if it is no view.
        """
        if isinstance(expression, ast.Name):
            if expression.id in self.views:
                return self.view(self.views[expression.id], known)
            if self.is_tensor(expression.id, known):
                return View(expression.id)
        elif isinstance(expression, ast.Call) and dotted(expression.func).endswith("reinterpret_tensor") and len(expression.args) >= 3:
            inner = self.view(expression.args[0], known)
            size, stride = integers(expression.args[1]), integers(expression.args[2])
            offset = integer(expression.args[3]) if len(expression.args) > 3 else 0
            return View(inner.base, size, stride, inner.offset + offset)
        raise Unrecognised(f"{shown(expression)} is not a tensor that is known here")


def read_module(source: str) -> Module:
    """Take the text of a generated module apart.

    Raises:
        Unrecognised: naming the line that is in no known form.
    """
    kernels, body = parse_module(source)
    module = Module(kernels=kernels)
    _read_body(module, body)
    if not module.returned and not body:
        raise Unrecognised("the generated 'call' is empty")
    return module


def parse_module(source: str) -> tuple[dict[str, Kernel], list[ast.stmt]]:
    """The kernels of a generated module, and the statements of its ``call``.

    Raises:
        Unrecognised: if it is no module of one straight ``call``.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise Unrecognised(f"the generated module is not Python: {error}") from error
    kernels: dict[str, Kernel] = {}
    calls: list[ast.FunctionDef] = []
    functions: dict[str, ast.FunctionDef] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "call":
            calls.append(statement)
        elif isinstance(statement, ast.FunctionDef):
            functions[statement.name] = statement
        elif isinstance(statement, ast.ClassDef) and statement.name == "Runner":
            raise Unrecognised("the generated module is partitioned (it has a class Runner)")
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
            kernel = _kernel(statement.value)
            if kernel is not None:
                kernels[statement.targets[0].id] = kernel
    if len(calls) != 1:
        raise Unrecognised(f"the generated module has {len(calls)} functions called 'call'; expected one")
    return kernels, inlined(calls[0].body, functions)


def _read_body(module: Module, body: list[ast.stmt]) -> None:
    for statement in body:
        if module.returned:
            raise Unrecognised(f"line {statement.lineno}: code after the return")
        if any(isinstance(node, _CONTROL) for node in ast.walk(statement)):
            raise _unknown(statement)
        match statement:
            case ast.With(items=[ast.withitem(context_expr=ast.Call() as guard, optional_vars=None)]):
                if not dotted(guard.func).endswith("_DeviceGuard"):
                    raise _unknown(statement)
                module.devices.add(integer(guard.args[0]))
                _read_body(module, statement.body)
            case ast.Delete() | ast.Assert() | ast.Pass():
                continue
            case ast.Return(value=ast.Tuple() | ast.List() as returned):
                module.returned = list(returned.elts)
            case ast.Assign(targets=[ast.Tuple() | ast.List() as names], value=ast.Name(id="args")):
                module.arguments = [name.id for name in names.elts if isinstance(name, ast.Name)]
                if len(module.arguments) != len(names.elts):
                    raise _unknown(statement)
            case ast.Assign(targets=[ast.Name(id=name)]):
                _read_assignment(module, name, statement.value, statement)
            case ast.Expr(value=ast.Call() as call):
                _read_call(module, call, statement)
            case ast.Expr(value=ast.Constant()):
                continue
            case _:
                raise _unknown(statement)


def _read_assignment(module: Module, name: str, value: ast.expr, statement: ast.stmt) -> None:
    tables = (module.allocations, module.views, module.items, module.results, module.arguments, module.streams)
    again = any(name in table for table in tables)
    if isinstance(value, ast.Call):
        called = dotted(value.func)
        last = called.rpartition(".")[2]
        if last == "get_raw_stream":
            module.streams[name] = value
            return
        if last == "copy_if_misaligned" and name in module.arguments and [ast.unparse(item) for item in value.args] == [name]:
            # PyTorch 2.13, on a GPU; 2.11 has it around the code, where it is left out as well. Inputs are copied to memory that begins
            # where an allocator says, and of a constant that begins elsewhere in its storage Inductor knows when it compiles; what is
            # overwritten where it lies must begin so, too (``cuda.in_place``).
            return
        if again:
            raise Unrecognised(f"line {statement.lineno}: {name} is assigned twice")
        if last.startswith("empty_strided"):
            module.allocations[name] = value
        elif last == "reinterpret_tensor":
            module.views[name] = value
        else:
            module.launches.append(_launch(module, value, name, statement))
        return
    if again:
        raise Unrecognised(f"line {statement.lineno}: {name} is assigned twice")
    match value:
        case ast.Name():
            module.views[name] = value
        case ast.Subscript(value=ast.Name(id=source), slice=ast.Constant(value=int(place))) if source in module.results:
            module.items[name] = (source, place)
        case _:
            raise _unknown(statement)


def _read_call(module: Module, call: ast.Call, statement: ast.stmt) -> None:
    called = dotted(call.func)
    if called in _ASSERTS or called == "args.clear" or called.endswith(".set_device"):
        return
    module.launches.append(_launch(module, call, "", statement))


def _launch(module: Module, call: ast.Call, made: str, statement: ast.stmt) -> Launch:
    called = dotted(call.func)
    owner, _, method = called.rpartition(".")
    if called in module.kernels and module.kernels[called].kind is Kind.CPP and not made:
        kind = Kind.CPP
    elif method == "run" and owner in module.kernels and module.kernels[owner].kind is Kind.TRITON and not made:
        kind, called = Kind.TRITON, owner
    elif owner == "extern_kernels":
        kind = Kind.EXTERN
    elif called.startswith(("torch.ops.", "aten.", "inductor_ops.", "_quantized.")):
        kind = Kind.OPERATOR
    elif method.endswith("_") and not method.startswith("_") and module.is_tensor(owner, frozenset()) and not made:
        # workspace_0.zero_()
        kind = Kind.OPERATOR
    else:
        raise _unknown(statement)
    return Launch(kind, called, call, made, statement.lineno)


def _kernel(value: ast.expr) -> Kernel | None:
    """The kernel that ``async_compile.cpp_pybinding(types, source)`` or ``async_compile.triton(name, source, ...)`` defines."""
    if not isinstance(value, ast.Call) or len(value.args) < 2 or not isinstance(value.args[1], ast.Constant):
        return None
    called, source = dotted(value.func), value.args[1].value
    if not isinstance(source, str):
        return None
    if called.endswith(".cpp_pybinding") and isinstance(value.args[0], ast.List):
        types = tuple(str(item.value) for item in value.args[0].elts if isinstance(item, ast.Constant))
        return Kernel(Kind.CPP, types, frozenset(), source) if len(types) == len(value.args[0].elts) else None
    if called.endswith(".triton") and isinstance(value.args[0], ast.Constant):
        return _triton_kernel(str(value.args[0].value), source)
    return None


def _triton_kernel(name: str, source: str) -> Kernel | None:
    try:
        tree = ast.parse(source.strip())
    except SyntaxError:
        return None
    functions = [item for item in tree.body if isinstance(item, ast.FunctionDef)]
    # Helper functions may stand beside the kernel; it is the one under its name, or the one with the heuristics.
    decorated = [item for item in functions if any("triton_heuristics." in ast.unparse(part) for part in item.decorator_list)]
    found = next((item for item in functions if item.name == name), decorated[0] if len(decorated) == 1 else None)
    if found is None:
        return None
    changed: set[str] = set()
    for decorator in found.decorator_list:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Dict):
                for key, item in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "mutated_arg_names" and isinstance(item, ast.List | ast.Tuple):
                        changed |= {str(entry.value) for entry in item.elts if isinstance(entry, ast.Constant)}
    return Kernel(Kind.TRITON, tuple(argument.arg for argument in found.args.args), frozenset(changed), source)


def dotted(expression: ast.expr) -> str:
    """``a.b.c`` of an attribute chain, or an empty string."""
    parts: list[str] = []
    while isinstance(expression, ast.Attribute):
        parts.append(expression.attr)
        expression = expression.value
    if not isinstance(expression, ast.Name):
        return ""
    return ".".join([expression.id, *reversed(parts)])


def integers(expression: ast.expr) -> tuple[int, ...]:
    """The integers of a tuple that is written out.

    Raises:
        Unrecognised: if it is anything else.
    """
    if not isinstance(expression, ast.Tuple | ast.List):
        raise Unrecognised(f"{shown(expression)} is not a tuple of integers")
    return tuple(integer(item) for item in expression.elts)


def integer(expression: ast.expr) -> int:
    """An integer that is written out.

    Raises:
        Unrecognised: if it is anything else.
    """
    try:
        found = ast.literal_eval(expression)
    except (ValueError, TypeError):
        found = None
    if not isinstance(found, int):
        raise Unrecognised(f"{shown(expression)} is not an integer (shapes must be static)")
    return found


def _unknown(statement: ast.stmt) -> Unrecognised:
    return Unrecognised(f"line {statement.lineno}: {shown(statement)} has no form that is known here")


def shown(node: ast.AST) -> str:
    """The code of ``node`` for a message: its first line, quoted, cut at 80 characters."""
    text = ast.unparse(node).splitlines()[0]
    return repr(text if len(text) <= 80 else text[:77] + "...")
