"""The model that a job was given, exported once for all the lowerings it is tried in."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosched.capture.draft import Draft
from autosched.capture.export import draft_of
from autosched.capture.structure import structure_of
from autosched.core.computed_once import computed_once


class Original:
    """A model with one call of it.

    Args:
        model: in inference mode; its outputs are what everything is judged by.
        args, kwargs: the call; nested containers of tensors and plain values.
    """

    def __init__(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        self.model = model
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})
        self._draft: Draft | None = None
        self._export_s = self._export_cpu_s = 0.0

    @property
    def export_s(self) -> float:
        """Seconds that exporting took. 0 before."""
        return self._export_s

    @property
    def export_cpu_s(self) -> float:
        """Of those, the seconds that this thread was at work: the only rate of this machine's compilers known before one has run.

        On a fresh machine other processes are at work beside it (``readiness.begin_searches``), and not when a compiler is.
        """
        return self._export_cpu_s

    def draft(self) -> Draft:
        """Its draft, to be changed.

        Raises:
            UnsupportedGraph: as ``capture.export.draft_of``.
        """
        if self._draft is None:
            begin_s, begin_cpu_s = time.monotonic(), time.thread_time()
            self._draft = draft_of(self.model, self.args, self.kwargs)
            self._export_s, self._export_cpu_s = time.monotonic() - begin_s, time.thread_time() - begin_cpu_s
        return self._draft.copy()

    @computed_once
    def structure(self) -> str:
        """``structure_of`` its draft: the same in every lowering.

        Raises:
            UnsupportedGraph: as :meth:`draft`, or if an argument cannot be written down.
        """
        return structure_of(self.draft())
