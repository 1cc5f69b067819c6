"""A baseline of a GPU that answers to everything and cannot be had; tests look at what it is given."""

from __future__ import annotations

from typing import Any

from autosched.core.records import Failure, FailureKind
from autosched.device.cuda.baselines import BaselineKind


class UnavailableBaseline:
    """In the place of ``CudaBaseline``."""

    def __init__(self, program: Any, constants: Any, kind: BaselineKind, settings: Any, **options: Any) -> None:
        self.kind = kind

    def start(self) -> None: ...

    def prepare(self, limit_s: float) -> Failure:
        return Failure(FailureKind.UNAVAILABLE, "a double")

    def close(self) -> None: ...
