"""Which lanes a measuring process runs: those that the job began with, also where somebody has cleared the cache meanwhile."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from autosched.core.errors import DeviceError
from autosched.device import worker_main


class _Beats:
    """In the place of the process's end of the conversation."""

    plugin = None

    def __init__(self) -> None:
        self.works = False

    def beat(self, item: int) -> None:
        pass

    @contextlib.contextmanager
    def working(self, limit_s: float) -> Any:
        self.works = True
        yield
        self.works = False


@pytest.mark.parametrize("why", ["", "the compiler is gone"])
def test_lanes_that_are_gone_are_built_again(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = _Beats()
    built: list[bool] = []

    def build() -> str:
        built.append(channel.works)
        return why

    monkeypatch.setattr(worker_main, "native_library", lambda: None)
    monkeypatch.setattr(worker_main, "build_native", build)
    service: Any = worker_main._Service(channel)  # type: ignore[arg-type]
    expected = pytest.raises(DeviceError, match=why) if why else contextlib.nullcontext()
    with expected:
        service._settle_lanes(native=True)
    assert built == [True]
