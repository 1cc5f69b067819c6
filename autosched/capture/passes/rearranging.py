"""On a CPU: numbers that only change places between two operators are copied once at most, and what lies side by side stays so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from autosched.capture.arrangement import Arrangement, arrangement_of
from autosched.capture.draft import Draft, Node
from autosched.capture.passes.identities import COPIES
from autosched.capture.passes.output_layout import format_of
from autosched.capture.passes.views import RESHAPES, depends_on_strides, loosen_views
from autosched.capture.region_kinds import is_anchor
from autosched.capture.traffic import is_view
from autosched.core.graph import TensorSpec
from autosched.core.program import Ref

aten = torch.ops.aten
_OTHER_SHAPES = frozenset((*RESHAPES, "aten::flatten.using_ints", "aten::unflatten.int", "aten::unsqueeze.default", "aten::squeeze.dim"))
_TURNS = ("aten::permute.default", "aten::transpose.int", "aten::t.default")
_SHUFFLE = aten.native_channel_shuffle.default
# It has none for all numbers of eight bits, nor for all unsigned integers.
_SHUFFLED = ("float32", "float64", "bfloat16", "float16")
_CHANNELS_LAST = [0, 2, 3, 1]


def join_rearrangements(draft: Draft) -> int:
    """Chains of reshapes, permutations and copies become one copy, or a view where that is enough.

    Patches of pixels become tokens, say, and tokens patches, by several copies, and the last leaves the channels apart. Each dimension of
    what a chain reads is split into factors, such as rows of patches and rows of one patch, and all that the chain does is to put these
    into another order. Where the innermost factor is part of the last dimension of the result, or of the channels of a picture, that
    dimension lies innermost after the one copy: whole runs of numbers move, linear layers read rows, packed convolutions channels last.
    Elsewhere, the result of several copies is laid out as it was. A shuffle of channels is PyTorch's own call.

    Results lie otherwise than they did, so that ``view`` becomes ``reshape``. Returns the number of chains, 0 where more bytes would be
    copied in all.
    """
    chains = _chains(draft)
    if not any(_copies(node, draft) for chain in chains for node in chain) or depends_on_strides(draft):
        return 0
    trial = draft.copy()
    loosen_views(trial)
    walk = _Walk(trial, {chain[0].outputs[0]: chain for chain in chains})
    trial.observe(walk.before)
    trial.substitute(walk.same)
    trial.remove_dead()
    if not walk.joined or _bytes_copied(trial) > _bytes_copied(draft):
        return 0
    draft.nodes, draft.next_value = trial.nodes, trial.next_value
    draft.specs, draft.storage = trial.specs, trial.storage
    return walk.joined


def _chains(draft: Draft) -> list[list[Node]]:
    """Calls that only rearrange, each but the first the only reader of the one before.

    Not those whose memory leaves the model or changes in place: its owner expects it to be shared, or not to be.
    """
    users, outputs = draft.users(), set(draft.output_values())
    leaving, written = draft.leaving(), draft.written()
    found: list[list[Node]] = []
    inside: set[Node] = set()
    for node in draft.nodes:
        if node in inside or not _rearranges(node):
            continue
        chain = [node]
        while (made := chain[-1].outputs[0]) not in outputs and len(after := users.get(made, [])) == 1 and _rearranges(after[0]):
            chain.append(after[0])
        inside.update(chain)
        if draft.storage[made] not in leaving and not {draft.storage[value] for value in (*node.reads(), made)} & written:
            found.append(chain)
    return found


def _rearranges(node: Node) -> bool:
    if node.target in COPIES:
        return node.argument("memory_format") is torch.contiguous_format
    return node.target in _OTHER_SHAPES or node.target in _TURNS


def _copies(node: Node, draft: Draft) -> bool:
    return draft.storage[node.outputs[0]] == node.outputs[0]


def _bytes_copied(draft: Draft) -> int:
    rearranging = (node for node in draft.nodes if _rearranges(node) or node.op is _SHUFFLE)
    return sum(draft.specs[node.outputs[0]].bytes for node in rearranging if _copies(node, draft))


class _Walk:
    """Decides on each chain before its first call, when it is known how what that reads lies.

    Args:
        draft: to be observed anew.
        chains: by what their first call makes.
    """

    def __init__(self, draft: Draft, chains: Mapping[int, Sequence[Node]]) -> None:
        self._draft = draft
        self._chains = chains
        self._shapes = {value: spec.shape for value, spec in draft.specs.items()}
        self._multiplied = _multiplied(draft)
        self._mapping: dict[int, int] = {}
        # Calls that change nothing: observing lets go of what was read for the last time.
        self.same: dict[int, int] = {}
        self.joined = 0

    def before(self, node: Node) -> Sequence[Node]:
        """Calls to run before ``node``; those after it read what they make."""
        node.substitute(self._mapping)
        chain = self._chains.get(node.outputs[0]) if node.outputs else None
        if chain is None:
            return ()
        [source], made = node.reads(), chain[-1].outputs[0]
        spec = self._draft.specs[source]
        arranged = self._arranged(spec, chain)
        if arranged is None or not arranged.copied:
            return ()
        order = self._order(arranged, made)
        once_more = int(not arranged.lay(order))
        if once_more == arranged.copied and arranged.lies(order):
            return ()
        emitted = _Emitted(self._draft, chain[-1], source)
        emitted.emit_all(arranged, order, spec)
        if not emitted.nodes:
            self.same[emitted.keep()] = source
        self._mapping[made] = emitted.value
        self.joined += 1
        return emitted.nodes

    def _arranged(self, spec: TensorSpec, chain: Sequence[Node]) -> Arrangement | None:
        arranged = arrangement_of(spec)
        for node in chain:
            if arranged is None:
                return None
            rank = len(arranged.dimensions)
            if node.target in _TURNS:
                arranged = arranged.permuted(_order_of(node, rank))
            elif node.target in _OTHER_SHAPES:
                arranged = arranged.reshaped(self._shapes[node.outputs[0]])
            elif node.kind == "aten::clone" or not arranged.lies(range(rank)):
                arranged = arranged.cloned()
        return arranged

    def _order(self, arranged: Arrangement, made: int) -> list[int]:
        """In which the dimensions of the result should lie."""
        inner = [any(factor.origin == 1 for factor in dimension) for dimension in arranged.dimensions]
        if inner and inner[-1]:
            return list(range(len(inner)))
        return _CHANNELS_LAST if len(inner) == 4 and inner[1] and made not in self._multiplied else arranged.order()


def _order_of(node: Node, rank: int) -> list[int]:
    """The dimensions that a turn of a tensor of that many reads, in order."""
    order = list(range(rank))
    if node.target == "aten::t.default":
        return order[::-1]
    if node.target == "aten::transpose.int":
        one, other = node.argument("dim0"), node.argument("dim1")
        assert isinstance(one, int)
        assert isinstance(other, int)
        order[one], order[other] = order[other], order[one]
        return order
    dims = node.argument("dims")
    assert isinstance(dims, list)
    return [order[dim] for dim in dims]


def _multiplied(draft: Draft) -> set[int]:
    """What matrix products and attention read, also through views and copies: they want matrices, not pictures."""
    found: set[int] = set()
    for node in reversed(draft.nodes):
        hands_on = is_view(node, draft.storage) or _rearranges(node)
        if (is_anchor(node) and "conv" not in node.kind) or (hands_on and found.intersection(node.outputs)):
            found.update(node.reads())
    return found


class _Emitted:
    """Calls that rearrange a value."""

    def __init__(self, draft: Draft, node: Node, source: int) -> None:
        self._draft, self._node = draft, node
        self._shape = list(draft.specs[source].shape)
        self.value = source
        self.nodes: list[Node] = []

    def emit_all(self, arranged: Arrangement, order: list[int], spec: TensorSpec) -> None:
        """What makes ``arranged`` of the value, which ``spec`` describes, with its dimensions lying in that order."""
        if order == _CHANNELS_LAST and (groups := _groups(arranged, spec)):
            self._emit(_SHUFFLE, groups)
            return
        wanted = arranged.factors(order)
        rows = sorted(wanted, key=lambda factor: -factor.step)
        self._reshape([factor.size for factor in rows])
        self._permute([rows.index(factor) for factor in wanted])
        if not arranged.lay(order):
            self._emit(aten.clone.default, memory_format=torch.contiguous_format)
        shape = arranged.shape()
        self._reshape([shape[place] for place in order])
        self._permute([order.index(place) for place in range(len(order))])

    def keep(self) -> int:
        """The value as it is, under a name of its own."""
        self._emit(aten.reshape.default, self._shape)
        return self.value

    def _reshape(self, shape: list[int]) -> None:
        if shape != self._shape:
            self._emit(aten.reshape.default, shape)
            self._shape = shape

    def _permute(self, order: list[int]) -> None:
        if order != sorted(order):
            self._emit(aten.permute.default, order)
            self._shape = [self._shape[place] for place in order]

    def _emit(self, op: OpOverload[..., Any], *args: object, **kwargs: object) -> None:
        made = self._draft.fresh()
        self.nodes.append(Node(op, (Ref(self.value), *args), kwargs, (made,), f"{self._node.name}_joined", self._node.source))
        self.value = made


def _groups(arranged: Arrangement, source: TensorSpec) -> int:
    """How many, if ``arranged`` is a picture that is channels last with its channels shuffled; 0 if it is something else."""
    before, channels = arrangement_of(source), arranged.dimensions[1]
    if source.dtype not in _SHUFFLED:
        return 0
    if before is None or format_of(source) is not torch.channels_last or len(channels) != 2 or arranged.shape() != list(source.shape):
        return 0
    batch, count, height, width = source.shape
    groups = channels[1].size
    split = before.reshaped((batch, groups, count // groups, height, width))
    steps = [factor.step for factor in arranged.factors(range(4))]
    return groups if split is not None and steps == [factor.step for factor in split.factors((0, 2, 1, 3, 4))] else 0
