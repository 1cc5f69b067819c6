"""Example inputs out of real use: what a model is called with while something runs, once for each form of call.

A decoder's step is called by ``generate``, a part of a pipeline by the rest of it: nobody writes such a call down, and it is the one to
tune for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autosched.core.containers import pack
from autosched.core.errors import UsageError
from autosched.core.standing_aside import as_they_came
from autosched.runtime.call_form import leaf_key
from autosched.runtime.trees import map_tensors


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One form of call: calls with the same containers, shapes, dtypes and plain values.

    Args:
        args, kwargs: of the first of them, as they were when it was made: tensors, and objects that hold tensors, are copies.
        times: how many there were.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    times: int


def record_calls(model: torch.nn.Module, run: Callable[[], object], most: int = 16) -> tuple[RecordedCall, ...]:
    """Do ``run()``, and say how ``model`` was called in it: the forms of its calls, in the order in which they came first.

    Args:
        model: the module that is to be tuned, often a part of what ``run`` calls. Calls of ``model(...)`` are seen, and those of
            ``model.forward(...)``; those of other methods (``decode``) are calls of what these call.
        run: takes nothing; whatever it returns is dropped, and whatever it raises is raised.
        most: forms that are kept; calls of later ones are let through and forgotten. A decoder with a growing cache has another form at
            every step, and what is kept holds a copy of it.

    Raises:
        UsageError: if ``model`` was not called, or the arguments are not what is expected.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"record_calls() got a {type(model).__name__} as model; expected a torch.nn.Module, one that run() calls")
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            f"record_calls() got a {type(model).__name__} as model, whose calls nothing hears and which cannot be tuned; expected a module "
            "of Python. Give the one that was scripted or traced."
        )
    if not callable(run):
        raise UsageError(
            f"record_calls() got a {type(run).__name__} as run; expected a function that takes nothing and calls the model. Write "
            "'lambda: model(x)', not 'model(x)'."
        )
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise UsageError(f"record_calls() got most={most!r}; expected a whole number, 1 or more")
    forms = _Forms(most)

    # What was compiled before calls no hook, and no forward but the one that it was compiled from. Nor does a schedule call hooks.
    with as_they_came(model), _heard(model, forms.note), torch.compiler.set_stance("force_eager"):
        run()
    calls = forms.recorded()
    if not calls:
        raise UsageError(
            f"run() made no call of the {type(model).__name__}; expected one. Give the module that it calls as module(...) or "
            "module.forward(...): a part of the model, perhaps."
        )
    return calls


@dataclass(slots=True)
class _Form:
    spec: pytree.TreeSpec
    key: list[object]
    call: tuple[tuple[Any, ...], dict[str, Any]]
    times: int = 1


class _Forms:
    """The forms of calls so far. Several threads may call the model at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: list[_Form] = []
        self._lock = threading.Lock()

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call, and copy what it is given if it is the first of its form."""
        leaves, spec = pytree.tree_flatten(pack((args, kwargs)))
        key = [leaf_key(leaf) for leaf in leaves]
        with self._lock:
            if self._counted(spec, key) or len(self._found) >= self._most:
                return
        # The call may change what it is given. Other threads need not wait for the copy; one of them may have been first meanwhile.
        call = map_tensors(_copy, (args, kwargs))
        with self._lock:
            if not self._counted(spec, key) and len(self._found) < self._most:
                self._found.append(_Form(spec, key, call))

    def recorded(self) -> tuple[RecordedCall, ...]:
        with self._lock:
            return tuple(RecordedCall(*form.call, form.times) for form in self._found)

    def _counted(self, spec: pytree.TreeSpec, key: list[object]) -> bool:
        for form in self._found:
            if (form.spec, form.key) == (spec, key):
                form.times += 1
                return True
        return False


class _Thread(threading.local):
    """Whether the call that this thread is in was heard of."""

    heard = False


@contextmanager
def _heard(model: torch.nn.Module, note: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Tell ``note`` of each call, as it came: a hook hears ``model(...)`` ahead of hooks that change what is given, and nothing else."""
    thread = _Thread()
    forward = model.forward

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note(args, kwargs)
        thread.heard = True

    def ended(*_: object) -> None:
        # A hook that refused what was given keeps it from forward.
        thread.heard = False

    # Libraries ask it what it takes.
    @functools.wraps(forward)
    def direct(*args: Any, **kwargs: Any) -> Any:
        if not thread.heard:
            note(args, kwargs)
        thread.heard = False
        return forward(*args, **kwargs)

    handles = (
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True),
        model.register_forward_hook(ended, always_call=True),
    )
    own = vars(model)
    before = {"forward": own["forward"]} if "forward" in own else {}
    own["forward"] = direct
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        # What ran may have put another in its place, which calls it.
        if own.get("forward") is direct:
            del own["forward"]
            own.update(before)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # One made in inference mode stays what it is, and no export writes to such a tensor.
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().clone()
