"""Functions that Inductor wrote beside ``call``: a product taken apart along its inner dimension (``decompose_k``) is one, called once.

Its statements have the forms of those of ``call`` and names of their own, so they are put where it is called:

    product_args = [buf0, arg1_1]                def product(args):
    (buf4,) = product(product_args)                  product_arg0, product_arg1 = args

Nothing here imports torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

Functions = Mapping[str, ast.FunctionDef]


def inlined(body: Sequence[ast.stmt], functions: Functions) -> list[ast.stmt]:
    """``body`` with the statements of ``functions`` where it calls them; a call of another form stays as it is, and is nobody's to read."""
    given = {name: values for statement in body if (found := _list(statement)) is not None for name, values in [found]}
    taken: set[str] = set()
    made: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.With):
            made.append(ast.copy_location(ast.With(statement.items, inlined(statement.body, functions)), statement))
            continue
        call = _call(statement, functions)
        if call is not None and call[1] in given and (inside := _statements(*call[::2], given[call[1]])) is not None:
            taken.add(call[1])
            made += [ast.fix_missing_locations(ast.copy_location(item, statement)) for item in inside]
        else:
            made.append(statement)
    return [item for item in made if (found := _list(item)) is None or found[0] not in taken]


def _list(statement: ast.stmt) -> tuple[str, list[ast.expr]] | None:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.List(elts=values)):
            return name, values
    return None


def _call(statement: ast.stmt, functions: Functions) -> tuple[ast.FunctionDef, str, list[ast.expr]] | None:
    """The function, the name of the list that it is given, and what its results are assigned to."""
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=names)], value=ast.Call(func=ast.Name(id=called), args=[ast.Name(id=name)], keywords=[])
        ) if called in functions:
            return functions[called], name, names
    return None


def _statements(function: ast.FunctionDef, results: list[ast.expr], values: list[ast.expr]) -> list[ast.stmt] | None:
    *body, last = function.body
    match body[:1], last:
        case [ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args"))], ast.Return(value=ast.Tuple(elts=returned)):
            if len(names) == len(values) and len(returned) == len(results):
                return [*_assigned(names, values), *body[1:], *_assigned(results, returned)]
    return None


def _assigned(names: list[ast.expr], values: list[ast.expr]) -> Iterator[ast.stmt]:
    for name, value in zip(names, values, strict=True):
        yield ast.Assign([name], value)
