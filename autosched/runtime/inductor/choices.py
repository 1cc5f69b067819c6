"""What Inductor decided by timing, noted while it compiles, and taken again without timing anything.

Timing the same candidates twice may give two answers, on another machine or with another number of threads; a schedule is for the launches
of one of them. So the answers travel with the program, as text: a kernel is named by its kind and its tile, not by its code. On a GPU two
more questions decide what is launched: whether the factors of a product are padded to a multiple of what its library likes, in every mode,
and whether launches are combined into one. Whether a template and what comes before or after it are one launch is timed too, but only while
more than one template is left: of a single one, Inductor fuses all it can. So an answer says of a template if nothing was fused into it.

Private interfaces, the same in PyTorch 2.11 to 2.15: ``AlgorithmSelectorCache`` is asked which kernel, and ``MultiTemplateBuffer`` is
where that answer is put off until it is known what can be fused; ``Scheduler.speedup_by_fusion`` is asked for each such fusion, and
``Scheduler.finalize_multi_template_buffers`` is for what is left when all are done; ``pad_mm._should_pad`` and
``Scheduler.speedup_by_combo_kernel`` are asked the other two. Where they are absent nothing is noted and nothing taken again: Inductor then
decides for itself.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_NUMBER = re.compile(r"_\d+$")
_YES, _NO = "yes", "no"
_ALONE = ", nothing fused into it"

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
    _alone: dict[int, Any] = field(default_factory=dict)  # templates, held likewise
    _all_fused: bool = False

    @property
    def given(self) -> Choices:
        """Every question that was asked, in order, and its answer."""
        return tuple((question, self._given.get(place, "")) for place, question in enumerate(self._questions))

    def ask(self, question: str, candidates: Sequence[Any]) -> list[Any]:
        """The candidates that are left: the one wanted, or all of them."""
        place, wanted = self._next(question)
        found = [item for item in candidates if wanted and described(item) == wanted.removesuffix(_ALONE)][:1]
        for item in found or candidates:
            self._callers[id(item)] = item, place
            # An answer is asked for its node when it is taken, and not before.
            item.output_node = self._noting(item, item.output_node)
        return found or list(candidates)

    def decide(self, question: str, time_it: Callable[[], bool]) -> bool:
        """Yes or no: as wanted, else as ``time_it`` finds."""
        place, wanted = self._next(question)
        found = wanted == _YES if wanted in (_YES, _NO) else time_it()
        self._given[place] = _YES if found else _NO
        return found

    def _next(self, question: str) -> tuple[int, str]:
        """The place of a question, and the answer wanted there; empty if none is."""
        place = len(self._questions)
        self._questions.append(question)
        return place, self.wanted[place][1] if place < len(self.wanted) and self.wanted[place][0] == question else ""

    def took(self, candidate: Any, *, template: bool = False) -> None:
        """``candidate`` was taken; ``template``: what could be fused into it, has been."""
        known = self._callers.get(id(candidate))
        if known is not None:
            self._given[known[1]] = described(candidate) + (_ALONE if template and self._all_fused else "")

    @contextlib.contextmanager
    def nothing_more_fused(self) -> Iterator[None]:
        """Templates that are taken within the block have had nothing fused into them."""
        self._all_fused = True
        try:
            yield
        finally:
            self._all_fused = False

    def made(self, candidates: Sequence[Any], template: Any) -> None:
        """Note that ``template`` was made of ``candidates``, what :meth:`ask` has left."""
        _, place = self._callers[id(candidates[0])]
        if len(candidates) == 1 and self.wanted[place][1].endswith(_ALONE):
            self._given[place] = self.wanted[place][1]
            self._alone[id(template)] = template

    def stays_alone(self, template: Any) -> bool:
        """Whether nothing may be fused into ``template``."""
        return id(template) in self._alone

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
    """Note in ``answers`` what is decided within the block, and decide as is wanted there."""
    with contextlib.ExitStack() as stack:
        for into in (_kernels_into, _fusions_into, _padding_into, _combining_into):
            with contextlib.suppress(ImportError, KeyError):
                stack.enter_context(into(answers))
        yield


@contextlib.contextmanager
def _kernels_into(answers: Answers) -> Iterator[None]:
    from torch._inductor.ir import MultiTemplateBuffer, MutableBox
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    choose: Any = vars(AlgorithmSelectorCache)["__call__"]
    finalize: Any = vars(MultiTemplateBuffer)["finalize_as_triton_caller"]

    def asked(self: Any, name: str, choices: list[Any], input_nodes: Any, *args: Any, **kwargs: Any) -> Any:
        if len(choices) < 2:
            return choose(self, name, choices, input_nodes, *args, **kwargs)
        left = answers.ask(_question(name, input_nodes), choices)
        made = template = choose(self, name, left, input_nodes, *args, **kwargs)
        while isinstance(template, MutableBox):
            template = template.data
        answers.made(left, template)
        return made

    def finalized(self: Any, caller: Any) -> Any:
        answers.took(caller, template=True)
        return finalize(self, caller)

    with _replaced(AlgorithmSelectorCache, "__call__", asked), _replaced(MultiTemplateBuffer, "finalize_as_triton_caller", finalized):
        yield


@contextlib.contextmanager
def _fusions_into(answers: Answers) -> Iterator[None]:
    from torch._inductor import scheduler

    pays: Any = vars(scheduler.Scheduler)["speedup_by_fusion"]
    finalize: Any = vars(scheduler.Scheduler)["finalize_multi_template_buffers"]

    def asked(self: Any, first: Any, second: Any) -> Any:
        if any(answers.stays_alone(node.get_template_node()) for node in (first, second)):
            return scheduler.FusionResult.fuse(False) if hasattr(scheduler, "FusionResult") else False
        return pays(self, first, second)

    def finalized(self: Any) -> Any:
        with answers.nothing_more_fused():
            return finalize(self)

    replaced = _replaced(scheduler.Scheduler, "finalize_multi_template_buffers", finalized)
    with _replaced(scheduler.Scheduler, "speedup_by_fusion", asked), replaced:
        yield


@contextlib.contextmanager
def _padding_into(answers: Answers) -> Iterator[None]:
    from torch._inductor.fx_passes import pad_mm

    should_pad: Any = vars(pad_mm)["_should_pad"]

    def asked(match: Any, first: Any, second: Any, product: Any, *rest: Any, **named: Any) -> bool:
        shapes = ", ".join(_shape(item.dtype, item.shape) for item in (first, second))
        return answers.decide(f"pad {product} {shapes}", lambda: bool(should_pad(match, first, second, product, *rest, **named)))

    with _replaced(pad_mm, "_should_pad", asked):
        yield


@contextlib.contextmanager
def _combining_into(answers: Answers) -> Iterator[None]:
    from torch._inductor import config
    from torch._inductor.scheduler import Scheduler

    pays: Any = vars(Scheduler)["speedup_by_combo_kernel"]

    def asked(self: Any, nodes: Sequence[Any]) -> bool:
        if not config.benchmark_combo_kernel:
            return bool(pays(self, nodes))
        first, last = (node.get_first_name() for node in (nodes[0], nodes[-1]))
        return answers.decide(f"combine {len(nodes)} launches, {first} to {last}", lambda: bool(pays(self, nodes)))

    with _replaced(Scheduler, "speedup_by_combo_kernel", asked):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _question(name: str, inputs: Sequence[Any]) -> str:
    return f"{name} " + ", ".join(_shape(item.get_dtype(), item.get_size()) for item in inputs)


def _shape(dtype: Any, sizes: Sequence[Any]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{[int(size) for size in sizes]}"
