"""What running in order, binding and comparing hold at a time: little beside the model, whatever its size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.program import Call
from autosched.device.cpu_loops import loop_of, values_of
from autosched.device.cpu_measure import CpuMeasurer
from autosched.runtime import kernels, numerics
from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.kernels import BoundProgram, bind
from autosched.runtime.numerics import compare
from autosched.runtime.widths import WidePrograms
from tests.conformance.programs import branches_program, chain_program


def _watched(bound: BoundProgram, seen: list[int]) -> BoundProgram:
    """The same program, noting before each operator how many intermediates there are."""
    made = {value for operator in bound.program.graph.operators for value in operator.writes}

    def watch(kernel: Kernel) -> Kernel:
        def run(slots: Slots) -> None:
            seen.append(sum(slots[value] is not None for value in made))
            kernel(slots)

        return run

    return dataclasses.replace(bound, kernels=tuple(watch(kernel) for kernel in bound.kernels))


def test_running_in_order_drops_what_nothing_reads_any_more() -> None:
    program, constants = chain_program(length=8)
    seen: list[int] = []
    inputs = [torch.randn(16, 16)]
    (output,) = _watched(bind(program, constants), seen).run(inputs)
    assert max(seen) == 1
    expected = inputs[0]
    for _ in range(8):
        expected = expected.sigmoid()
    assert torch.equal(output, expected)


def test_running_in_order_keeps_what_a_later_operator_reads() -> None:
    program, constants = branches_program(branches=3, depth=2)
    bound = bind(program, constants)
    inputs = [torch.randn(32, 32)]
    slots = bound.new_slots(inputs)
    for kernel in bound.kernels:
        kernel(slots)
    seen: list[int] = []
    assert torch.equal(_watched(bound, seen).run(inputs)[0], bound.outputs(slots)[0])
    assert 3 <= max(seen) < len(bound.kernels) - 1


class Normed(nn.Module):
    """Convolutions, each followed by a normalisation that is folded into it; the weight is packed then."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[batch, 4, height, width]``."""
        return self.layers(x)


def test_binding_folds_and_packs_one_weight_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Normed(8).eval(), torch.randn(1, 4, 6, 6)
    for norm in (item for item in model.modules() if isinstance(item, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        nn.init.normal_(norm.running_mean)
    captured = capture(model, (x,))
    program = captured.program
    made = {value for call in program.prologue for value in call.outputs}
    stays = {value for operator in program.graph.operators for value in operator.reads}
    between: list[int] = []
    real: Callable[[Call, torch.device], Kernel] = kernels.compile_call

    def watching(call: Call, device: torch.device) -> Kernel:
        run = real(call, device)

        def counted(slots: Slots) -> None:
            run(slots)
            weights = [slots[value] for value in made - stays if slots[value] is not None]
            between.append(sum(tuple(weight.shape) == (4, 4, 3, 3) for weight in weights))

        return counted if call in program.prologue else run

    monkeypatch.setattr(kernels, "compile_call", watching)
    bound = bind(program, captured.constants)
    assert len(between) == len(program.prologue)
    assert max(between) <= 1
    assert all(bound.constants[value] is None for value in made - stays)
    with torch.no_grad():
        assert compare(bound.run([x]), [model(x)]).within_tolerance


def test_only_what_the_operators_of_pairs_are_given_is_held() -> None:
    program, constants = chain_program(length=8)
    measurer = CpuMeasurer(WidePrograms(program, constants), [torch.randn(16, 16)], lambda operator: None)
    values = values_of(measurer, {3})
    operator = program.graph.operators[3]
    written = {value for item in program.graph.operators for value in item.writes}
    held = {value for value in written if values[value] is not None}
    assert held == {*operator.reads, *operator.writes, *program.graph.outputs}
    loop = loop_of(measurer, 3, 1, values)
    with torch.inference_mode():
        loop.run()
    assert torch.equal(values[operator.writes[0]], values[operator.reads[0]].sigmoid())


def _whole(a: torch.Tensor, b: torch.Tensor) -> numerics.Agreement:
    return compare([a], [b])


def _nudged(reference: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(reference) if reference.is_complex() else reference
    near = real * (1 + 4 * torch.finfo(real.dtype).eps)
    return torch.view_as_complex(near) if reference.is_complex() else near


CASES = {
    "equal": lambda b: b.clone(),
    "close": _nudged,
    "one apart": lambda b: b.index_fill(0, torch.tensor(2), 3.0),
    "negative zeros": lambda b: -(b * 0),
    "not a number at another place": lambda b: b.index_fill(0, torch.tensor(1), math.nan),
    "infinite at another place": lambda b: b.index_fill(0, torch.tensor(1), -math.inf),
}


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
COMBINED = [(case, dtype, special) for case in CASES for dtype in FLOATS for special in (None, math.nan, math.inf)]
COMBINED += [(case, torch.int64, None) for case in ("equal", "one apart")]


@pytest.mark.parametrize(("case", "dtype", "special"), COMBINED)
def test_comparing_in_pieces_says_what_comparing_at_once_says(
    case: str, dtype: torch.dtype, special: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = (torch.randn(5, 4, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    if special is not None:
        reference[3, 1] = special
    output = CASES[case](reference).to(dtype)
    at_once = _whole(output, reference)
    assert at_once.within_tolerance == (case in ("equal", "close"))
    assert at_once.bitwise == (case == "equal")
    for laid_out in (output, output.t().contiguous().t()):
        monkeypatch.setattr(numerics, "_PIECE", 3)
        in_pieces = _whole(laid_out, reference)
        assert (in_pieces.within_tolerance, in_pieces.bitwise, in_pieces.max_abs_error) == (
            at_once.within_tolerance,
            at_once.bitwise,
            at_once.max_abs_error,
        )
        monkeypatch.undo()


def test_the_scale_is_that_of_the_whole_output(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small elements are allowed what rounding their large neighbours leaves, in whichever piece those are.
    monkeypatch.setattr(numerics, "_PIECE", 2)
    reference = torch.tensor([0.0, 0.0, 0.0, 100.0])
    assert _whole(torch.tensor([5e-3, 0.0, 0.0, 100.0]), reference).within_tolerance
    apart = _whole(torch.tensor([5e-3, 0.0, 2e-2, 100.0]), reference)
    assert not apart.within_tolerance
    assert apart.reason == "output 0: 0.02 where the reference has 0 (torch.float32)"


def test_nothing_of_the_size_of_what_is_compared_is_made() -> None:
    elements = 3 * numerics._PIECE
    reference = torch.ones(elements)
    output = reference.clone()
    output[-1] += 1e-6
    given = [tensor.untyped_storage().data_ptr() for tensor in (output, reference)]
    made: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            tensors = [item for item in torch.utils._pytree.tree_leaves(result) if isinstance(item, torch.Tensor)]
            made.extend(item.numel() for item in tensors if item.untyped_storage().data_ptr() not in given)
            return result

    with Watch():
        agreement = _whole(output, reference)
    assert agreement.within_tolerance
    assert not agreement.bitwise
    assert max(made) <= numerics._PIECE
