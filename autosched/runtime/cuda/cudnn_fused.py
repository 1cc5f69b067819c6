"""Convolutions whose bias, residual and relu cuDNN applies before it writes the result: one kernel for three. All that knows how.

PyTorch's CUDA build has two operators for it, ``aten::cudnn_convolution_relu`` and ``aten::cudnn_convolution_add_relu``, which its own
frozen TorchScript uses. What they compute, as read in PyTorch's ``cudnn/ConvShared.cpp``: ``relu(convolution(x, w) + alpha * z + bias)``,
in the layout (channels first or last) that a plain convolution would choose. What follows from reading it:

* Shapes of bias and residual are not looked at. Here they are, in the program and again in the tensors, before every call.
* A missing bias is made of zeros, by a kernel of its own at every call.
* They take kernels that are not deterministic where those are faster, and so are refused where a user asks for deterministic ones.
* The result stands in for the residual that ``cudnn_convolution_relu`` does not have, multiplied by zero. That memory left behind by others
  does not show is tried with NaN in it.

cuDNN finds no kernel for some shapes, and where relu meets NaN it may write zero. So an operator is run both ways on made-up inputs before
it is offered, and is refused with a reason where it fails or differs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched.core.from_outside import let_through
from autosched.core.graph import Operator, OpGraph, TensorSpec
from autosched.core.program import Argument, Call, Many, Ref
from autosched.runtime.calls import Kernel, Slots, compile_call
from autosched.runtime.examples import example_of, same_strides
from autosched.runtime.float32 import convolutions_rounded, full_convolutions
from autosched.runtime.inductor.common import first_line
from autosched.runtime.numerics import compare
from autosched.runtime.thread_state import inference_mode

_GEOMETRY = ("input", "weight", "bias", "stride", "padding", "dilation")
_ARGUMENTS = {
    "aten::conv2d.default": (*_GEOMETRY, "groups"),
    "aten::convolution.default": (*_GEOMETRY, "transposed", "output_padding", "groups"),
}
_DTYPES = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class Fusion:
    """Calls of one operator that become one.

    Args:
        calls: the convolution, the addition if there is one, the relu.
        source, weight, bias, residual: the values read; ``bias`` and ``residual`` may be missing.
        alpha: factor of the residual.
        stride, padding, dilation: of height and width, in elements.
    """

    calls: tuple[Call, ...]
    source: int
    weight: int
    bias: int | None
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    residual: int | None = None
    alpha: float = 1.0

    @property
    def made(self) -> int:
        """The value it makes."""
        return self.calls[-1].outputs[0]

    def reads(self) -> tuple[int, ...]:
        """Every value it reads."""
        return tuple(value for value in (self.source, self.weight, self.bias, self.residual) if value is not None)


def supported() -> bool:
    """Whether this PyTorch has the operators for a GPU of NVIDIA's."""
    names = ("cudnn_convolution_relu", "cudnn_convolution_add_relu")
    built = torch.version.cuda is not None and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return built and all(hasattr(torch.ops.aten, name) for name in names)


def refusal(device: torch.device) -> str:
    """Why cuDNN's fused convolutions cannot run on ``device`` as this process is set; empty if they can."""
    if device.type != "cuda" or not supported():
        return f"torch {torch.__version__} has no fused convolutions of cuDNN's for {device.type}"
    if not torch.backends.cudnn.enabled:
        return "torch.backends.cudnn.enabled is False"
    if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
        return "deterministic kernels are asked for, and cuDNN's fused convolutions may not be"
    return ""


def fusions_of(operator: Operator, graph: OpGraph) -> tuple[Fusion, ...]:
    """What of ``operator`` cuDNN can make one kernel of, in the order of the calls; mostly one or nothing."""
    if operator.mutates or len(operator.calls) < 2:
        return ()
    # A result that someone else reads, in the operator or outside, has to be written.
    uses = Counter(value for call in operator.calls for value in call.tensors())
    uses.update(operator.writes)
    reader = {value: call for call in operator.calls for value in call.reads()}
    found: list[Fusion] = []
    taken: set[int] = set()
    # The last convolution first: of two that are added, the residual is the one that was ready before.
    for call in reversed(operator.calls):
        fusion = _fusion_at(call, graph, uses, reader)
        if fusion is not None and fusion.made not in taken:
            taken.add(fusion.made)
            found.append(fusion)
    return tuple(reversed(found))


