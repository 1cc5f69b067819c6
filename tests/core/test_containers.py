"""Objects are taken apart and made again, without a line of their classes' own code and without an import."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from autosched.core.containers import objects_in, pack, pack_call, rebuild, unpack
from autosched.core.errors import UnsupportedGraph
from autosched.core.opened import OPENED, read_context

ran: list[str] = []


@dataclass
class Pair:
    left: Any
    right: Any = None


@dataclass(frozen=True, slots=True)
class Sealed:
    value: Any


@dataclass
class Noisy:
    value: Any
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ran.append("post_init")


class Plain:
    def __init__(self) -> None:
        self.value = torch.ones(1)


def through_text(tree: Any) -> Any:
    """As a bundle would bring it to another process."""
    leaves, spec = pytree.tree_flatten(pack(tree))
    return rebuild(pytree.treespec_loads(pytree.treespec_dumps(spec)), iter(leaves), {})


def test_what_has_no_objects_is_left_alone() -> None:
    tree = {"a": [torch.ones(1), torch.Size([1, 2])], 3: (None, "text")}
    assert pack(tree) is tree


def test_nested_dataclasses_come_back_as_they_were() -> None:
    value = torch.ones(2)
    tree = {("a", 1): Pair(Sealed([value]), torch.Size([3])), None: Sealed(2.5)}
    made = through_text(tree)
    assert list(made) == [("a", 1), None]
    assert (type(made["a", 1]), type(made["a", 1].right)) == (Pair, torch.Size)
    assert made["a", 1].left.value[0] is value
    assert made[None] == Sealed(2.5)


def test_no_code_of_a_class_runs() -> None:
    noisy = Noisy(torch.ones(1))
    ran.clear()
    assert type(through_text(noisy)) is Noisy
    assert ran == []


def test_attributes_beside_the_fields_would_be_lost_so_it_is_no_object_of_ours() -> None:
    pair = Pair(1)
    pair.extra = 2  # type: ignore[attr-defined]
    assert pack([pair])[0] is pair
    assert isinstance(pack([Plain()])[0], Plain)


def test_a_class_that_cannot_be_found_by_name_is_none_of_ours() -> None:
    @dataclass
    class Local:
        value: int

    local = Local(1)
    assert pack(local) is local


def context(kind: str, names: list[str], notes: Any = (), mark: Any = ()) -> str:
    return json.dumps([kind, names, notes, mark])


@pytest.mark.parametrize("kind", ["os.system", "antigravity.Missing", f"{__name__}.Plain", "torch.nn.Linear", "subprocess.Popen", "x", ""])
def test_a_file_cannot_name_any_other_class(kind: str) -> None:
    node = pytree.tree_unflatten([1], pytree.treespec_loads(_node(context(kind, ["value"]))))
    with pytest.raises(UnsupportedGraph, match="has not imported"):
        unpack(node)
    assert "antigravity" not in sys.modules


def test_a_file_cannot_give_a_dataclass_other_fields() -> None:
    node = pytree.tree_unflatten([1], pytree.treespec_loads(_node(context(f"{__name__}.Pair", ["left"]))))
    with pytest.raises(UnsupportedGraph, match="other fields"):
        unpack(node)


def _node(text: str) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": OPENED, "context": json.dumps(text), "children_spec": [leaf]}])


UNREADABLE = (
    None,
    "[]",
    "{}",
    context("a.B", ["x", "x"]),
    '["a.B", [1], [], []]',
    '["a.B", ["x"], [["x", "dtype"]], []]',
    context("a.B", ["x"], [], [-1]),
    context("a.B", ["x"], [], [True]),
    context("a.B", ["x"], [], [1, 1, 1]),
    context("dict", ["{}"]),
    context("dict", ["[" * 9000 + "]" * 9000]),
    context("dict", ["no json"]),
)


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_says_nothing_of_an_object_is_refused(text: str | None) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (its words are for InvalidGraph to say)
        read_context(text)


def test_objects_are_numbered_as_they_are_met() -> None:
    inner, last = Sealed(1), Pair(3)
    outer = Pair([inner], {"a": 1})
    call = ((outer,), {"last": last})
    assert [id(item) for item in objects_in(call)] == [id(outer), id(inner), id(last)]
    packed = pack_call(call)
    first = packed[0][0]
    assert [item.mark for item in (first, first.children[0][0], packed[1]["last"])] == [(0,), (1,), (2,)]
