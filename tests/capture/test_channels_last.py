"""Channels-last order in programs for a GPU: where it pays, what is converted, and that nothing else changes."""

import importlib.util

import pytest
import torch
from torch import nn
from torch.nn import functional

from autosched.capture.export import capture, draft_of
from autosched.capture.passes import channels_last
from autosched.capture.passes.channels_last import in_channels_last_order, prefer_channels_last, worth_it
from autosched.capture.passes.identities import same_layout
from autosched.core.graph import TensorSpec
from autosched.core.specs import spec_of
from autosched.core.variants import Lowering
from autosched.runtime.binding import bind
from autosched.zoo import load
from tests.capture.test_rewrite_passes import Apply, check, kinds

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def conversions(draft) -> list[torch.memory_format]:
    """Layout of each conversion in the body, in order."""
    return [node.kwargs["memory_format"] for node in draft.nodes if node.name.endswith("_layout")]


def require_order(draft) -> None:
    """Every convolution reads and writes channels last."""
    for node in draft.nodes:
        if "conv" in node.kind:
            for value in (node.tensor("input"), node.outputs[0]):
                spec = draft.specs[value]
                assert in_channels_last_order(spec) or spec.shape[2:] == (1, 1), node.name
            weight = draft.specs[node.tensor("weight")]
            assert in_channels_last_order(weight) or weight.shape[2:] == (1, 1), node.name


def two(**options) -> dict[str, nn.Module]:
    return {"a": nn.Conv2d(3, 8, 3, padding=1, **options), "b": nn.Conv2d(8, 8, 3, padding=1, **options)}


def image(channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, 8, 8)


def test_one_conversion_for_the_input_and_one_for_each_weight():
    model = Apply(lambda m, x: m.b(torch.relu(m.a(x))), **two())
    draft = check(model, (image(),), prefer_channels_last, expected=3, tolerance=1e-4)
    assert conversions(draft) == [LAST]
    assert len(draft.prologue) == 2
    require_order(draft)


def test_all_readers_share_the_conversion():
    layers = {"a": nn.Conv2d(3, 3, 3, padding=1), "b": nn.Conv2d(3, 3, 1)}
    draft = check(Apply(lambda m, x: m.a(x) + m.b(x) + x, **layers), (image(),), prefer_channels_last, expected=2, tolerance=1e-4)
    assert conversions(draft) == [LAST]
    converted = next(node.outputs[0] for node in draft.nodes if node.kind == "aten::clone")
    assert sum(converted in node.reads() for node in draft.nodes) == 3
    require_order(draft)


def test_a_weight_used_twice_is_converted_once():
    draft = check(Apply(lambda m, x: m.b(m.b(m.a(x))), **two()), (image(),), prefer_channels_last, expected=3, tolerance=1e-4)
    assert len(draft.prologue) == 2


def test_a_model_that_is_channels_last_already_stays_as_it_is():
    model = Apply(lambda m, x: m.b(torch.relu(m.a(x))), **two()).to(memory_format=LAST)
    draft = check(model, (image().to(memory_format=LAST),), prefer_channels_last, expected=0)
    assert kinds(draft) == ["conv2d", "relu", "conv2d"]


def test_a_permuted_input_is_in_order_already():
    model = Apply(lambda m, x: m.a(x.permute(0, 3, 1, 2)), a=nn.Conv2d(3, 4, 3))
    draft = check(model, (torch.randn(2, 8, 8, 3),), prefer_channels_last, expected=1, tolerance=1e-4)
    assert conversions(draft) == []


def test_one_channel_is_in_no_order_and_gets_one():
    layers = {"a": nn.Conv2d(1, 4, 3), "b": nn.Conv2d(4, 4, 3)}
    draft = check(Apply(lambda m, x: m.b(m.a(x)), **layers), (image(1),), prefer_channels_last, expected=3, tolerance=1e-4)
    assert conversions(draft) == [LAST]
    require_order(draft)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: functional.pixel_shuffle(x, 2).repeat(1, 4, 1, 1),
        lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
        lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate"),
        lambda x: functional.channel_shuffle(x, 2),
        lambda x: x.roll(1, 2),
    ],
    ids=["pixel_shuffle", "reflect", "replicate", "channel_shuffle", "roll"],
)
def test_what_writes_row_major_on_a_gpu_is_given_that(between):
    draft = check(Apply(lambda m, x: m.b(between(m.a(x))), **two()), (image(),), prefer_channels_last, expected=5, tolerance=1e-4)
    assert conversions(draft) == [LAST, torch.contiguous_format, LAST]
    require_order(draft)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_norm_of_groups_is_given_what_this_version_writes_on_a_gpu(keeps: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channels_last, "group_norm_keeps_order", lambda: keeps)
    model = Apply(lambda m, x: m.b(functional.group_norm(m.a(x), 4)), **two())
    draft = check(model, (image(),), prefer_channels_last, expected=3 if keeps else 5, tolerance=1e-4)
    assert conversions(draft) == ([LAST] if keeps else [LAST, torch.contiguous_format, LAST])
    require_order(draft)


