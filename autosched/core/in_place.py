"""Which write-backs of a program may be done in the very memory that they change, as far as the program alone can tell.

The graph changes nothing: an operator makes a whole new cache of the old one, and the new one is copied back when the run has succeeded.
Where the new one is made from the old one by a *chain* of calls that PyTorch has in-place forms of, the old memory may be overwritten
instead, so that nothing is made and nothing is copied back. Code that a compiler wrote for the whole graph overwrites a copy of its own
accord (:func:`copy_target`); there it is the copy that is left out. Whether every reader of the old contents comes before that is up to
the plan: ``runtime.in_place`` asks it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from autosched.core.graph import OpGraph, ValueRole
from autosched.core.program import Call, Program, Ref, WriteBack


class Manner(enum.StrEnum):
    """How a call's in-place form treats what was there."""

    PLACES = "places"  # what it writes depends on its other arguments alone: done twice is done once
    UPDATES = "updates"  # what it writes depends on what was there


_PLACES = frozenset(
    f"aten::{name}"
    for name in (
        "copy.default", "diagonal_scatter.default", "fill.Scalar", "fill.Tensor", "index_copy.default", "index_fill.int_Scalar",
        "index_fill.int_Tensor", "index_put.default", "masked_fill.Scalar", "masked_fill.Tensor", "masked_scatter.default", "scatter.src",
        "scatter.value", "select_scatter.default", "slice_scatter.default", "zero.default",
    )
)  # fmt: skip
_UPDATES = frozenset(
    f"aten::{name}"
    for name in (
        "add.Scalar", "add.Tensor", "addcdiv.default", "addcmul.default", "clamp.default", "clamp_max.default", "clamp_min.default",
        "div.Scalar", "div.Tensor", "exp.default", "index_add.default", "lerp.Scalar", "lerp.Tensor", "mul.Scalar", "mul.Tensor",
        "neg.default", "relu.default", "scatter_add.default", "scatter_reduce.two",
        "sigmoid.default", "sqrt.default", "sub.Scalar", "sub.Tensor", "tanh.default",
    )
)  # fmt: skip
_ACCUMULATES = "aten::index_put.default"
_FILLS = frozenset(f"aten::{name}" for name in ("copy.default", "fill.Scalar", "fill.Tensor", "zero.default"))
_MARK = "+in_place"


def copy_target(manner: Manner) -> str:
    """The call of a compiled program that copies what the launches after it overwrite; ``manner`` is that of all of them together.

    In place it copies nothing: the launches then overwrite the memory itself.

    >>> manner_of(Call(copy_target(Manner.UPDATES), (Ref(0),), (), (1,)))
    <Manner.UPDATES: 'updates'>
    """
    return f"inductor::copy.{manner}"


_COPIES = {copy_target(manner): manner for manner in Manner}


def manner_of(call: Call) -> Manner | None:
    """How the call's in-place form treats its first argument; None if it has none that is used here.

    >>> manner_of(Call("aten::index_copy.default", (Ref(0), 0, Ref(1), Ref(2)), (), (3,)))
    <Manner.PLACES: 'places'>
    """
    if (copied := _COPIES.get(call.target)) is not None:
        return copied
    if call.target == _ACCUMULATES:
        given = [*call.args[3:4], *(argument for name, argument in call.kwargs if name == "accumulate")]
        return Manner.UPDATES if any(given) else Manner.PLACES
    if call.target in _PLACES:
        return Manner.PLACES
    return Manner.UPDATES if call.target in _UPDATES else None


@dataclass(frozen=True, slots=True)
class Link:
    """One call of a chain.

    Args:
        operator, call: where it stands.
        before: the value whose memory it overwrites.
        after: the value it makes, which then has that memory.
    """

    operator: int
    call: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A write-back that may be done in place.

    Args:
        write: which of ``program.writes``.
        links: from the input that is changed to the value that is written back.
        repeatable: whether a second run from what the first one left gives the same: all calls place, and nothing else reads what was
            there before the last of them. Such a run may be timed again and again without its input being restored.
    """

    write: int
    links: tuple[Link, ...]
    repeatable: bool


def is_copy(call: Call) -> bool:
    """Whether it is one of :func:`copy_target`."""
    return call.target in _COPIES


def chains_of(program: Program) -> tuple[Chain, ...]:
    """The write-backs of a program that some plan may do in place, in their order."""
    return chains_in(program.graph, program.writes)


def chains_in(graph: OpGraph, writes: Sequence[WriteBack]) -> tuple[Chain, ...]:
    """As :func:`chains_of`, of a graph and its write-backs."""
    if not writes or any("as_strided" in call.target for operator in graph.operators for call in operator.calls):
        # What addresses memory from the start of a storage finds another one there.
        return ()
    maker = {
        value: (operator.index, place)
        for operator in graph.operators
        for place, call in enumerate(operator.calls)
        for value in call.outputs
        if value >= 0
    }
    found = (_chain(graph, writes, index, maker) for index in range(len(writes)))
    return tuple(chain for chain in found if chain is not None)


def others_using(graph: OpGraph, link: Link) -> tuple[int, ...]:
    """The operators, other than the link's own, that read or make anything in the memory that it overwrites: all must come before it."""
    used = graph.storage_uses.get(graph.values[link.before].storage, ())
    return tuple(operator for operator in used if operator != link.operator)


