"""Baselines that are no schedules: the model as it came, and the same model under ``torch.compile``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autosched.pipeline.judge import External


@contextlib.contextmanager
def eager_externals(model, args, kwargs, kind) -> Iterator[list[External]]:
    def one(threads):
        def run():
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                with torch.inference_mode():
                    t = time.perf_counter()
                    model(*args, **kwargs)
                    return (time.perf_counter() - t) * 1e6
            finally:
                torch.set_num_threads(before)

        return run

    yield [External(f"eager_{n}", one(n)) for n in (1, 2)]


@contextlib.contextmanager
def externals_for(model, args, kwargs, kind, options, ledger):
    with eager_externals(model, args, kwargs, kind) as e:
        yield e
