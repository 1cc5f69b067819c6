"""A model that another thread changes while it is loaded: nothing is given up for it, and nothing else is blamed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosched.core.errors import IncompatibleArtifact
from autosched.export.bundle import encode_bundle
from autosched.runtime import binding
from autosched.runtime.kernels import BoundProgram, bind
from autosched.runtime.load import LoadedModel, load
from autosched.runtime.numerics import compare
from autosched.runtime.trees import output_tensors
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs

pytestmark = pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")


class Watched(TwoBranches):
    """What ``after`` holds is done once after each call, by this thread or by another one."""

    after: list[Callable[[Watched], object]] = []  # noqa: RUF012 - no attribute of an instance, which would be watched
    by_another = True

    def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
        answer = super().forward(x, more=more)
        if self.after:
            change = self.after.pop()
            if self.by_another:
                thread = threading.Thread(target=change, args=(self,))
                thread.start()
                thread.join()
            else:
                change(self)
        return answer


class OfItself(Watched):
    by_another = False


def _agrees(loaded: LoadedModel, model: torch.nn.Module) -> bool:
    args, kwargs = two_branches_inputs(3)
    with torch.no_grad():
        return compare(output_tensors(loaded(*args, **kwargs)), output_tensors(model(*args, **kwargs))).within_tolerance


def _loaded(model: Watched, *changes: Callable[[Watched], object], **options: Any) -> LoadedModel:
    data = encode_bundle(two_branches_bundle(model))
    Watched.after.extend(changes)
    try:
        return load(data, model, **options)
    finally:
        Watched.after.clear()


def _raise_buffer(model: Watched) -> None:
    with torch.no_grad():
        model.offset.add_(1.0)


def _touch_buffer(model: Watched) -> None:
    with torch.no_grad():
        model.offset.mul_(1.0)


@pytest.mark.parametrize("change", [_raise_buffer, _touch_buffer, lambda model: model.train()], ids=["numbers", "same numbers", "mode"])
@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_what_another_thread_changes_while_it_is_loaded_retires_nothing(change: Callable[[Watched], object], times: int) -> None:
    model = Watched().eval()
    loaded = _loaded(model, *[change] * times)
    model.eval()
    assert loaded.report().scheduled
    assert _agrees(loaded, model)
    assert loaded.report().calls == 1


def test_what_the_model_changes_itself_is_no_other_threads_doing() -> None:
    model = OfItself().eval()
    with pytest.raises(IncompatibleArtifact, match="outputs differ"):
        _loaded(model, *[_raise_buffer] * 100, strict=True)


def test_weights_that_change_while_kernels_are_made_are_blamed_on_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = SimpleNamespace(refusals=(SimpleNamespace(reason="code of our own computes something else"),))
    model = Watched().eval()
    changes = [_raise_buffer]

    def regions_of(*_: object) -> Any:
        if not changes:
            return None
        changes.pop()(model)
        return refused

    def bind_for(plan: object, program: Any, constants: Mapping[int, torch.Tensor], regions: object) -> BoundProgram:
        return bind(program, constants)

    monkeypatch.setattr(binding, "regions_of", regions_of)
    monkeypatch.setattr(binding, "bind_for", bind_for)
    with caplog.at_level(logging.WARNING):
        loaded = _loaded(model)
    assert "of our own" not in caplog.text
    assert _agrees(loaded, model)
    assert loaded.report().calls == 1
    assert loaded.report().notes == ()
