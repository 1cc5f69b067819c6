"""Whole models with awkward corners, captured both ways and compared with eager: values and strides."""

import pytest
import torch
from torch import nn

from autosched import zoo
from autosched.capture.export import capture
from autosched.capture.sources import source_of
from autosched.core.variants import Lowering
from autosched.runtime.bundle.program_check import check_program
from autosched.runtime.kernels import bind
from autosched.runtime.state import state_of
from autosched.runtime.trees import flatten_inputs, output_tensors, packed_outputs


def compare(model, args, *, tolerance=1e-4, strides=True):
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(*args))
    for rewrite in (False, True):
        captured = capture(model, args, rewrite=rewrite)
        program = captured.program
        made = bind(program, captured.constants).run([*flatten_inputs(program, args), *state_of(program, model)])
        outputs = output_tensors(packed_outputs(program, made))
        for output, reference in zip(outputs, expected, strict=True):
            scale = max(1.0, float(reference.abs().max()))
            torch.testing.assert_close(output.clone(), reference, rtol=tolerance, atol=tolerance * scale)
            if strides:
                assert output.stride() == reference.stride()


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 5e-2), ("float16", 1e-2), ("float64", 1e-9)])
def test_other_dtypes(dtype, tolerance):
    made = zoo.load("autosched:toy", dtype=dtype)
    compare(made.model, made.args, tolerance=tolerance)


def test_a_model_that_is_channels_last_already():
    made = zoo.load("autosched:toy", batch=4)
    compare(made.model.to(memory_format=torch.channels_last), (made.args[0].to(memory_format=torch.channels_last),))


class Decoder(nn.Module):
    """Transposed convolution, interpolation, pixel shuffle, padding by name, flatten of a packed result, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.norm = nn.GroupNorm(2, 8)
        self.shuffle = nn.PixelShuffle(2)
        self.last = nn.Conv2d(2, 4, 3, padding="same")

    def forward(self, image):
        wide = nn.functional.interpolate(self.down(image), scale_factor=2, mode="bilinear")
        mixed = self.norm(self.up(self.down(image))) + wide
        return {"flat": self.last(self.shuffle(mixed)).flatten(1), "map": (mixed.softmax(1),)}


class SlicedWeights(nn.Module):
    """One parameter holds three projections; attention has its own fast path in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1536, 512) * 0.05)
        self.bias = nn.Parameter(torch.randn(1536))

    def forward(self, tokens):
        query = nn.functional.linear(tokens, self.weight[512:1024], self.bias[512:1024])
        return query * (tokens @ self.weight.t()[:, :512]).sigmoid()


class Cache(nn.Module):
    """Writes into a row of a buffer and returns what the buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 8))
        self.layer = nn.Linear(8, 8)

    def forward(self, tensor):
        self.rows[1:2] = self.layer(tensor)
        return self.rows.sum(0) + tensor, self.rows.clone()


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Decoder, (1, 3, 16, 16)),
        (SlicedWeights, (2, 32, 512)),
        (Cache, (1, 8)),
        (lambda: nn.LSTM(16, 16, batch_first=True), (2, 5, 16)),
        (lambda: nn.TransformerEncoderLayer(32, 4, batch_first=True), (2, 6, 32)),
    ],
    ids=["decoder", "sliced_weights", "cache", "lstm", "attention"],
)
def test_corners(model, shape):
    torch.manual_seed(0)
    compare(model().eval(), (torch.randn(shape),), strides=model in (Decoder, Cache))


def test_torchvision_is_no_part_of_torch():
    trace = (
        f'File "{torch.__path__[0]}vision/models/resnet.py", line 12, in forward\nFile "{torch.__path__[0]}/nn/conv.py", line 3, in forward'
    )
    assert source_of(trace).endswith("torchvision/models/resnet.py:12")


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x + mask).softmax(-1)


def test_an_input_given_twice_is_two_inputs() -> None:
    x = torch.randn(4, 4)
    program = capture(Masked().eval(), (x, x)).program
    assert all(any(value in operator.reads for operator in program.graph.operators) for value in program.graph.inputs)


def test_an_expanded_example_is_laid_out_like_any_call() -> None:
    program = capture(Masked().eval(), (torch.randn(4, 4), torch.randn(4).expand(4, 4))).program
    assert not any(program.graph.values[value].spec.overlaps for value in program.graph.inputs)


def test_an_example_without_elements_may_have_any_strides() -> None:
    # What an operator makes of nothing has strides of 0.
    model, args = Masked().eval(), (torch.randn(3, 1, 0, 4), torch.randn(3, 1, 0, 1) * 2)
    assert args[1].stride(0) == 0
    check_program(capture(model, args).program)


class Attends(torch.nn.Module):
    """Where nothing traces it, a kernel of its own answers, and lays its result out otherwise than the operators it is traced as."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str, torch.Tensor]:
        made, weights = self.attention(x, x, x)
        return made, "attention", weights


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED])
def test_an_output_is_laid_out_as_the_model_does_it_and_not_as_it_is_traced(lowering: Lowering) -> None:
    model, x = Attends().eval(), torch.randn(2, 4, 8)
    with torch.no_grad():
        made, _, weights = model(x)
    captured = capture(model, (x,), lowering=lowering)
    outputs = bind(captured.program, captured.constants).run([x])
    assert [output.stride() for output in outputs] == [made.stride(), weights.stride()] == [(32, 8, 1), (16, 4, 1)]
    torch.testing.assert_close(outputs, [made, weights])


def test_a_mask_with_infinities_is_drawn_from_its_finite_part() -> None:
    mask = torch.triu(torch.full((4, 4), float("-inf")), 1)
    program = capture(Masked().eval(), (torch.randn(4, 4), mask)).program
    assert (program.inputs[1].mean, program.inputs[1].std) == (0.0, 0.0)
    program = capture(Masked().eval(), (torch.randn(4, 4), torch.full((4, 4), float("nan")))).program
    assert (program.inputs[1].mean, program.inputs[1].std) == (0.0, 1.0)
