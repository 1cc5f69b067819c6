"""An operator graph as something to launch on the double of CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autosched.core.graph import OpGraph, ValueRole
from autosched.runtime.cuda.captured import Span
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_cuda_values import POISON, FakeMemory, FakeTensor, mix


class FakeProgram:
    """An :class:`OpGraph` as something to launch on the double: every operator mixes the numbers it reads into those it writes.

    ``kernels_of`` says how many kernels an operator launches (default 1; a view of another value launches none).
    ``fail_at`` maps an operator to an exception it raises.
    """

    def __init__(
        self,
        cuda: FakeCuda,
        graph: OpGraph,
        *,
        kernels_of: Mapping[int, int] | None = None,
        fail_at: Mapping[int, BaseException] | None = None,
        durations_us: Mapping[int, float] | None = None,
    ) -> None:
        self.cuda = cuda
        self.graph = graph
        self.in_place = ()
        self.otherwise = None
        self._kernels_of = dict(kernels_of or {})
        self._fail_at = dict(fail_at or {})
        self._durations = dict(durations_us or {})
        self.kernels = tuple(self._kernel(operator.index) for operator in graph.operators)
        self._constants = {value.index: cuda.tensor(mix(3, value.index)) for value in graph.values if value.role is ValueRole.CONSTANT}

    def new_slots(self, inputs: Sequence[FakeTensor]) -> list[FakeTensor | None]:
        slots: list[FakeTensor | None] = [None] * len(self.graph.values)
        for value, tensor in self._constants.items():
            slots[value] = tensor
        for value, tensor in zip(self.graph.inputs, inputs, strict=True):
            slots[value] = tensor
        return slots

    def outputs(self, slots: list[FakeTensor | None]) -> list[FakeTensor | None]:
        return [slots[value] for value in self.graph.outputs]

    def run(self, inputs: Sequence[FakeTensor], before_each: Callable[[], None] | None = None) -> list[FakeTensor | None]:
        """Every operator in order on the current stream."""
        slots = self.new_slots(inputs)
        for kernel in self.kernels:
            if before_each is not None:
                before_each()
            kernel(slots)
        return self.outputs(slots)

    def answer(self, inputs: Sequence[FakeTensor]) -> list[int]:
        """The reference: the numbers of :meth:`run` outside any capture."""
        return [self.cuda.number(tensor) for tensor in self.run(inputs) if tensor is not None]

    def inputs(self, seed: int) -> list[FakeTensor]:
        return [self.cuda.tensor(mix(seed, value), self.graph.values[value].spec.bytes) for value in self.graph.inputs]

    def _kernel(self, index: int) -> Callable[[list[FakeTensor | None]], None]:
        operator = self.graph.operators[index]
        values = self.graph.values

        def run(slots: list[FakeTensor | None]) -> None:
            if index in self._fail_at:
                raise self._fail_at[index]
            reads = [slots[value].storage.span for value in operator.reads]  # type: ignore[union-attr]
            changed = [slots[value].storage.span for value in operator.mutates]  # type: ignore[union-attr]
            made: list[Span] = []
            for value in operator.writes:
                storage = values[value].storage
                if storage != value and slots[storage] is not None:
                    slots[value] = FakeTensor(slots[storage].storage, values[value].spec.bytes)  # type: ignore[union-attr]
                else:
                    slots[value] = self.cuda.allocate(values[value].spec.bytes)
                    made.append(slots[value].storage.span)  # type: ignore[union-attr]
            if not made and not changed:
                return  # a view launches nothing
            kernels = self._kernels_of.get(index, 1)
            for turn in range(kernels):
                last = turn == kernels - 1

                def kernel(memory: FakeMemory, last: bool = last) -> Callable[[FakeMemory], None]:
                    number = mix(index, *(memory.read(span) for span in (*reads, *changed)))

                    def commit(target: FakeMemory) -> None:
                        for position, span in enumerate(made + changed):
                            target.write(span, mix(number, position) if last else POISON - 1)

                    return commit

                self.cuda.launch(kernel, self._durations.get(index))

        return run
