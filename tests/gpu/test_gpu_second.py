"""The second GPU of a machine: tuned for by its number, without the first. Skipped where there is one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autosched
from autosched import zoo
from autosched.core.records import Failure
from autosched.device.cuda.device import CudaDevice
from autosched.pipeline import Tuned
from autosched.runtime.numerics import compare
from tests.gpu.gpu_rig import rehearsing

_COUNT = 1 if rehearsing() else torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(420),
    pytest.mark.gpu_only(reason="the tuner opens the real device"),
    pytest.mark.skipif(_COUNT < 2, reason=f"needs two GPUs; this process sees {_COUNT}"),
]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSCHED_CACHE", str(tmp_path_factory.mktemp("cache")))
        toy = zoo.load("autosched:toy")
        return autosched.tune(toy.model, toy.args, toy.kwargs, device="cuda:1", effort="quick", budget_s=15, name=toy.name)


def test_the_job_is_about_the_second(tuned: Tuned) -> None:
    assert tuned.report.device == CudaDevice(index=1).key
    rows = {row.name: row for row in tuned.report.strategies}
    assert not isinstance(rows[tuned.report.chosen].failure, Failure)
    assert rows[tuned.report.chosen].measured_us is not None


@pytest.mark.parametrize("index", [1, 0])
def test_it_is_served_on_whichever_is_alike(tuned: Tuned, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    home = torch.device("cuda", index)
    model = zoo.load("autosched:toy").model.to(home)
    if CudaDevice(index=index).key != tuned.report.device:
        with pytest.raises(autosched.AutoschedError, match="device"):
            autosched.load(tuned.to_bytes(), model, strict=True)
        return
    loaded = autosched.load(tuned.to_bytes(), model, strict=True)
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(home)
    with torch.no_grad():
        answer = compare([loaded(image).cpu()], [model(image).cpu()], rounded=torch.float16)
    assert answer.within_tolerance, answer.reason
