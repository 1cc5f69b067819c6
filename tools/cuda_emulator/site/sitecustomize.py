"""Found by every Python under run.py: gives kernels their values as soon as PyTorch has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads ``torch`` as usual, and then installs the values."""

    def __init__(self) -> None:
        self._loader: importlib.abc.Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Of ``torch`` only."""
        if fullname != "torch" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The real one's."""
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """The real one's, then ours."""
        assert self._loader is not None
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        import values

        values.install()


sys.meta_path.insert(0, _AfterTorch())
