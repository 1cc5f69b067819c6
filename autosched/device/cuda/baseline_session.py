"""One baseline, seen from the tuning process: prepared once, then timed a block at a time beside the schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autosched.core.errors import DeviceError
from autosched.core.from_outside import let_through
from autosched.core.program import Program
from autosched.core.records import Failure, FailureKind
from autosched.device.compiled_baseline import ModelSource, compile_request
from autosched.device.cuda.baselines import BaselineKind
from autosched.device.cuda.messages import BaselineBody, BaselineResult, SettingsBody, unwrap, wrap_request
from autosched.device.worker import Worker, WorkerDied
from autosched.device.worker_child import describe
from autosched.device.worker_messages import Answer, Broken, ExtraAnswer, OpenRequest, Request, RoundAnswer, RoundRequest

if TYPE_CHECKING:
    import torch

MODULE = "autosched.device.cuda.baseline_main"
_NO_ANSWER = Failure(FailureKind.CRASH, "the baseline's process gave no answer")
# Autotuning a net of some hundred shapes takes minutes.
PREPARE_TIMEOUT_S = 900.0


def new_baseline_worker(module: str = MODULE) -> Worker:
    """A process for a baseline of whatever kind, not yet started."""
    return Worker(module, timeout_s=PREPARE_TIMEOUT_S, start_timeout_s=PREPARE_TIMEOUT_S)


class ModelCall(NamedTuple):
    """A model that another process can build, the call that is timed, and the tensors of its right answer."""

    source: ModelSource
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    references: Sequence[torch.Tensor]


class CudaBaseline:
    """A baseline in a process of its own: of the user's model where that process can build it, else of the program.

    Args:
        program, constants: as in ``Device.open``.
        kind: what to time.
        settings: of this process.
        model: what the compiler should see.
        module: of the process; tests give another.
        worker: the process, where there is one already; it is this object's from now on.
    """

    def __init__(
        self,
        program: Program,
        constants: Mapping[int, torch.Tensor],
        kind: BaselineKind,
        settings: SettingsBody,
        *,
        model: ModelCall | None = None,
        module: str = MODULE,
        worker: Worker | None = None,
    ) -> None:
        self.kind = kind
        self.why_not_model = "" if model is not None else "no other process can build the model"
        self._model = model
        self._limit_s = PREPARE_TIMEOUT_S
        self._worker = worker or new_baseline_worker(module)
        files = self._worker.write_program(program, constants)
        self._worker.opens_with([wrap_request(settings), OpenRequest(*files, seed=0)])

    def start(self) -> None:
        """Start the process and do not wait for it: several import what they need at the same time, and are then prepared in turn."""
        # What is in the way is said by ``prepare``.
        with contextlib.suppress(DeviceError):
            self._worker.start()

    def prepare(self, limit_s: float = PREPARE_TIMEOUT_S) -> BaselineResult | Failure:
        """Compile or capture; call once, before the first round.

        A model that does not run there, though its program may, gives way to the program; ``why_not_model`` then says why.

        Args:
            limit_s: how long compiling may take, and how long a block.
        """
        self._limit_s = limit_s
        if self._model is not None:
            found = self._prepared(self._model)
            # The program would take as long to compile as its model.
            if not isinstance(found, Failure) or found.kind is FailureKind.TIMEOUT:
                return found
            self.why_not_model = found.detail
        return self._prepared(None)

    def _prepared(self, model: ModelCall | None) -> BaselineResult | Failure:
        try:
            call = compile_request(self._worker, *model, threads=1) if model is not None else None
        except Exception as error:
            let_through(error)
            return Failure(FailureKind.UNAVAILABLE, f"the model's call cannot be handed to another process: {describe(error).detail}")
        answer = self._single(wrap_request(BaselineBody(self.kind.value, call)))
        if isinstance(answer, ExtraAnswer) and (result := unwrap(answer, BaselineResult)) is not None:
            return result
        return _failure(answer)

    def round_us(self) -> float | Failure:
        """Time of one run in microseconds, the mean over a block."""
        answer = self._single(RoundRequest(0.0), of_same=True)
        return answer.time_us if isinstance(answer, RoundAnswer) else _failure(answer)

    def close(self) -> None:
        """End the process. May be called twice."""
        self._worker.close()

    def __enter__(self) -> CudaBaseline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _single(self, request: Request, *, of_same: bool = False) -> Answer | Failure:
        try:
            answers = list(self._worker.ask(request, of_same=of_same, timeout_s=self._limit_s))
        except WorkerDied as death:
            return death.failure
        except DeviceError as error:
            # A rival that cannot even be opened (a second copy of the weights does not fit) costs its row, not the job.
            return Failure(FailureKind.CRASH, str(error))
        return answers[-1] if answers else _NO_ANSWER


def _failure(answer: Answer | Failure) -> Failure:
    if isinstance(answer, Failure):
        return answer
    return answer.failure if isinstance(answer, Broken) else _NO_ANSWER
