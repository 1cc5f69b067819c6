"""The shapes a loaded model has schedules for: which one a call belongs to, and how many are kept ready.

Concurrency: calls of one shape take turns, under the lock of its slot. What is evicted is chosen, under the lock of the table, among
slots that nobody uses, so that no executor disappears from under a running call.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched.core.errors import InputMismatch
from autosched.core.from_outside import let_through
from autosched.runtime.call_form import CallReader, expected_key, leaf_key
from autosched.runtime.forking import outlive_forks
from autosched.runtime.key_order import KeyOrders, in_captured_order
from autosched.runtime.prepared import Prepared
from autosched.runtime.quick_check import QuickCheck, quick_check
from autosched.runtime.shapes_padding import Padding
from autosched.runtime.slot import Refused, Slot
from autosched.runtime.trees import as_captured, flatten_inputs, numbered

# Each that says no takes a little time; modes of the caller's thread make one of their own, as shapes do.
_MOST_KNOWN = 8


@dataclass(slots=True)
class Found:
    """Where a call belongs.

    Args:
        slot: of its shape.
        tensors: in the order of the program's inputs.
        size: what to cut from the outputs, if they were padded.
        checked: whether nothing is left to check of the tensors.
        form, leaves: what the call was recognised by, if it is not ``checked`` and a like call may be.
        objects: of the call, in the order of their numbers; ``None`` if it was not taken apart on the way here.
        given: those that are to come back themselves, by number; ``None`` for most models.
        refused: why the schedule may not run, if that is known already.
    """

    slot: Slot
    tensors: list[torch.Tensor]
    size: int | None = None
    checked: bool = False
    form: _Form | None = None
    leaves: Sequence[Any] = ()
    objects: Sequence[Any] | None = None
    given: Mapping[int, Any] | None = None
    refused: Refused | None = None

    def learn(self) -> None:
        """Recognise calls like this at once from now on. Only after every check has passed; ``tensors`` as they then are."""
        if self.form is not None:
            self.form.learn(self)


class _Form:
    """Calls with the same containers: the slots they may belong to, and the calls that were checked before."""

    __slots__ = ("_known", "_reader", "_table")

    def __init__(self, input_tree: str) -> None:
        self._reader = CallReader(input_tree)
        self._table: dict[tuple[object, ...], Slot] = {}
        self._known: tuple[tuple[QuickCheck, Slot], ...] = ()

    def add(self, slot: Slot) -> None:
        """A shape of calls of this form."""
        self._table[tuple([expected_key(slot.program, leaf) for leaf in slot.program.input_leaves])] = slot

    def look_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found | None:
        """Where a call belongs, if it is of this form and of a shape there is."""
        if not self._reader.supported:
            return None
        leaves = self._reader.read(args, kwargs)
        if leaves is None:
            return None
        try:
            for quick, slot in self._known:
                if (tensors := quick.tensors(leaves)) is not None:
                    return Found(slot, tensors, None, True, objects=leaves.objects)
            slot_found = self._table.get(tuple([leaf_key(leaf) for leaf in leaves]))
        except (TypeError, RuntimeError) as error:
            # A tensor whose shape is not made of plain numbers.
            let_through(error)
            return None
        if slot_found is None:
            return None
        return Found(slot_found, [leaves[place] for place in slot_found.order], form=self, leaves=leaves, objects=leaves.objects)

    def learn(self, found: Found) -> None:
        """As ``Found.learn``."""
        prepared = found.slot.prepared
        # No guard compares where in its storage a tensor begins.
        if len(self._known) >= _MOST_KNOWN or prepared is None or prepared.offsets_matter:
            return
        quick = quick_check(found.leaves, found.slot.order, found.tensors)
        if quick is not None:
            self._known = (*self._known, (quick, found.slot))


class ShapeTable:
    """Every shape of a bundle.

    Args:
        slots: one for each shape.
        device: where inputs must be.
        max_shapes: how many schedules are kept ready at most; the one used longest ago goes first.
        padding: how calls of other shapes are padded, if they are.
        orders: of dictionaries' keys, if other ones than those of tuning may be tried.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        device: torch.device,
        *,
        max_shapes: int,
        padding: Padding | None = None,
        orders: KeyOrders | None = None,
    ) -> None:
        self.slots = tuple(slots)
        self._orders = orders
        self.device = device
        # A device makes this anew each time it is asked.
        self.kind: str = device.type
        self.max_shapes = max_shapes
        self.padding = padding
        self.evictions = 0
        self._bounded = len(self.slots) > max_shapes
        self._recent: OrderedDict[int, Slot] = OrderedDict()
        # By thread, which uses one at a time: where a signal's exception keeps a thread from giving it back, its next call does.
        self._used: dict[int, Slot] = {}
        self._lock = threading.Lock()
        forms: dict[str, _Form] = {}
        for slot in self.slots:
            tree = slot.program.input_tree
            forms.setdefault(tree, _Form(tree)).add(slot)
        self._forms = tuple(forms.values())
        self._examples = tuple({slot.program.input_tree: slot.program for slot in reversed(self.slots)}.values())
        outlive_forks(self)

    def find(self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found:
        """The slot of a call, and its tensors.

        Raises:
            InputMismatch: if there is none; it says what the call has and what there are schedules for.
        """
        found = self._look_up(args, kwargs)
        # By keyword what was captured by position, or the other way round, is the same call.
        for program in self._examples if found is None else ():
            rearranged = as_captured(program, signature, args, kwargs)
            if rearranged is not None:
                args, kwargs = rearranged
                found = self._look_up(args, kwargs)
                if found is not None:
                    break
        found = found or self._in_another_order(args, kwargs) or self._search(args, kwargs)
        if found.slot.returns_given:
            found.given = found.slot.objects_of(args, kwargs) if found.objects is None else numbered(found.objects)
        return found

    def run(self, found: Found) -> list[torch.Tensor] | Exception | Refused:
        """As ``slot.run``, with no more schedules ready than allowed; outputs of a padded call as the model returns them."""
        if found.refused is not None:
            return found.refused
        slot, padding = found.slot, self.padding
        if padding is None or found.size is None:
            return self._run(slot, found.tensors, None)
        place = self.slots.index(slot)
        outcome = self._run(slot, found.tensors, lambda prepared: padding.barred(place, prepared))
        if not isinstance(outcome, list):
            return outcome
        with torch.no_grad():
            return padding.cut(outcome, found.size)

    def _run(
        self, slot: Slot, tensors: Sequence[torch.Tensor], barred: Callable[[Prepared], str] | None
    ) -> list[torch.Tensor] | Exception | Refused:
        if not self._bounded:
            return slot.run(tensors, barred)
        try:
            self._borrow(slot, not slot.left_to_the_model)
            return slot.run(tensors, barred)
        finally:
            self._give_back()

    def warm(self, slot: Slot) -> None:
        """Make ``slot`` ready, with no more schedules ready than allowed; whatever its ``prepare`` raises."""
        try:
            self._borrow(slot)
            slot.warm()
        finally:
            self._give_back()

    def refresh(self, slot: Slot) -> Refused | None:
        """As ``slot.refresh``, with no more schedules ready than allowed."""
        try:
            if slot.given_up:
                self._borrow(slot)
            else:
                # It takes no more memory than it has, which must not be given back under it.
                with self._lock:
                    self._used[threading.get_ident()] = slot
            return slot.refresh()
        finally:
            self._give_back()

    def after_fork(self) -> None:
        """The new process runs no call of the parent's."""
        self._lock = threading.Lock()
        self._used = {}
        for slot in self.slots:
            slot.after_fork(usable=self.kind != "cuda")

    def _borrow(self, slot: Slot, room: bool = True) -> None:
        """Keep ``slot`` in memory until it is given back; with ``room``, have others make room for it now."""
        with self._lock:
            self._used[threading.get_ident()] = slot
            self._recent[id(slot)] = slot
            self._recent.move_to_end(id(slot))
            dropped = self._over() if room else []
        _close(dropped)

    def _give_back(self) -> None:
        with self._lock:
            slot = self._used.pop(threading.get_ident(), None)
            if slot is not None and slot.prepared is None and slot not in self._used.values():
                # It takes no memory, and so has no share in what is allowed.
                self._recent.pop(id(slot), None)
            dropped = self._over()
        _close(dropped)

    def _over(self) -> list[Prepared]:
        dropped: list[Prepared] = []
        used = {id(slot) for slot in self._used.values()}
        for place in list(self._recent):
            if len(self._recent) <= self.max_shapes:
                break
            if place in used:
                continue
            slot = self._recent.pop(place)
            if slot.prepared is not None:
                dropped.append(slot.prepared)
                slot.prepared = None
                self.evictions += 1
        return dropped

    def _look_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found | None:
        for form in self._forms:
            if (found := form.look_up(args, kwargs)) is not None:
                return found
        return None

    def _in_another_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found | None:
        """As :meth:`_look_up`, of a call whose dictionaries have their keys in an order that makes no difference to the model."""
        orders = self._orders
        for program in self._examples if orders is not None else ():
            ordered = in_captured_order(program, args, kwargs)
            found = self._look_up(*ordered) if ordered is not None else None
            if found is None or orders is None:
                continue
            try:
                self._borrow(found.slot, not found.slot.left_to_the_model)
                said = found.slot.says(lambda prepared: not orders.matters(prepared, args, kwargs))
            finally:
                self._give_back()
            if said:
                found.refused = said if isinstance(said, Refused) else None
                return found
        return None

    def _search(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found:
        """The general way: containers that only the tree walk knows, sizes that may be padded, and the words for what does not fit."""
        first: InputMismatch | None = None
        for slot in self.slots:
            try:
                return Found(slot, flatten_inputs(slot.program, args, kwargs))
            except InputMismatch as error:
                first = first or error
        why = ""
        if self.padding is not None:
            padded = self.padding.fit(args, kwargs)
            if not isinstance(padded, str):
                place, tensors, size = padded
                return Found(self.slots[place], tensors, size)
            why = f" Padding does not help: {padded}."
        assert first is not None  # a table has a slot
        if len(self.slots) == 1 and not why:
            raise first
        labels = "; ".join(slot.label for slot in self.slots)
        raise InputMismatch(f"{first} There are schedules for {len(self.slots)} shapes: {labels}.{why}") from first


def _close(dropped: Sequence[Prepared]) -> None:
    for prepared in dropped:
        prepared.close()
