"""One baseline, seen from the tuning process: prepared once, then timed a block at a time beside the schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autosched.core.program import Program
from autosched.core.program_json import encode_program
from autosched.core.records import Failure, FailureKind
from autosched.device.cuda.baselines import BaselineKind
from autosched.device.cuda.messages import BaselineBody, BaselineResult, SettingsBody, unwrap, wrap_request
from autosched.device.worker import Worker, WorkerDied
from autosched.device.worker_messages import Answer, Broken, ExtraAnswer, OpenRequest, Request, RoundAnswer, RoundRequest

if TYPE_CHECKING:
    import torch

MODULE = "autosched.device.cuda.baseline_main"
_NO_ANSWER = Failure(FailureKind.CRASH, "the baseline's process gave no answer")
# Autotuning a net of some hundred shapes takes minutes.
_PREPARE_TIMEOUT_S = 900.0


class CudaBaseline:
    """A baseline of a program in a process of its own.

    Args:
        program, constants: as in ``Device.open``.
        kind: what to time.
        settings: of this process.
        seed: of the inputs.
    """

    def __init__(
        self, program: Program, constants: Mapping[int, torch.Tensor], kind: BaselineKind, settings: SettingsBody, *, seed: int = 0
    ) -> None:
        self.kind = kind
        self._worker = Worker(MODULE, timeout_s=_PREPARE_TIMEOUT_S, start_timeout_s=_PREPARE_TIMEOUT_S)
        program_file = self._worker.folder / "program.json"
        program_file.write_bytes(encode_program(program))
        tensors = {str(value): tensor.cpu() for value, tensor in constants.items()}
        constants_file = self._worker.write_tensors("constants.safetensors", tensors)
        self._worker.opens_with([wrap_request(settings), OpenRequest(str(program_file), str(constants_file), seed)])

    def prepare(self) -> BaselineResult | Failure:
        """Compile or capture; call once, before the first round."""
        answer = self._single(wrap_request(BaselineBody(self.kind.value)))
        if isinstance(answer, ExtraAnswer) and (result := unwrap(answer, BaselineResult)) is not None:
            return result
        return _failure(answer)

    def round_us(self, min_block_us: float = 0.0) -> float | Failure:
        """Time of one run in microseconds, the mean over a block."""
        answer = self._single(RoundRequest(min_block_us))
        return answer.time_us if isinstance(answer, RoundAnswer) else _failure(answer)

    def close(self) -> None:
        """End the process. May be called twice."""
        self._worker.close()

    def __enter__(self) -> CudaBaseline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _single(self, request: Request) -> Answer | Failure:
        try:
            answers = list(self._worker.ask(request))
        except WorkerDied as death:
            return death.failure
        return answers[-1] if answers else _NO_ANSWER


def _failure(answer: Answer | Failure) -> Failure:
    if isinstance(answer, Failure):
        return answer
    return answer.failure if isinstance(answer, Broken) else _NO_ANSWER
