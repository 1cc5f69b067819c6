"""Which kernel Inductor took wherever it chose one by timing, noted while it compiles, and taken again without timing anything.

Timing the same candidates twice may give two answers, on another machine or with another number of threads; a schedule is for the launches
of one of them. So the answers travel with the program, as text: a kernel is named by its kind and its tile, not by its code.

Private interfaces, the same in PyTorch 2.11 to 2.13: ``AlgorithmSelectorCache`` is asked each question, and ``MultiTemplateBuffer`` is
where the answer is put off until it is known what can be fused. Where they are absent nothing is noted and nothing taken again: Inductor
then chooses for itself.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_NUMBER = re.compile(r"_\d+$")

Choices = tuple[tuple[str, str], ...]


@dataclass
class Answers:
    """Answers to take, and those that were given.

    Args:
        wanted: questions and answers in the order asked; a question that differs from what is asked in its place is not answered.
    """

    wanted: Choices = ()
    _questions: list[str] = field(default_factory=list)
    _given: dict[int, str] = field(default_factory=dict)
    _callers: dict[int, tuple[Any, int]] = field(default_factory=dict)  # held, so that no other gets its identity

    @property
    def given(self) -> Choices:
        """Every question that was asked, in order, and its answer."""
        return tuple((question, self._given.get(place, "")) for place, question in enumerate(self._questions))

    def ask(self, question: str, candidates: Sequence[Any]) -> list[Any]:
        """The candidates that are left: the one wanted, or all of them."""
        place = len(self._questions)
        self._questions.append(question)
        wanted = self.wanted[place][1] if place < len(self.wanted) and self.wanted[place][0] == question else ""
        found = [item for item in candidates if wanted and described(item) == wanted][:1]
        for item in found or candidates:
            self._callers[id(item)] = item, place
            # An answer is asked for its node when it is taken, and not before.
            item.output_node = self._noting(item, item.output_node)
        return found or list(candidates)

    def took(self, candidate: Any) -> None:
        """``candidate`` was taken."""
        known = self._callers.get(id(candidate))
        if known is not None:
            self._given[known[1]] = described(candidate)

    def _noting(self, candidate: Any, output_node: Callable[[], Any]) -> Callable[[], Any]:
        def noting() -> Any:
            self.took(candidate)
            return output_node()

        return noting


def described(candidate: Any) -> str:
    """A candidate by its kind and what it was made with, without its number in this process."""
    return f"{_NUMBER.sub('', str(candidate.name))} {getattr(candidate, 'description', '') or ''}".strip()


@contextlib.contextmanager
def choices_into(answers: Answers) -> Iterator[None]:
    """Note in ``answers`` what is chosen within the block, and take what is wanted there."""
    try:
        from torch._inductor.ir import MultiTemplateBuffer
        from torch._inductor.select_algorithm import AlgorithmSelectorCache
    except ImportError:
        yield
        return
    selector: Any = AlgorithmSelectorCache
    buffer: Any = MultiTemplateBuffer
    choose, finalize = vars(selector).get("__call__"), vars(buffer).get("finalize_as_triton_caller")
    if choose is None or finalize is None:
        yield
        return

    def asked(self: Any, name: str, choices: list[Any], input_nodes: Any, *args: Any, **kwargs: Any) -> Any:
        if len(choices) > 1:
            choices = answers.ask(_question(name, input_nodes), choices)
        return choose(self, name, choices, input_nodes, *args, **kwargs)

    def finalized(self: Any, caller: Any) -> Any:
        answers.took(caller)
        return finalize(self, caller)

    selector.__call__ = asked
    buffer.finalize_as_triton_caller = finalized
    try:
        yield
    finally:
        selector.__call__ = choose
        buffer.finalize_as_triton_caller = finalize


def _question(name: str, inputs: Sequence[Any]) -> str:
    shapes = (f"{str(item.get_dtype()).removeprefix('torch.')}{[int(size) for size in item.get_size()]}" for item in inputs)
    return f"{name} " + ", ".join(shapes)
