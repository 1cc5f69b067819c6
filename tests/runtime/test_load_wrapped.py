"""What ``load`` says of a model that is the right one but not as it should be: wrapped, or in training mode."""

from __future__ import annotations

import pytest
import torch

import autosched
from autosched.core.errors import IncompatibleArtifact
from autosched.export.bundle import encode_bundle
from autosched.runtime.guard import FallbackWarning
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches


@pytest.fixture
def model() -> TwoBranches:
    return TwoBranches().eval()


@pytest.mark.parametrize(("wrap", "inner"), [(torch.compile, "model._orig_mod"), (torch.nn.DataParallel, "model.module")])
def test_a_wrapped_model_is_told_where_the_module_is(model: TwoBranches, wrap: object, inner: str) -> None:
    bundle = encode_bundle(two_branches_bundle(model))
    wrapped = wrap(model).eval()  # type: ignore[operator]
    with pytest.raises(IncompatibleArtifact, match=inner) as raised:
        autosched.load(bundle, wrapped, strict=True)
    assert inner in raised.value.differences[0]
    with pytest.warns(FallbackWarning, match=inner):
        assert not autosched.load(bundle, wrapped).report().scheduled
    assert autosched.load(bundle, getattr(wrapped, inner.partition(".")[2]), strict=True).report().scheduled


@pytest.mark.parametrize(
    ("wrap", "inner"),
    [(torch.optim.swa_utils.AveragedModel, "model.module"), (lambda model: torch.nn.Sequential(Adapted(model)), "model.0.base")],
)
def test_a_model_that_holds_the_tuned_one_is_told_where(model: TwoBranches, wrap: object, inner: str) -> None:
    bundle = encode_bundle(two_branches_bundle(model))
    larger = wrap(model).eval()  # type: ignore[operator]
    with pytest.raises(IncompatibleArtifact, match=f"give load\\(\\) that, {inner}") as raised:
        autosched.load(bundle, larger, strict=True)
    assert inner in raised.value.differences[0]
    assert autosched.load(bundle, larger.get_submodule(inner.removeprefix("model.")), strict=True).report().scheduled


def test_of_a_part_that_is_compiled_is_said_that_its_weights_have_other_names(model: TwoBranches) -> None:
    bundle = encode_bundle(two_branches_bundle(model))
    name, part = next(iter(model.named_children()))
    model.set_submodule(name, torch.compile(part))  # type: ignore[arg-type]
    with pytest.raises(IncompatibleArtifact) as raised:
        autosched.load(bundle, model, strict=True)
    assert (
        f"wrapped its part model.{name}, whose weights have other names then; model.{name}.compile() leaves" in raised.value.differences[0]
    )
    model.set_submodule(name, part)
    part.compile()
    assert autosched.load(bundle, model, strict=True).report().scheduled


def test_of_a_model_that_holds_no_such_part_nothing_is_said(model: TwoBranches) -> None:
    with pytest.raises(IncompatibleArtifact, match="absent here") as raised:
        autosched.load(encode_bundle(two_branches_bundle(model)), torch.nn.Sequential(torch.nn.Linear(8, 8)).eval(), strict=True)
    assert "larger" not in str(raised.value)


class Adapted(torch.nn.Module):
    """Keeps a model within it, as wrappers of libraries do."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.more = torch.nn.Linear(2, 2)


def test_a_model_in_training_mode_is_not_told_to_tune_again(model: TwoBranches) -> None:
    bundle = encode_bundle(two_branches_bundle(model))
    with pytest.raises(IncompatibleArtifact, match=r"call model\.eval\(\) before load\(\)$"):
        autosched.load(bundle, model.train(), strict=True)
