"""In what the nested containers of a call differ from those that a schedule was made for, as a sentence."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

from torch.utils import _pytree as pytree

from autosched.core.containers import Opened
from autosched.core.opened import DICTIONARY, read_context

_MOST_KEYS = 8  # said of one dictionary


def difference_of_calls(given: pytree.TreeSpec, expected: pytree.TreeSpec) -> str:
    """The first difference, without a full stop; an empty string if there is none.

    Args:
        given, expected: structures of ``(args, kwargs)``, objects packed (``core.containers.pack_call``).
    """
    (args, kwargs), (wanted_args, wanted_kwargs) = given.children(), expected.children()
    count, wanted_count = len(args.children()), len(wanted_args.children())
    names, wanted_names = list(kwargs.context), list(wanted_kwargs.context)
    if (count, names) != (wanted_count, wanted_names):
        return f"the call has {_arguments(count, names)}; the schedule was made for {_arguments(wanted_count, wanted_names)}"
    places = [*(f"argument {place}" for place in range(count)), *(f"argument {name!r}" for name in names)]
    mine, theirs = ([*one.children(), *other.children()] for one, other in ((args, kwargs), (wanted_args, wanted_kwargs)))
    return next((found for place, *pair in zip(places, mine, theirs, strict=True) if (found := _difference(place, *pair))), "")


def place_of(spec: pytree.TreeSpec, position: int) -> str:
    """Where in a call a leaf is, empty for one that is an argument by position itself.

    Args:
        spec: as in :func:`difference_of_calls`.
        position: among its leaves.
    """
    by_position, kwargs = spec.children()
    names = [f"argument {place}" for place in range(len(by_position.children()))]
    names += [f"argument {name!r}" for name in kwargs.context]
    place, labelled = "", list(zip(names, [*by_position.children(), *kwargs.children()], strict=True))
    while labelled:
        label, node = labelled.pop(0)
        if position >= node.num_leaves:
            position -= node.num_leaves
            continue
        place += label
        labelled = list(zip(_labels(node), node.children(), strict=True))
    return "" if place in names[: len(by_position.children())] else place


def _labels(spec: pytree.TreeSpec) -> list[str]:
    if spec.type is Opened:
        form = read_context(spec.context)[0]
        return [f"[{name}]" if form.kind == DICTIONARY else f".{name}" for name in form.names]
    keys = _keys(spec)
    return [f"[{key!r}]" for key in (range(len(spec.children())) if keys is None else keys)]


def _arguments(count: int, names: list[str]) -> str:
    by_position = f"{count} argument{'' if count == 1 else 's'} by position"
    return by_position + (f" and {_listed(names)} by name" if names else " and none by name")


def _difference(place: str, given: pytree.TreeSpec, expected: pytree.TreeSpec) -> str:
    if given == expected:
        return ""
    alike = given.type is expected.type and not given.is_leaf()
    if alike and given.type is Opened and (found := _difference_of_objects(given, expected)):
        return found
    keys, wanted = _keys(given), _keys(expected)
    if alike and keys is not None and wanted is not None and keys != wanted:
        return _difference_of_keys(place, keys, wanted)
    children, others = given.children(), expected.children()
    if alike and len(children) == len(others):
        labels = keys if keys is not None else range(len(children))
        inside = (_difference(f"{place}[{label!r}]", *pair) for label, *pair in zip(labels, children, others, strict=True))
        if said := next(filter(None, inside), ""):
            return said
    return f"{place} is {_described(given)}; the schedule was made for {_described(expected)}"


def _difference_of_objects(given: pytree.TreeSpec, expected: pytree.TreeSpec) -> str:
    mine, theirs = read_context(given.context)[0], read_context(expected.context)[0]
    if mine.kind != theirs.kind:
        return f"the call has a {mine.kind} where the schedule was made for a {theirs.kind}"
    if mine == theirs:
        return ""
    notes = {note[0] for note in set(mine.notes) ^ set(theirs.notes)}
    names = ", ".join(sorted(notes | (set(mine.names) ^ set(theirs.names)))) or "the order of its keys"
    return f"the {mine.kind} of the call differs from the one that the schedule was made for in {names}"


def _difference_of_keys(place: str, given: list[Any], expected: list[Any]) -> str:
    lacking, more = ([key for key in one if key not in other] for one, other in ((expected, given), (given, expected)))
    if not lacking and not more:
        return f"{place} has its keys in the order {_listed(given)}; the schedule was made for {_listed(expected)}"
    parts = [f"lacks the key{'s' * (len(lacking) > 1)} {_listed(lacking)}"] if lacking else []
    parts += [f"has the key{'s' * (len(more) > 1)} {_listed(more)}, which the schedule was not made for"] if more else []
    return f"{place} {' and '.join(parts)}"


def _keys(spec: pytree.TreeSpec) -> list[Any] | None:
    if spec.type is defaultdict:
        return list(spec.context[1])
    return list(spec.context) if spec.type in (dict, OrderedDict) else None


def _described(spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return "a single tensor, value or object"
    if spec.type is Opened:
        return f"a {read_context(spec.context)[0].kind}"
    title = (spec.context if spec.type is namedtuple else spec.type).__name__
    keys = _keys(spec)
    return f"a {title} of {_listed(keys) or 'nothing'}" if keys is not None else f"a {title} of {len(spec.children())}"


def _listed(keys: list[Any]) -> str:
    said = [repr(key) for key in keys[:_MOST_KEYS]]
    return ", ".join(said) + (f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else "")
