"""What was chosen by timing is noted, and taken again where the same is asked in the same place."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosched.runtime.inductor.choices import Answers, choices_into, described


@dataclass
class Candidate:
    name: str
    description: str = ""

    def output_node(self) -> str:
        return f"node of {self.name}"


def candidates(first: int) -> list[Candidate]:
    """As they come in one process: numbers go on from question to question."""
    return [Candidate("mm"), Candidate(f"triton_mm_{first}", "BLOCK_M=16"), Candidate(f"triton_mm_{first + 1}", "BLOCK_M=32")]


def test_what_is_taken_is_noted_without_its_number() -> None:
    answers = Answers()
    asked = answers.ask("mm float32[2, 2]", candidates(0))
    assert len(asked) == 3
    assert asked[2].output_node() == "node of triton_mm_1"
    answers.ask("mm float32[4, 4]", candidates(2))
    assert answers.given == (("mm float32[2, 2]", "triton_mm BLOCK_M=32"), ("mm float32[4, 4]", ""))


def test_an_answer_that_was_put_off_is_noted_when_it_is_given() -> None:
    answers = Answers()
    _, first, second = answers.ask("mm", candidates(0))
    answers.took(first)
    answers.took(second)
    answers.took(Candidate("somebody else's"))
    assert answers.given == (("mm", "triton_mm BLOCK_M=32"),)


def test_a_template_that_nothing_was_fused_into_says_so_and_stays_alone() -> None:
    answers = Answers()
    library, fused, alone = answers.ask("mm", candidates(0))
    answers.took(fused, template=True)
    assert answers.given == (("mm", "triton_mm BLOCK_M=16"),)
    with answers.nothing_more_fused():
        answers.took(alone, template=True)
        assert answers.given == (("mm", "triton_mm BLOCK_M=32, nothing fused into it"),)
        library.output_node()
        assert answers.given == (("mm", "mm"),)

    for text, kept in (("triton_mm BLOCK_M=32, nothing fused into it", True), ("triton_mm BLOCK_M=32", False), ("mm", False)):
        again, template = Answers((("mm", text),)), object()
        left = again.ask("mm", candidates(4))
        assert len(left) == 1
        left[0].output_node()
        again.made(left, template)
        assert again.stays_alone(template) is kept
        assert not again.stays_alone(object())
        assert again.given == again.wanted
    again = Answers()
    again.made(again.ask("mm", candidates(4)), template)
    assert not again.stays_alone(template)


def test_the_compiler_asks_whether_to_fuse_and_is_refused_for_what_stays_alone() -> None:
    from torch._inductor import scheduler

    before = scheduler.Scheduler.speedup_by_fusion
    template = object()
    answers = Answers((("mm", "triton_mm BLOCK_M=32, nothing fused into it"),))
    answers.made(answers.ask("mm", candidates(0)), template)
    nodes: Any = [SimpleNamespace(get_template_node=lambda made=made: made) for made in (template, None)]
    with choices_into(answers):
        for pair in (nodes, nodes[::-1]):
            found: Any = scheduler.Scheduler.speedup_by_fusion(None, *pair)  # type: ignore[arg-type]
            assert getattr(found, "should_fuse", found) is False
    assert scheduler.Scheduler.speedup_by_fusion is before


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ((("mm", "triton_mm BLOCK_M=32"),), ["triton_mm_8"]),
        ((("mm", "mm"),), ["mm"]),
        ((("mm", "triton_mm BLOCK_M=64"),), ["mm", "triton_mm_7", "triton_mm_8"]),  # not to be had here
        ((("bmm", "mm"),), ["mm", "triton_mm_7", "triton_mm_8"]),  # another question
        ((("mm", ""),), ["mm", "triton_mm_7", "triton_mm_8"]),
        ((), ["mm", "triton_mm_7", "triton_mm_8"]),
    ],
)
def test_what_is_wanted_is_all_that_is_left(wanted: tuple[tuple[str, str], ...], left: list[str]) -> None:
    assert [item.name for item in Answers(wanted).ask("mm", candidates(7))] == left


def test_the_same_question_may_have_two_answers() -> None:
    answers = Answers((("mm", "mm"), ("mm", "triton_mm BLOCK_M=16")))
    assert [answers.ask("mm", candidates(0))[0].name, answers.ask("mm", candidates(2))[0].name] == ["mm", "triton_mm_2"]


@pytest.mark.parametrize(("wanted", "found"), [("yes", True), ("no", False), ("", True), ("mm", True)])
def test_a_decision_that_is_wanted_is_not_timed(wanted: str, found: bool) -> None:
    timed: list[int] = []

    def time_it() -> bool:
        timed.append(1)
        return True

    answers = Answers((("mm", "mm"), ("pad mm", wanted)))
    answers.ask("mm", candidates(0))[0].output_node()
    assert answers.decide("pad mm", time_it) is found
    assert answers.given == (("mm", "mm"), ("pad mm", "yes" if found else "no"))
    assert len(timed) == (wanted not in ("yes", "no"))


def test_the_compiler_asks_whether_to_pad_and_to_combine_and_gets_its_own_back() -> None:
    from torch._inductor import config
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.scheduler import Scheduler

    scheduler: Any = Scheduler
    before = pad_mm._should_pad, scheduler.speedup_by_combo_kernel
    tensors = [torch.empty(3, 5), torch.empty(5, 7)]
    nodes = [SimpleNamespace(get_first_name=lambda name=name: name) for name in ("op1", "op4")]
    answers = Answers((("pad aten.mm float32[3, 5], float32[5, 7]", "yes"), ("combine 2 launches, op1 to op4", "yes")))
    with choices_into(answers), config.patch(benchmark_combo_kernel=True):
        assert pad_mm._should_pad(None, *tensors, torch.ops.aten.mm)
        assert scheduler.speedup_by_combo_kernel(None, nodes)
    assert answers.given == answers.wanted
    assert (pad_mm._should_pad, scheduler.speedup_by_combo_kernel) == before


def test_a_candidate_is_its_kind_and_what_it_was_made_with() -> None:
    assert described(Candidate("cpp_CppMicroGemmFP32Vec_12")) == "cpp_CppMicroGemmFP32Vec"
    assert described(Candidate("conv1x1_via_mm")) == "conv1x1_via_mm"
