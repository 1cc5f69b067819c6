"""A model on disk while others write, read or end: always one of them, whole. What is in it, and what is refused, is in test_training."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import autosched.datasets
from autosched.core.errors import UsageError
from autosched.costmodel import persist
from autosched.costmodel.persist import load_model, read_card, save_model
from autosched.costmodel.trained import TrainedModel

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = min((Path(str(autosched.datasets.__file__)).parent / "data").glob("*/model"))


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    return load_model(SHIPPED)


KILLED = f"""
import itertools, os, sys
sys.path.append({str(ROOT)!r})
from pathlib import Path
from autosched.costmodel.persist import load_model, save_model
folder, count, rename = Path(sys.argv[1]), itertools.count(1), Path.rename
Path.rename = lambda *paths: os._exit(9) if next(count) == 2 else rename(*paths)
save_model(load_model(folder), folder)
"""


def test_a_writer_that_is_killed_between_two_renames_leaves_a_model(model: TrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(model, folder)
    subprocess.run([sys.executable, "-P", "-c", KILLED, str(folder)], check=False)
    assert load_model(folder).card == model.card
    save_model(model, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_reader_begins_again_where_another_model_takes_the_place_of_what_it_reads(
    model: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tmp_path / "model", persist._read_manifest
    newer = TrainedModel(model.inner, model.intervals, msgspec.structs.replace(model.card, seed=7))
    save_model(model, folder)

    def overtaken(path: Path) -> object:
        found = read(path)
        monkeypatch.undo()
        save_model(newer, folder)
        return found

    monkeypatch.setattr(persist, "_read_manifest", overtaken)
    assert load_model(folder).card.seed == 7


def test_a_link_to_a_model_stays_a_link(model: TrainedModel, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("model")
    for _ in range(2):  # to nothing, then to a model
        save_model(model, tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert load_model(tmp_path / "model").card == model.card


def test_a_model_is_for_whom_the_mask_says(model: TrainedModel, tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    save_model(model, tmp_path / "model")
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "usual").stat().st_mode


# Each kind of model writes in its own way. A process of its own: no file in it may be longer than its third argument says.
FULL = f"""
import sys, resource
sys.path.append({str(ROOT)!r})
from pathlib import Path
from autosched.core.errors import UsageError
from autosched.costmodel.persist import load_model, save_model
model = load_model(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    save_model(model, Path(sys.argv[2]))
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["torch", "graybox", "xgboost", "stacked"])
def test_where_there_is_no_room_for_a_model_the_error_says_so_and_the_former_one_stays(kind: str, tmp_path: Path) -> None:
    folder = ROOT / "tests" / "compat" / "costmodel" / "schema-2" / f"model-{kind}"
    longest_bytes = max(path.stat().st_size for path in folder.rglob("*") if path.suffix in (".safetensors", ".ubj"))
    save_model(load_model(SHIPPED), tmp_path / "model")
    command = [sys.executable, "-c", FULL, str(folder), str(tmp_path / "model"), str(longest_bytes - 1)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.startswith(f"cannot write a cost model to {tmp_path / 'model'}: File too large."), ended.stderr
    assert load_model(tmp_path / "model").card == load_model(SHIPPED).card
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("read", [read_card, load_model])
def test_a_model_that_this_user_may_not_read_is_an_error_that_says_so(read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match=r"cannot read the cost model in .*model: Permission denied"):
        read(SHIPPED)
