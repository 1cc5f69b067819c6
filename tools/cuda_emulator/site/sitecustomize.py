"""Found by every Python under run.py: gives kernels their values as soon as PyTorch has been imported."""

from __future__ import annotations

from types import ModuleType

from after_import import after_import


def _install(_: ModuleType) -> None:
    import values

    values.install()


after_import("torch", _install)
