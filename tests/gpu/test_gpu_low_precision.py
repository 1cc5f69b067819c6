"""Models in few bits and a user's own Triton kernel on the device: the same numbers from every schedule, in graphs that pass the audit."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.custom_operators import trusting
from autosched.core.schedule import Schedule, sequential
from autosched.device.base import Comparison
from autosched.runtime.cuda.audit import audit_graph
from autosched.runtime.cuda.captured import CapturedGraph
from autosched.runtime.kernels import random_inputs
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.rounding import coarsest_of
from autosched.runtime.trees import output_tensors, unflatten_inputs
from tests.conformance.graphs import random_placement
from tests.conformance.quantised import Quantised
from tests.gpu.gpu_rig import Rig, open_session, rehearsing, without_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


class Branches(nn.Module):
    """Two products of the same input in parallel, so that lanes have something to do; a subclass says how one is made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("left", "right"):
            weight = torch.randn(32, 64)
            scale = weight.abs().amax(1) / 127
            self.register_buffer(name, (weight / scale[:, None]).round().to(torch.int8))
            self.register_buffer(f"{name}_scale", scale)

    def product(self, x: Any, weight: Any, scale: Any) -> Any:
        """``x``: ``[32, 64]``, ``weight``: ``[32, 64]``, ``scale``: ``[32]``."""
        raise NotImplementedError

    def forward(self, x: Any) -> Any:
        """``x``: ``[32, 64]``."""
        return self.product(x, self.left, self.left_scale).relu() + self.product(x + 1, self.right, self.right_scale)


class WeightOnly(Branches):
    def product(self, x: Any, weight: Any, scale: Any) -> Any:
        return nn.functional.linear(x, weight.to(x.dtype) * scale[:, None])


class Dynamic(Branches):
    """Activations in eight bits as well."""

    def product(self, x: Any, weight: Any, scale: Any) -> Any:
        own = x.abs().amax(1, keepdim=True) / 127
        return torch._int_mm((x / own).round().to(torch.int8), weight.t()).to(x.dtype) * own * scale


class Autocast(Branches):
    def product(self, x: Any, weight: Any, scale: Any) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            return nn.functional.linear(x, weight.float() * scale[:, None]).float()


class Eight(Branches):
    """Products of floats of eight bits."""

    def product(self, x: Any, weight: Any, scale: Any) -> Any:
        small, own = (x * 16).to(torch.float8_e4m3fn), torch.full((), 1 / 16, device=x.device)
        unit = torch.full((), 0.01, device=x.device)
        return torch._scaled_mm(small, weight.to(torch.float8_e4m3fn).t(), scale_a=own, scale_b=unit, out_dtype=torch.bfloat16)


def _examples(captured: Captured, model: nn.Module) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Inputs, and the model's answers."""
    for seed in (11, 12):
        drawn = random_inputs(captured.program, seed)
        args, kwargs = unflatten_inputs(captured.program, [tensor.clone() for tensor in drawn])
        home = next(iter([*model.parameters(), *model.buffers()])).device
        with torch.inference_mode():
            answer = model(*[item.to(home) for item in args], **kwargs)
        yield drawn, [tensor.clone().cpu() for tensor in output_tensors(answer)]


def _schedules(captured: Captured) -> list[Schedule]:
    graph = captured.program.graph
    return [sequential(graph), random_placement(random.Random(1), graph, 2, 1)]


def _proved(captured: Captured, model: nn.Module) -> None:
    """Every schedule gives the bits of one stream, and within tolerance the model's numbers; its graph passes the audit."""
    graph = captured.program.graph
    inputs, references = zip(*_examples(captured, model), strict=True)
    session = open_session(captured.program, captured.constants)
    try:
        for schedule in _schedules(captured):
            made = session.compare(schedule, inputs, references)
            assert isinstance(made, Comparison), made
            assert made.bitwise
            assert made.within_tolerance, made.max_abs_error
            found = session.captured(schedule)
            assert isinstance(found, CapturedGraph), found
            assert audit_graph(graph, make_plan(graph, schedule), found).problems == ()
    finally:
        session.close()