def test_padding_with_a_constant_keeps_the_order():
    model = Apply(lambda m, x: m.b(functional.pad(m.a(x), (1, 1, 1, 1))), **two())
    draft = check(model, (image(),), prefer_channels_last, expected=3, tolerance=1e-4)
    assert conversions(draft) == [LAST]


def test_an_input_for_each_branch_is_converted_once_each():
    def run(m, x, y):
        return m.b(torch.cat([m.a(x), m.a(y)], 1)[:, 4:12])

    draft = check(Apply(run, **two()), (image(), image()), prefer_channels_last, expected=4, tolerance=1e-4)
    assert conversions(draft) == [LAST, LAST]


@pytest.mark.parametrize("options", [{"groups": 4}, {"groups": 2}])
def test_models_of_grouped_convolutions_stay(options):
    conv = nn.Conv2d(8, 8, 3, **options)
    assert not worth_it(draft_of(Apply(lambda m, x: m.conv(x), conv=conv).eval(), (image(8),)))


def test_depthwise_convolutions_do_not_count_as_grouped():
    layers = {"deep": nn.Conv2d(8, 8, 3, groups=8, padding=1), "point": nn.Conv2d(8, 16, 1)}
    draft = check(Apply(lambda m, x: m.point(m.deep(x)), **layers), (image(8),), prefer_channels_last, expected=2, tolerance=1e-4)
    require_order(draft)


def test_a_grouped_convolution_among_heavier_ones_comes_along():
    layers = {"a": nn.Conv2d(8, 8, 3, padding=1), "b": nn.Conv2d(8, 8, 3, groups=4)}
    draft = check(Apply(lambda m, x: m.b(m.a(x)), **layers), (image(8),), prefer_channels_last, expected=3, tolerance=1e-4)
    require_order(draft)


def test_an_embedding_of_patches_before_a_long_model_stays():
    def run(m, x):
        x = m.patches(x).flatten(2).transpose(1, 2)
        for _ in range(30):
            x = torch.tanh(m.lin(x))
        return x

    layers = {"patches": nn.Conv2d(3, 8, 4, stride=4), "lin": nn.Linear(8, 8)}
    check(Apply(run, **layers), (image(),), prefer_channels_last, expected=0)


def test_transposed_convolutions_come_along():
    layers = {"down": nn.Conv2d(8, 16, 3, stride=2), "up": nn.ConvTranspose2d(16, 8, 2, stride=2)}
    draft = check(Apply(lambda m, x: m.up(torch.relu(m.down(x))), **layers), (image(8),), prefer_channels_last, expected=3, tolerance=1e-4)
    require_order(draft)


def test_what_no_tensor_core_takes_stays():
    check(Apply(lambda m, x: m.a(x), a=nn.Conv2d(3, 4, 3).double()), (image().double(),), prefer_channels_last, expected=0)
    check(Apply(lambda m, x: m.a(x), a=nn.Conv1d(3, 4, 3)), (torch.randn(2, 3, 8),), prefer_channels_last, expected=0)
    check(Apply(lambda m, x: m.a(x), a=nn.Conv3d(3, 4, 3)), (torch.randn(2, 3, 4, 8, 8),), prefer_channels_last, expected=0)
    check(Apply(lambda m, x: m.a(x), a=nn.Conv2d(3, 4, 3)), (torch.randn(3, 8, 8),), prefer_channels_last, expected=0)


def test_where_strides_are_part_of_the_result_nothing_changes():
    strided = Apply(lambda m, x: torch.as_strided(m.a(x), (2, 2), (1, 2)), a=nn.Conv2d(3, 4, 3))
    check(strided, (image(),), prefer_channels_last, expected=0)


def test_an_output_in_an_order_of_its_own_keeps_it():
    check(Apply(lambda m, x: m.a(x).transpose(2, 3), a=nn.Conv2d(3, 4, 3)), (image(),), prefer_channels_last, expected=0)


