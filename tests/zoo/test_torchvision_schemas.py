"""torchvision beside a torch that it was not built for: what its releases call their compiled operators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from autosched.zoo_models import torchvision_schemas


@pytest.mark.parametrize("name", ["_C.so", "_C_stable.so", "_C.abi3.so"])
def test_a_library_of_any_release_is_tried_before_its_operators_are_declared(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Declared first, the library's own declaration would end the process.
    (tmp_path / name).touch()
    (tmp_path / "image_stable.so").touch()
    (tmp_path / "_C_sources.txt").touch()
    tried: list[str] = []

    def load(path: str) -> None:
        tried.append(Path(path).name)
        raise OSError("undefined symbol")

    monkeypatch.setattr(torchvision_schemas, "torch", SimpleNamespace(ops=SimpleNamespace(torchvision=object(), load_library=load)))
    assert not torchvision_schemas._operators_load(tmp_path)
    assert tried == [name]
