"""Baselines that are no schedules: the model as it came, and the same model under ``torch.compile``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autosched.core.progress import Progress
from autosched.device.baselines import EagerBaseline
from autosched.device.compiled_baseline import CompiledBaseline
from autosched.pipeline.judge import External
from autosched.runtime.host_key import usable_cores


@contextlib.contextmanager
def eager_externals(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, kind: str) -> Iterator[list[External]]:
    """The model as it came: on a CPU with one thread and with all of them. A CUDA device times its own in its worker."""
    if kind != "cpu":
        yield []
        return
    baselines = [EagerBaseline(model, args, kwargs, threads=threads) for threads in sorted({1, usable_cores()})]
    # Its own outputs are the reference, so its error is zero by definition.
    yield [External(baseline.name, baseline.round_us, 0.0) for baseline in baselines]


@contextlib.contextmanager
def externals_for(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    kind: str,
    *,
    compiled: bool,
    reference: Sequence[torch.Tensor],
    progress: Progress,
) -> Iterator[list[External]]:
    """Every baseline for one comparison; ``compiled`` adds ``torch.compile`` with freezing, in a process of its own.

    Args:
        reference: tensors of the model's answer to ``args`` and ``kwargs``, which the compiled model must reproduce.
    """
    with eager_externals(model, args, kwargs, kind) as found:
        if not compiled or kind != "cpu":
            yield found
            return
        progress.stage("torch.compile")
        baseline = CompiledBaseline(None, args, kwargs, reference, threads=usable_cores(), model=model)
        try:
            baseline.prepare()
            yield [*found, External("torch_compile", baseline.round_us, baseline.max_abs_error)]
        finally:
            baseline.close()