def fused_steps(operator: Operator, graph: OpGraph, device: torch.device) -> list[Kernel]:
    """The operator's calls in order, those of each fusion as one, where its relu stands."""
    fusions = fusions_of(operator, graph)
    gone = {call for fusion in fusions for call in fusion.calls}
    last = {fusion.calls[-1]: fusion for fusion in fusions}
    steps: list[Kernel] = []
    for call in operator.calls:
        if call in last:
            steps.append(_step(last[call], graph))
        elif call not in gone:
            steps.append(compile_call(call, device))
    return steps


def difference(operator: Operator, graph: OpGraph, device: torch.device) -> str:
    """Run an operator both ways on made-up inputs: what is wrong with the fused way, empty if nothing.

    Where float32 is rounded to TF32, numbers are compared without that, and with it to the precision of float16, which is TF32's. Both
    must run: proofs of a schedule are made without it. The setting belongs to the whole process, and is put back.
    """
    try:
        rounds = convolutions_rounded() and any(graph.values[value].spec.dtype == "float32" for value in operator.reads)
        with inference_mode(True):
            if rounds and (problem := _difference(operator, graph, device, torch.float16)):
                return problem
            with full_convolutions() if rounds else contextlib.nullcontext():
                return _difference(operator, graph, device)
    except Exception as error:
        let_through(error)
        return f"cuDNN's fused convolution does not run: {first_line(error)}"


def _difference(operator: Operator, graph: OpGraph, device: torch.device, rounded: torch.dtype | None = None) -> str:
    given = {value: example_of(graph.values[value].spec, device, place) for place, value in enumerate(operator.reads)}

    def outputs(steps: Sequence[Callable[[Slots], Any]]) -> list[torch.Tensor]:
        slots: list[Any] = [None] * len(graph.values)
        for value, tensor in given.items():
            slots[value] = tensor
        for step in steps:
            step(slots)
        return [slots[value] for value in operator.writes]

    wanted = outputs([compile_call(call, device) for call in operator.calls])
    for fusion in fusions_of(operator, graph):
        # Given back at once, to be what the fused call finds where it writes.
        spec = graph.values[fusion.made].spec
        torch.full(spec.shape, float("nan"), dtype=getattr(torch, spec.dtype), device=device)
    fused = fused_steps(operator, graph, device)
    got = outputs(fused)
    if not compare(outputs(fused), got).bitwise:
        return "cuDNN's fused convolution computes other bits at every run"
    for mine, theirs in zip(got, wanted, strict=True):
        if mine.shape != theirs.shape or not same_strides(mine, theirs.stride()):
            return f"cuDNN's fused convolution returns strides {tuple(mine.stride())} for {tuple(theirs.stride())}"
    if rounded is not None:
        got, wanted = ([item.to(rounded) if item.dtype == torch.float32 else item for item in items] for items in (got, wanted))
    agreement = compare(got, wanted)
    return "" if agreement.within_tolerance else f"cuDNN's fused convolution computes something else: {agreement.reason}"


def _fusion_at(call: Call, graph: OpGraph, uses: Counter[int], reader: dict[int, Call]) -> Fusion | None:
    """The fusion that begins with ``call``, or None."""
    fusion = _convolution(call, graph)
    if fusion is None or uses[fusion.made] != 1:
        return None
    following = reader.get(fusion.made)
    if following is None or _is_relu(following):
        return None if following is None else _followed(fusion, (following,), None, 1.0, graph)
    summand = _summand(following, fusion.made)
    after = reader.get(following.outputs[0])
    if summand is None or after is None or not _is_relu(after) or uses[following.outputs[0]] != 1:
        return None
    return _followed(fusion, (following, after), *summand, graph)


def _followed(fusion: Fusion, calls: tuple[Call, ...], residual: int | None, alpha: float, graph: OpGraph) -> Fusion | None:
    plain = graph.values[fusion.made].spec
    others = [call.outputs[0] for call in calls] + ([residual] if residual is not None else [])
    if any(graph.values[value].spec.shape != plain.shape or graph.values[value].spec.dtype != plain.dtype for value in others):
        return None
    return Fusion(
        (*fusion.calls, *calls), fusion.source, fusion.weight, fusion.bias, fusion.stride, fusion.padding, fusion.dilation, fusion.groups,
        residual, alpha,
    )  # fmt: skip