def test_the_weight_of_an_input_is_left_to_the_convolution():
    draft = check(Apply(lambda m, x, w: functional.conv2d(x, w)), (image(), torch.randn(4, 3, 3, 3)), prefer_channels_last, expected=1)
    assert draft.prologue == []


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision(kind):
    model = Apply(lambda m, x: m.b(torch.relu(m.a(x))), **two()).to(kind)
    draft = check(model, (image().to(kind),), prefer_channels_last, expected=3, tolerance=5e-2)
    require_order(draft)


def test_the_order_as_pytorch_sees_it():
    for shape in [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1)]:
        tensor = torch.randn(shape)
        assert not in_channels_last_order(spec_of(tensor))
        assert in_channels_last_order(spec_of(tensor.to(memory_format=LAST, copy=True)))
    part = torch.randn(2, 6, 4, 5).to(memory_format=LAST)[:, :3]
    assert in_channels_last_order(spec_of(part))
    assert not in_channels_last_order(TensorSpec((2, 3), "float32", (3, 1)))
    assert not in_channels_last_order(spec_of(torch.randn(1, 3, 1, 1).expand(2, 3, 4, 5)))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.last = nn.Linear(16 * 16, 5)

    def forward(self, x):
        x = self.stem(x)
        x = self.norm(torch.cat([self.left(x), self.right(x)], 1))
        return self.last(x.view(x.shape[0], -1)), x


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, Lowering.FUSED])
def test_programs_for_a_gpu_alone_and_their_outputs_look_as_before(lowering):
    model, x = _Net().eval(), image()
    captured = capture(model, (x,), target="cuda", lowering=lowering)
    graph = captured.program.graph
    assert dict((item.name, item.applied) for item in captured.rewrites)["channels_last"] == 3
    made = bind(captured.program, captured.constants).run([x])
    for value, tensor, reference in zip(graph.outputs, made, model(x), strict=True):
        torch.testing.assert_close(tensor, reference, rtol=1e-4, atol=1e-4)
        assert tensor.stride() == reference.stride() == graph.values[value].spec.strides
    pictures = [graph.values[value].spec for item in graph.operators for value in item.writes if value not in graph.outputs]
    assert all(in_channels_last_order(spec) for spec in pictures if len(spec.shape) == 4)
    there = capture(model, (x,), target="cuda", lowering=Lowering.ATEN)
    assert not any("memory_format" in str(call.kwargs) for item in there.program.graph.operators for call in item.calls)
    here = capture(model, (x,), target="cpu", lowering=lowering)
    assert "channels_last" not in [item.name for item in here.rewrites]


def test_observing_again_finds_the_same_layouts():
    model = Apply(lambda m, x: m.b(functional.group_norm(torch.relu(m.a(x)), 4)), **two()).eval()
    draft = draft_of(model, (image(),))
    prefer_channels_last(draft)
    walked = dict(draft.specs)
    draft.observe()
    assert walked.keys() == draft.specs.keys()
    assert all(same_layout(walked[value], spec) for value, spec in draft.specs.items())


def zoo_draft(name: str, side: int = 0):
    """The draft of a model of the zoo, on a square image of ``side`` pixels if that is given; and the model's own output."""
    if (package := name.partition(":")[0]) != "autosched" and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    made = load(name)
    args, kwargs = ((torch.randn(1, 3, side, side),), {}) if side else (made.args, made.kwargs)
    with torch.no_grad():
        reference = torch.utils._pytree.tree_leaves(made.model(*args, **kwargs))[0]
    return draft_of(made.model, args, kwargs), reference


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "inception_v3", "resnet50", "squeezenet1_1", "densenet121", "mobilenet_v2"])
def test_convolution_nets_have_one_conversion(name):
    draft, reference = zoo_draft(f"torchvision:{name}", 96 if name == "inception_v3" else 64)
    assert prefer_channels_last(draft) > 1
    assert conversions(draft) == [LAST]
    made = draft.observe()
    require_order(draft)
    error = (made[draft.output_values()[0]] - reference).abs().max() / reference.abs().max()
    assert float(error) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autosched:deepfm", "transformers:distilbert", "transformers:t5", "transformers:vit"])
def test_models_of_other_work_have_none(name):
    draft, _ = zoo_draft(name)
    assert prefer_channels_last(draft) == 0
    assert conversions(draft) == []
