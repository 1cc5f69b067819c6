"""That a result cannot be written is found out before it is tuned for."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosched.core.errors import UnknownModel, UsageError
from autosched.pipeline.result import check_writable
from autosched.zoo import load


@pytest.mark.parametrize("name", ["x" * 300, "x" * 240, "x\0y", f"{'x' * 300}/model.autosched", "", "nowhere/model.autosched"])
def test_a_name_that_no_file_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        check_writable(tmp_path / name)


def test_a_link_is_asked_for_what_it_names(tmp_path: Path) -> None:
    link = tmp_path / "model.autosched"
    link.symlink_to(tmp_path / "gone" / "model.autosched")
    with pytest.raises(UsageError, match="there is no folder"):
        check_writable(link)
    (tmp_path / "gone").mkdir()
    check_writable(link)


def test_a_name_that_a_file_can_have_leaves_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "model.autosched")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x" * 300, f"/{'x' * 300}"])
def test_a_model_of_a_name_too_long_for_a_file_is_unknown(name: str) -> None:
    with pytest.raises(UnknownModel):
        load(name)
