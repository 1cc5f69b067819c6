import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.capture.pt2 import load_pt2
from autosched.core.errors import ArtifactCorrupt, UsageError
from autosched.runtime.kernels import bind


@pytest.fixture
def saved(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    inputs = torch.randn(3, 4)
    torch.export.save(torch.export.export(model, (inputs,)), tmp_path / "model.pt2")
    return model, inputs, tmp_path / "model.pt2"


def test_a_saved_program_is_captured_like_its_model(saved):
    model, inputs, path = saved
    loaded, args, kwargs = load_pt2(path)
    captured = capture(loaded, args, kwargs)
    assert torch.allclose(bind(captured.program, captured.constants).run([inputs])[0], model(inputs))
    assert loaded.get_parameter("0.weight").shape == (8, 4)


def test_a_truncated_file_is_corrupt(saved):
    path = saved[2]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactCorrupt, match=r"model\.pt2.*Expected a program written by torch\.export\.save"):
        load_pt2(path)


def test_a_zip_of_something_else_is_corrupt(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("hello", "world")
    with pytest.raises(ArtifactCorrupt, match=r"cannot read it .*torch\.export\.save"):
        load_pt2(tmp_path / "other.pt2")


def test_a_package_of_compiled_code_is_refused_and_the_program_asked_for(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "compiled.pt2", "w") as archive:
        archive.writestr("compiled/archive_format", "pt2")
        archive.writestr("compiled/data/aotinductor/model/abc.wrapper.so", b"")
    with pytest.raises(ArtifactCorrupt, match=r"package of AOTInductor.*Expected the program that it was compiled from"):
        load_pt2(tmp_path / "compiled.pt2")


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="there is no file"):
        load_pt2(tmp_path / "none.pt2")
    with pytest.raises(UsageError, match="there is no file"):
        load_pt2(tmp_path / f"{'x' * 300}.pt2")