def _convolution(call: Call, graph: OpGraph) -> Fusion | None:
    """A plain convolution of two dimensions as a fusion of nothing else, if everything about it fits together."""
    if call.target not in _ARGUMENTS or len(call.outputs) != 1:
        return None
    given: dict[str, Argument] = {**dict(zip(_ARGUMENTS[call.target], call.args, strict=False)), **dict(call.kwargs)}
    source, weight, bias, groups = given.get("input"), given.get("weight"), given.get("bias"), given.get("groups", 1)
    sizes = [_pair(given.get(name, default)) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    if not isinstance(source, Ref) or not isinstance(weight, Ref) or not (bias is None or isinstance(bias, Ref)):
        return None
    if given.get("transposed", False) or not isinstance(groups, int) or any(item is None for item in sizes):
        return None
    stride, padding, dilation = (item for item in sizes if item is not None)
    biased = None if bias is None else bias.value
    found = Fusion((call,), source.value, weight.value, biased, stride, padding, dilation, groups)
    return found if _fits(found, graph) else None


def _fits(fusion: Fusion, graph: OpGraph) -> bool:
    x, w, y = (graph.values[value].spec for value in (fusion.source, fusion.weight, fusion.made))
    specs = [graph.values[value].spec for value in (*fusion.reads(), fusion.made)]
    if len(x.shape) != 4 or len(w.shape) != 4 or x.dtype not in _DTYPES or any(item.dtype != x.dtype for item in specs):
        return False
    if fusion.groups < 1 or x.shape[1] != w.shape[1] * fusion.groups or w.shape[0] % fusion.groups or not y.elements:
        return False
    if fusion.bias is not None and graph.values[fusion.bias].spec.shape != w.shape[:1]:
        return False
    return y.shape == (x.shape[0], w.shape[0], *_spatial(x, w, fusion)) and all(len(item.strides) == len(item.shape) for item in specs)


def _spatial(x: TensorSpec, w: TensorSpec, fusion: Fusion) -> tuple[int, ...]:
    rows = zip(x.shape[2:], w.shape[2:], fusion.stride, fusion.padding, fusion.dilation, strict=True)
    return tuple((size + 2 * pad - dilated * (width - 1) - 1) // step + 1 if step > 0 else -1 for size, width, step, pad, dilated in rows)


def _summand(call: Call, made: int) -> tuple[int, float] | None:
    """The other summand and its factor, if ``call`` adds one to ``made`` as it is."""
    if call.target != "aten::add.Tensor" or len(call.args) != 2 or len(call.outputs) != 1:
        return None
    first, second = call.args
    alpha = dict(call.kwargs).get("alpha", 1)
    if not isinstance(first, Ref) or not isinstance(second, Ref) or not isinstance(alpha, int | float):
        return None
    if first.value == made:
        return second.value, float(alpha)
    return (first.value, 1.0) if alpha == 1 else None


def _is_relu(call: Call) -> bool:
    if len(call.outputs) != 1 or call.kwargs:
        return False
    return call.target == "aten::relu.default" or (call.target == "aten::clamp_min.default" and call.args[1:] in ((0,), (0.0,)))


def _pair(argument: Argument) -> tuple[int, int] | None:
    items = argument.items if isinstance(argument, Many) else (argument,)
    sizes = [item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
    if len(sizes) != len(items) or len(sizes) not in (1, 2):
        return None
    return sizes[0], sizes[-1]


def _step(fusion: Fusion, graph: OpGraph) -> Kernel:
    source, weight, bias, residual, made = fusion.source, fusion.weight, fusion.bias, fusion.residual, fusion.made
    geometry = (list(fusion.stride), list(fusion.padding), list(fusion.dilation), fusion.groups)
    expected = [(value, graph.values[value].spec.shape, getattr(torch, graph.values[value].spec.dtype)) for value in fusion.reads()]

    def run(slots: Slots) -> None:
        for value, shape, dtype in expected:
            if tuple(slots[value].shape) != shape or slots[value].dtype != dtype:
                raise RuntimeError(f"value {value} is {slots[value].dtype}{tuple(slots[value].shape)}; expected {dtype}{shape}")
        added = None if bias is None else slots[bias]
        if residual is None:
            slots[made] = torch.ops.aten.cudnn_convolution_relu.default(slots[source], slots[weight], added, *geometry)
        else:
            slots[made] = torch.ops.aten.cudnn_convolution_add_relu.default(
                slots[source], slots[weight], slots[residual], fusion.alpha, added, *geometry
            )

    return run