def in_graph_order(graph: OpGraph, chain: Chain) -> bool:
    """Whether everything that must come before the chain's links does where operators run in the graph's own order."""
    return all(other < min(overwriting(graph, link), default=other) for link in chain.links for other in others_using(graph, link))


def overwriting(graph: OpGraph, link: Link) -> tuple[int, ...]:
    """The operators that overwrite the link's memory: its own, or where that is a copy, those that change the copy."""
    if not is_copy(graph.operators[link.operator].calls[link.call]):
        return (link.operator,)
    # Asked for every plan, and most operators change nothing.
    return tuple(operator.index for operator in graph.operators if operator.mutates and link.after in _changed(graph, operator.index))


def outputs_overwritten(graph: OpGraph, chains: Sequence[Chain]) -> dict[int, int]:
    """Outputs of the graph, by place, that are an input's memory when ``chains`` are done in place, and the place of that input.

    Views of such memory are not among them.
    """
    inputs = {value: place for place, value in enumerate(graph.inputs)}
    homes = {chain.links[-1].after: inputs[chain.links[0].before] for chain in chains}
    return {place: homes[value] for place, value in enumerate(graph.outputs) if value in homes}


def in_place_signature(signature: str) -> str:
    """Under what name measurements of an operator that runs in place are kept.

    >>> in_place_signature("ab12"), in_place_signature("ab12+in_place")
    ('ab12+in_place', 'ab12+in_place')
    """
    return signature if signature.endswith(_MARK) else f"{signature}{_MARK}"


def _chain(graph: OpGraph, writes: Sequence[WriteBack], index: int, maker: dict[int, tuple[int, int]]) -> Chain | None:
    links = _links(graph, writes[index], maker)
    if not links:
        return None
    values, final = graph.values, writes[index].value
    # The memory as it was before the last link: nothing of that outlives the run.
    old = {values[link.before].storage for link in links}
    storages = old | {final}
    leaving = {values[value].storage for value in graph.outputs}
    elsewhere = {values[other.value].storage for place, other in enumerate(writes) if place != index}
    copied = is_copy(graph.operators[links[-1].operator].calls[links[-1].call])
    # Only what is a copy may be changed by others.
    fixed = old if copied else storages
    if old & leaving or storages & elsewhere or any(fixed & _changed(graph, operator) for operator in range(len(graph))):
        return None
    if not all(_alone_in_its_operator(graph, link, storages) for link in links):
        return None
    return Chain(index, links, _repeatable(graph, links, old))


def _links(graph: OpGraph, write: WriteBack, maker: dict[int, tuple[int, int]]) -> tuple[Link, ...]:
    """From the target to the value, or nothing if it is made otherwise."""
    values, spec = graph.values, graph.values[write.target].spec
    links: list[Link] = []
    after = write.value
    while after != write.target:
        if after not in maker or values[after].storage != after or values[after].spec != spec:
            return ()
        operator, place = maker[after]
        call = graph.operators[operator].calls[place]
        first = call.args[0] if call.args else None
        if call.outputs != (after,) or manner_of(call) is None or not isinstance(first, Ref):
            return ()
        links.append(Link(operator, place, first.value, after))
        after = first.value
    if values[write.target].storage != write.target or values[write.target].role is not ValueRole.INPUT:
        return ()
    return tuple(reversed(links))


def _changed(graph: OpGraph, operator: int) -> set[int]:
    return {graph.values[value].storage for value in graph.operators[operator].mutates}


def _alone_in_its_operator(graph: OpGraph, link: Link, storages: set[int]) -> bool:
    """Whether its call reads nothing of the chain but what it overwrites, and no later call of its operator reads what was there."""
    values, calls = graph.values, graph.operators[link.operator].calls
    others = list(calls[link.call].tensors())
    others.remove(link.before)
    if any(values[value].storage in storages for value in others):
        return False
    old = values[link.before].storage
    return not any(values[value].storage == old for call in calls[link.call + 1 :] for value in call.reads())


def _repeatable(graph: OpGraph, links: Sequence[Link], old: set[int]) -> bool:
    own = {(link.operator, link.call) for link in links}
    for operator in graph.operators:
        for place, call in enumerate(operator.calls):
            if (operator.index, place) in own:
                if manner_of(call) is not Manner.PLACES:
                    return False
            elif _reads_contents(graph, call, old):
                return False
    return True


def _reads_contents(graph: OpGraph, call: Call, storages: set[int]) -> bool:
    values = graph.values
    read = [value for value in call.tensors() if values[value].storage in storages]
    made = [value for value in call.outputs if value >= 0]
    if call.target in _FILLS and read and call.args[0] == Ref(read[0]):
        # Of its first argument it wants the form alone.
        read = read[1:]
    return bool(read) and not (made and all(values[value].storage in storages for value in made))