def _proved_here(captured: Captured, model: nn.Module) -> None:
    """The same in this process, for models whose constants and operators are such as another one has taken to a measuring process."""
    graph = captured.program.graph
    rig = Rig(captured.program, dict(captured.constants))
    try:
        for schedule in _schedules(captured):
            plan = make_plan(graph, schedule)
            runner = rig.capture(plan, observe=True)
            for given, wanted in _examples(captured, model):
                tensors = [item.to(rig.backend.device) for item in given]
                made = runner(tensors)
                assert rig.backend.same(made, rig.measurer.reference(tensors))
                answer = compare([item.cpu() for item in made], wanted, coarsest=coarsest_of(graph))
                assert answer.within_tolerance, answer.reason
            assert runner.captured is not None
            assert audit_graph(graph, plan, runner.captured).problems == ()
            runner.close()
    finally:
        rig.close()


@pytest.mark.parametrize("kind", [WeightOnly, Dynamic, Quantised])
def test_integers_run_in_a_graph(kind: type[nn.Module]) -> None:
    model = kind().eval()
    x = torch.randn(32, 8 if kind is Quantised else 64)
    prove = _proved if kind is Dynamic else _proved_here
    prove(capture(model, (x,), target="cuda"), model)


def test_an_autocast_region_runs_in_a_graph() -> None:
    home = "cpu" if rehearsing() else "cuda"
    model = Autocast().eval().to(home)
    _proved_here(capture(model, (torch.randn(32, 64, device=home),), target="cuda"), model)


def test_floats_of_eight_bits_run_in_a_graph() -> None:
    if not without_gpu() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("products of float8 need compute capability 8.9")
    home = "cpu" if rehearsing() else "cuda"
    model = Eight().eval().to(home)
    _proved(capture(model, (torch.randn(32, 64, device=home),), target="cuda"), model)


_KERNELS = """
import torch
import triton
import triton.language as tl
from torch import library

triton_op, wrap_triton = library.triton_op, library.wrap_triton


@triton.jit
def scaled_sum(a, b, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    tl.store(out + place, tl.load(a + place, mask=inside) * 2 + tl.load(b + place, mask=inside), mask=inside)


@triton_op("gpulow::scaled_sum", mutates_args={})
def scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(a)  # not empty: the emulator computes nothing in Triton kernels, and what was there before would show
    wrap_triton(scaled_sum)[(triton.cdiv(out.numel(), 128),)](a, b, out, out.numel(), BLOCK=128)
    return out


class Registered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        return scaled(self.left(x), x) + scaled(self.right(x), x)


class Launches(Registered):
    def forward(self, x):
        y, out = self.left(x), torch.empty_like(x)
        wrap_triton(scaled_sum)[(triton.cdiv(out.numel(), 128),)](y, x, out, out.numel(), BLOCK=128)
        return out
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A module of a user's, with a Triton kernel that is an operator: a measuring process must be able to import it."""
    pytest.importorskip("triton")
    folder: Path = tmp_path_factory.mktemp("kernels")
    (folder / "autosched_gpu_low_kernels.py").write_text(_KERNELS, encoding="utf-8")
    sys.path.append(str(folder))
    try:
        import autosched_gpu_low_kernels as made

        yield made
    finally:
        sys.path.remove(str(folder))


@pytest.mark.gpu_only(reason="Triton needs a GPU")
def test_a_triton_kernel_that_is_an_operator_runs_in_a_graph(kernels: Any) -> None:
    torch.manual_seed(0)
    model = kernels.Registered().eval().cuda()
    with trusting(("gpulow",)):
        captured = capture(model, (torch.randn(64, 64, device="cuda"),))
        assert [operator.kind for operator in captured.program.graph.operators].count("gpulow::scaled_sum") == 2
        _proved(captured, model)


@pytest.mark.gpu_only(reason="Triton needs a GPU")
def test_a_triton_kernel_that_is_none_is_named(kernels: Any) -> None:
    from autosched.core.errors import UnsupportedGraph

    with pytest.raises(UnsupportedGraph, match=r"scaled_sum at .*triton_op"):
        capture(kernels.Launches().eval().cuda(), (torch.randn(64, 64, device="cuda"),))
