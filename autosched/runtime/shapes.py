"""The shapes a bundle was tuned for: what call each answers, what to call it, and the one dimension in which they differ."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from autosched.core.errors import UsageError
from autosched.core.program import Argument, Program, Ref

_MAX_NAMED = 4


def call_key(program: Program) -> Hashable:
    """Equal for two programs exactly if they answer the same call: containers, shapes, dtypes and plain values."""
    return program.input_tree, tuple(_leaf_key(program, leaf) for leaf in program.input_leaves)


def _leaf_key(program: Program, leaf: Argument) -> Hashable:
    if not isinstance(leaf, Ref):
        # Not the value alone: 1, 1.0 and True are equal in Python.
        return type(leaf).__name__, repr(leaf)
    spec = program.graph.values[leaf.value].spec
    return spec.shape, spec.dtype


def describe_shape(program: Program) -> str:
    """For people: the inputs' shapes and dtypes, such as ``[4, 3, 224, 224] float32``."""
    specs = [program.graph.values[value].spec for value in program.given]
    named = [f"{list(spec.shape)} {spec.dtype}" for spec in specs[:_MAX_NAMED]]
    if len(specs) > _MAX_NAMED:
        named.append(f"and {len(specs) - _MAX_NAMED} more")
    return ", ".join(named) if named else "no inputs"


def shape_name(program: Program) -> str:
    """What ``--shape`` takes: sizes of each input joined by ``x``, inputs joined by commas, such as ``4x3x224x224`` or ``1x8,1x8``."""
    return ",".join("x".join(map(str, program.graph.values[value].spec.shape)) or "scalar" for value in program.given)


def shape_names(programs: Sequence[Program]) -> list[str]:
    """The same of several. Those of the same sizes (plain values differ, or dtypes, or containers) are numbered: ``4x8:1``, ``4x8:2``."""
    names = [shape_name(program) for program in programs]
    return [name if names.count(name) == 1 else f"{name}:{names[:place].count(name) + 1}" for place, name in enumerate(names)]


@dataclass(frozen=True, slots=True)
class Buckets:
    """Programs that differ in one size only.

    Args:
        sizes: that size, for each program, in the order given; distinct.
        inputs: for each input of the graph the dimension that has this size, or ``None`` where it is the same in all programs.
        outputs: the same for each output of the graph.
    """

    sizes: tuple[int, ...]
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    def next_above(self, size: int) -> int | None:
        """The place of the smallest bucket that holds ``size``, or ``None``."""
        fitting = [(bucket, place) for place, bucket in enumerate(self.sizes) if bucket >= size]
        return min(fitting)[1] if fitting else None


def find_buckets(programs: Sequence[Program]) -> Buckets | str:
    """The one size in which programs differ, or why there is none."""
    if len(programs) < 2:
        return "it holds one shape; which dimension may be padded is learned from two or more"
    first = programs[0]
    if any(program.writes for program in programs):
        return "the model changes a buffer or an input, which rows that are added would change too"
    if any(_form(program) != _form(first) for program in programs):
        return "its shapes differ in more than sizes: in containers, plain values, dtypes or ranks"
    columns = [[program.graph.values[program.graph.inputs[place]].spec.shape for program in programs] for place in range(_count(first))]
    answers = [
        [program.graph.values[program.graph.outputs[place]].spec.shape for program in programs] for place in range(len(first.graph.outputs))
    ]
    sizes: tuple[int, ...] | None = None
    dimensions: list[list[int | None]] = [[], []]
    for side, shapes_of in enumerate((columns, answers)):
        for shapes in shapes_of:
            varying = [dimension for dimension, column in enumerate(zip(*shapes, strict=True)) if len(set(column)) > 1]
            if not varying:
                dimensions[side].append(None)
                continue
            found = tuple(shape[varying[0]] for shape in shapes)
            if len(varying) > 1 or (sizes is not None and found != sizes) or len(set(found)) < len(found):
                return "its shapes differ in more than one size"
            sizes = found
            dimensions[side].append(varying[0])
    if sizes is None or all(dimension is None for dimension in dimensions[0]):
        return "its shapes do not differ in the size of an input"
    return Buckets(sizes, tuple(dimensions[0]), tuple(dimensions[1]))


def _count(program: Program) -> int:
    return len(program.graph.inputs)


def _form(program: Program) -> Hashable:
    graph = program.graph
    # Which leaf is which input, whatever the value table numbers them.
    place = {value: index for index, value in enumerate(graph.inputs)}
    given = {value: index for index, value in enumerate(graph.outputs)}
    leaves = tuple(place[leaf.value] if isinstance(leaf, Ref) else (type(leaf).__name__, repr(leaf)) for leaf in program.input_leaves)
    result = tuple(given[leaf.value] if isinstance(leaf, Ref) else (type(leaf).__name__, repr(leaf)) for leaf in program.output_leaves)
    specs = [graph.values[value].spec for value in (*graph.inputs, *graph.outputs)]
    ranks = tuple((len(spec.shape), spec.dtype) for spec in specs)
    return program.input_tree, program.output_tree, leaves, result, len(graph.inputs), ranks


def choose_shapes(
    programs: Sequence[Program], batches: Sequence[int | None], *, shape: str | None = None, batch: int | None = None
) -> list[int]:
    """Places of the programs meant by a user's ``--shape`` or ``--batch``; all of them if neither is given.

    Args:
        batches: batch size each was tuned with, where it is known.
        shape: as :func:`shape_names` gives it, or its beginning up to a comma, or without its number for all of the same sizes.
        batch: a batch size; where none is recorded, the first size of the first input is taken for it.

    Raises:
        UsageError: if there is none, naming what there is.
    """
    names = shape_names(programs)
    found = list(range(len(programs)))
    if shape is not None:
        sizes = [shape_name(program) for program in programs]
        found = [place for place in found if shape in (names[place], sizes[place]) or sizes[place].startswith(shape + ",")]
    if batch is not None:
        found = [place for place in found if (batches[place] or _leading(programs[place])) == batch]
    if not found:
        asked = " ".join(f"{option} {value}" for option, value in (("--shape", shape), ("--batch", batch)) if value is not None)
        raise UsageError(f"the file has nothing for {asked}; it holds {'; '.join(names)}. Choose one of these, or tune for that one too.")
    return found


def _leading(program: Program) -> int | None:
    for value in program.given:
        shape = program.graph.values[value].spec.shape
        return shape[0] if shape else None
    return None
