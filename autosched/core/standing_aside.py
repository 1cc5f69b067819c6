"""Modules in whose place a schedule is (``module.forward = loaded``), run as they came for a while."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch


class _Asking(threading.local):
    """Whether this thread asks models what they compute: ``yes()``; ``serves``: it waits for no call of others, who wait for it."""

    def __init__(self) -> None:
        self.serves = False
        # Of this thread alone. A lock is a counter that an exception of a signal's handler finds taken or given back, and never in between:
        # a context of Python's would be left when the exception goes, or not at all, and the thread would run no schedule until then.
        lock = cast(Any, threading.RLock())
        self.blocks: AbstractContextManager[object] = lock
        self.yes: Callable[[], bool] = lock._is_owned


asking = _Asking()


def all_aside() -> AbstractContextManager[object]:
    """Calls of this thread run models as they came, whichever schedules they are made to or come by, and are not counted.

    For whoever compares a schedule with its model while requests are served. A schedule in the place of a part, or a newer one in the
    model's own, would be compared instead of it, and may refuse to run where calls are noted. It may also be in preparation in another
    thread that waits for what this one holds, and a custom operator may call it, too.
    """
    return asking.blocks


def serve() -> None:
    """As :func:`all_aside` for as long as this thread lives, which runs operators for others and no code of a user's but finalizers.

    These may call a schedule, or have one refreshed. Whoever waits for this thread holds what such a call would wait for.
    """
    asking.blocks.__enter__()
    asking.serves = True


@contextmanager
def as_they_came(model: torch.nn.Module) -> Iterator[None]:
    """Calls of ``model`` in this thread run it, and every part of it, without the schedules that are in their places.

    What is captured, compared or measured is the model itself, and a server that loads a newer file goes on with the older one meanwhile.
    """
    with ExitStack() as stack:
        for module in model.modules():
            schedule = schedule_within(vars(module).get("forward"))
            if schedule is not None:
                stack.enter_context(schedule.standing_aside())
        yield


def schedule_within(forward: object) -> Any:
    """The schedule that ``forward`` is, or that is within the functions which libraries have put around it; ``None`` if there is none.

    As far as a function says what it is around: by ``functools.wraps``, as a partial, or as a method.
    """
    pending, seen = [forward], set[int]()
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if hasattr(type(found), "standing_aside"):
            return found
        # Not by getattr for all of them: a mock has any name.
        if isinstance(found, functools.partial):
            pending.append(found.func)
        if isinstance(found, types.MethodType):
            pending.append(found.__func__)
        pending.append(getattr(found, "__wrapped__", None))
    return None


def hooks_around(model: torch.nn.Module) -> tuple[dict[Any, Any], ...]:
    """Tables of the hooks that a call of ``model`` runs before and after its ``forward``: its own, and those of all modules."""
    everywhere = (torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks)
    return model._forward_hooks, model._forward_pre_hooks, *everywhere
