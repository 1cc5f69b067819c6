"""Baselines that are no schedules: the model as it came, and the same model under ``torch.compile``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autosched.capture.export import Captured
from autosched.config import compile_modes
from autosched.core.errors import DeviceError
from autosched.core.program import Program
from autosched.core.progress import OUTSIDE, Progress
from autosched.core.records import Failure
from autosched.core.variants import Lowering
from autosched.device.base import Device
from autosched.device.baselines import EagerBaseline
from autosched.device.compiled_baseline import CompiledBaseline, ModelSource
from autosched.device.cpu_measure import SHORTEST_BLOCK_US
from autosched.device.cuda.baseline_session import PREPARE_TIMEOUT_S, CudaBaseline, ModelCall, new_baseline_worker
from autosched.device.cuda.baselines import MODES, BaselineKind
from autosched.device.cuda.settings import current_settings
from autosched.device.host import physical_cores
from autosched.device.registry import index_of
from autosched.device.worker import Worker
from autosched.pipeline.adopting import TORCH_COMPILE
from autosched.pipeline.compile_time import CompileTime
from autosched.pipeline.granularity import REPLAY, has_product
from autosched.pipeline.judge import External
from autosched.pipeline.replaying import recording_of
from autosched.runtime.state import Kept

_CPU_TIMEOUT_S = 600.0


@contextlib.contextmanager
def eager_externals(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, kind: str, program: Program
) -> Iterator[list[External]]:
    """The model as it came: on a CPU with one thread and with one for each core. A CUDA device times its own in its worker.

    Not with one for each hardware thread: PyTorch by itself takes as many as there are cores.

    Args:
        program: what the model was captured as; where it changes memory, each call starts from the same.
    """
    if kind != "cpu":
        yield []
        return
    restore = Kept.by(program, model, args, kwargs).restore if program.writes else None
    baselines = [
        EagerBaseline(model, args, kwargs, threads=threads, min_block_us=SHORTEST_BLOCK_US, restore=restore)
        for threads in sorted({1, physical_cores()})
    ]
    # Its own outputs are the reference, so its error is zero by definition.
    yield [External(baseline.name, baseline.round_us, 0.0) for baseline in baselines]


class Rivals:
    """Every baseline that is no schedule, prepared when first asked for and then the same for every job on this model; to be entered.

    Args:
        device: a CPU or a GPU; anything else (a replay) has the model as it came and nothing more.
        compiled: whether to have those of ``torch.compile``, each in a process of its own.
        source: where that process builds the model itself, so that the compiler sees what a user would give it; else it is exported.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        device: Device,
        *,
        compiled: bool,
        source: ModelSource | None,
        progress: Progress,
    ) -> None:
        self._model = model
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        self._device = device
        self._kind = device.key.kind if recording_of(device) is None else REPLAY
        self._modes = _wanted() if compiled else []
        self._source = source
        self._progress = progress
        self._stack = contextlib.ExitStack()
        self.compile_time = CompileTime(PREPARE_TIMEOUT_S if self._kind == "cuda" else _CPU_TIMEOUT_S)
        self._found: list[External] | None = None
        self._early: list[Worker] = []

    def __enter__(self) -> Rivals:
        """Start the processes that baselines of a GPU run in: they import what they need while the model is captured and compiled."""
        for _ in self._kinds() if self._kind == "cuda" else []:
            worker = new_baseline_worker()
            self._stack.callback(worker.close)
            # What is in the way is said when it is prepared.
            with contextlib.suppress(DeviceError):
                worker.start()
            self._early.append(worker)
        return self

    def __exit__(self, *exception: object) -> None:
        """End them all."""
        self._stack.close()

    def ready(self, captured: Captured, reference: Sequence[torch.Tensor]) -> list[External]:
        """The baselines.

        Args:
            captured: compiled in the model's place on a GPU where no process can build the model itself.
            reference: tensors of the model's answer, which the compiled model must reproduce.
        """
        if self._found is None:
            self._found = self._prepared(captured, reference)
        return self._found

    def _prepared(self, captured: Captured, reference: Sequence[torch.Tensor]) -> list[External]:
        found = self._stack.enter_context(eager_externals(self._model, self._args, self._kwargs, self._kind, captured.program))
        if self._kind == "cuda":
            call = ModelCall(self._source, self._args, self._kwargs, reference) if self._source is not None else None
            return found + self._cuda_externals(captured, call)
        if self._kind != "cpu":
            return found
        modes = [BaselineKind.COMPILED, *([BaselineKind.MAX_AUTOTUNE] if has_products(captured.program) else [])]
        return [*found, *(self._compiled_on_cpu(MODES[kind], reference) for kind in modes if kind in self._modes)]

    def _compiled_on_cpu(self, lowering: Lowering, reference: Sequence[torch.Tensor]) -> External:
        name = TORCH_COMPILE if lowering is Lowering.INDUCTOR else lowering.value
        self._progress.stage(f"baseline {name}", OUTSIDE)
        with self.compile_time.turn() as limit_s:
            baseline = CompiledBaseline(
                self._source,
                self._args,
                self._kwargs,
                reference,
                threads=physical_cores(),
                model=self._model,
                timeout_s=limit_s,
                min_block_us=SHORTEST_BLOCK_US,
                lowering=lowering,
            )
            self._stack.callback(baseline.close)
            baseline.prepare()
        return External(name, baseline.round_us, baseline.max_abs_error)

    def _cuda_externals(self, captured: Captured, model: ModelCall | None) -> list[External]:
        settings = current_settings(index_of(self._device) or 0, self._device.key)
        found: list[External] = []
        baselines: list[CudaBaseline] = []
        # All import what they need now; they compile one after the other, since some time their kernels on the device.
        for kind in self._kinds():
            worker = self._early.pop() if self._early else None
            baselines.append(CudaBaseline(captured.program, captured.constants, kind, settings, model=model, worker=worker))
            self._stack.callback(baselines[-1].close)
            baselines[-1].start()
        for baseline in baselines:
            kind = baseline.kind
            self._progress.stage(f"baseline {kind}", OUTSIDE)
            # The model as it came compiles nothing: it neither waits for a compiler's turn nor takes one.
            turn = self.compile_time.turn() if kind is not BaselineKind.EAGER else contextlib.nullcontext(PREPARE_TIMEOUT_S)
            with turn as limit_s:
                prepared = baseline.prepare(limit_s)
            if isinstance(prepared, Failure):
                failure = prepared
                found.append(External(kind.value, lambda failure=failure: failure))  # type: ignore[misc]
                continue
            note = "" if prepared.of_model else f"PyTorch's own baselines got the captured program, not the model: {baseline.why_not_model}"
            found.append(
                External(kind.value, baseline.round_us, prepared.max_abs_error, peak_memory_bytes=prepared.peak_memory_bytes, note=note)
            )
        return found

    def _kinds(self) -> list[BaselineKind]:
        """Of a GPU's, in the order in which they are prepared."""
        return [BaselineKind.EAGER, *self._modes]


def _wanted() -> list[BaselineKind]:
    """Modes of ``torch.compile``."""
    return [BaselineKind(name) for name in compile_modes([kind.value for kind in MODES])]


def has_products(program: Program) -> bool:
    """Whether ``program`` has matrix products."""
    return any(map(has_product, program.graph.operators))
