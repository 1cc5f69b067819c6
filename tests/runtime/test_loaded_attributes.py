"""A loaded model is not its module, and says where that is instead of quietly losing its schedule."""

from __future__ import annotations

import pytest

import autosched
from autosched.export.bundle import encode_bundle
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches


@pytest.mark.parametrize("name", ["eval", "to", "half", "parameters", "config"])
def test_what_belongs_to_the_module_is_asked_of_the_module(name: str) -> None:
    model = TwoBranches().eval()
    loaded = autosched.load(encode_bundle(two_branches_bundle(model)), model)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'.*attribute 'model'"):
        getattr(loaded, name)
    assert not hasattr(loaded, name)
    assert loaded.model is model
