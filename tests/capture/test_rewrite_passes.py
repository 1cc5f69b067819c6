"""Each rewrite on its own: it applies where it should, computes the same, and leaves alone what it must."""

from functools import partial

import pytest
import torch
from torch import nn

from autosched.capture.draft import Draft, Node, contiguous_strides
from autosched.capture.export import capture, draft_of
from autosched.capture.passes.attention import drop_idle_fills, settle_masks
from autosched.capture.passes.batch_norm import fold_batch_norm, fold_batch_norm_ahead, spell_batch_norms, whole_batch_norms
from autosched.capture.passes.channel_scales import fold_channel_scales
from autosched.capture.passes.common_calls import eliminate_common_calls
from autosched.capture.passes.constants import fold_constants
from autosched.capture.passes.cpu_convolution import pack_cpu_convolutions
from autosched.capture.passes.cpu_linear import pack_cpu_linears
from autosched.capture.passes.extremes import drop_places
from autosched.capture.passes.identities import drop_identities
from autosched.capture.passes.instance_norm import spell_instance_norms
from autosched.capture.passes.output_layout import restore_output_layout
from autosched.capture.passes.padding import hand_on_padding
from autosched.capture.passes.parallel_convolutions import join_parallel_convolutions
from autosched.core.program import Ref
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind
from tests.conformance.apply import Apply


def lively_norm(features: int) -> nn.BatchNorm2d:
    return lively(nn.BatchNorm2d(features))


def lively(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        norm.weight.normal_()
        norm.bias.normal_()
    return norm


def check(model: nn.Module, inputs: tuple[torch.Tensor, ...], rewrite, expected: int, tolerance: float = 1e-5) -> Draft:
    """Run one pass; outputs must agree with eager's. Returns the draft, observed."""
    model = model.eval()
    draft = draft_of(model, inputs)
    assert rewrite(draft) == expected
    made = draft.observe()
    with torch.no_grad():
        eager = torch.utils._pytree.tree_leaves(model(*inputs))
    for leaf, reference in zip(draft.output_leaves, eager, strict=True):
        assert isinstance(leaf, Ref)
        torch.testing.assert_close(made[leaf.value].clone(), reference, rtol=tolerance, atol=tolerance)
    return draft


def kinds(draft: Draft) -> list[str]:
    return [node.kind.partition("::")[2] for node in draft.nodes]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_identities_go():
    def run(m, x):
        x = m.drop(x)
        x = (x - 0) * 1
        x = x.expand(2, 4).contiguous().reshape(2, 4)
        return torch.cat([x.to(torch.float32)], 0).relu()

    draft = check(Apply(run, drop=nn.Dropout(0.5)), (torch.randn(2, 4),), drop_identities, expected=5)
    assert kinds(draft) == ["relu"]


def test_a_sum_with_zero_stays_where_it_changes_a_sign():
    def run(m, x, count):
        return (x + 0).reciprocal(), x - (-0.0), (x + -0.0).neg(), (count + 0).neg()

    draft = check(Apply(run), (torch.tensor([-0.0, 1.0]), torch.tensor([3, 0])), drop_identities, expected=2)
    assert kinds(draft) == ["add", "reciprocal", "sub", "neg", "neg"]


def test_a_sum_with_zero_stays_where_an_alpha_turns_the_zeros_sign():
    def run(m, x):
        return torch.add(x, -0.0, alpha=-1).reciprocal(), torch.sub(x, 0.0, alpha=-1).reciprocal()

    check(Apply(run), (torch.tensor([-0.0, 1.0]),), drop_identities, expected=0)


def test_what_changes_no_real_number_stays_beside_complex_ones():
    def run(m, x):
        return torch.view_as_real(x * 1).reciprocal(), torch.view_as_real(x - 0.0).reciprocal()

    check(Apply(run), (torch.tensor([complex(-0.0, -0.0)]),), drop_identities, expected=0)


def test_elements_repeated_once_go():
    draft = check(Apply(lambda m, x: x.repeat_interleave(1, dim=1).relu()), (torch.randn(2, 4),), drop_identities, expected=1)
    assert kinds(draft) == ["relu"]


def test_padding_by_nothing_goes():
    def run(m, x):
        return nn.functional.pad(nn.functional.pad(x, (0, 0, 0, 0)).relu(), (1, -1)).relu()

    draft = check(Apply(run), (torch.randn(2, 4),), drop_identities, expected=1)
    assert kinds(draft) == ["relu", "pad", "relu"]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_a_picture_resized_to_its_own_size_goes(mode):
    def run(m, x):
        return nn.functional.interpolate(x, x.shape[2:], mode=mode).relu(), nn.functional.interpolate(x, (6, 8), mode=mode).relu()

    draft = check(Apply(run), (torch.randn(1, 3, 5, 7),), drop_identities, expected=1)
    assert [kind.startswith(("upsample", "_upsample")) for kind in kinds(draft)] == [False, True, False]


def test_a_picture_whose_scale_is_rounded_away_stays():
    def run(m, x):
        return nn.functional.interpolate(x, scale_factor=1.1, mode="bilinear").relu()

    draft = check(Apply(run), (torch.randn(1, 3, 5, 7),), drop_identities, expected=0)
    assert kinds(draft) == ["upsample_bilinear2d", "relu"]


def test_look_alikes_of_identities_stay():
    def run(m, x):
        turned = x.permute(1, 0)  # square: same shape, other strides
        wider = (x > 0) + 0.0  # adds nothing but changes the dtype
        other = torch.flip(x, [0])
        return turned.relu(), wider.relu(), other.relu(), torch.div(x, 1, rounding_mode="floor").relu()

    check(Apply(run), (torch.randn(3, 3),), drop_identities, expected=0)


def test_a_copy_that_leaves_the_model_stays():
    draft = check(Apply(lambda m, x: x.clone()), (torch.randn(3),), drop_identities, expected=0)
    assert kinds(draft) == ["clone"]


def test_a_copy_of_memory_that_changes_stays():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.ones(3))

        def forward(self, x):
            old = self.state.clone()
            self.state.copy_(x)
            return old + 1

    draft = draft_of(Counts().eval(), (torch.zeros(3),))
    assert drop_identities(draft) == 0


def test_equal_calls_run_once():
    draft = check(Apply(lambda m, x: torch.relu(x + 1) + torch.relu(x + 1)), (torch.randn(3),), eliminate_common_calls, expected=2)
    assert kinds(draft) == ["add", "relu", "add"]


def test_calls_with_other_numbers_and_two_outputs_are_not_equal():
    check(Apply(lambda m, x: (x + 1, x + 1)), (torch.randn(3),), eliminate_common_calls, expected=0)
    check(Apply(lambda m, x: (x + 1).relu() + (x + 1.5).relu()), (torch.randn(3),), eliminate_common_calls, expected=0)


def test_what_depends_on_parameters_alone_moves_to_the_prologue():
    def run(m, x):
        return x @ torch.tanh(m.lin.weight.t()) + torch.arange(4)

    draft = check(Apply(run, lin=nn.Linear(4, 4)), (torch.randn(2, 4),), fold_constants, expected=3)
    assert kinds(draft) == ["matmul", "add"]
    assert len(draft.prologue) == 3


def test_what_asks_a_tensor_for_its_form_alone_moves_as_well():
    def run(m, x):
        dense = x.new_zeros(3), x.new_ones(2, 3), x.new_full((3,), 2), torch.zeros_like(x), torch.ones_like(x, dtype=torch.int64)
        return sum(dense) + torch.full_like(x, 0.5), torch.full_like(x, 1.5, dtype=torch.float64) * 2, torch.zeros_like(x > 0) & (x > 1)

    draft = check(Apply(run), (torch.randn(2, 3),), fold_constants, expected=13)
    assert kinds(draft) == ["add", "mul", "gt", "bitwise_and"]
    assert [node.kind for node in draft.prologue].count("aten::full") == 8


def test_what_asks_for_another_form_than_dense_stays_and_so_does_what_leaves():
    draft = check(Apply(lambda m, x: (torch.zeros_like(x.mT) + x.mT, x.new_zeros(3))), (torch.randn(2, 3),), fold_constants, expected=0)
    assert {"zeros_like", "new_zeros"} <= set(kinds(draft))


def test_an_output_is_computed_anew_each_time():
    draft = check(Apply(lambda m, x: (torch.tanh(m.lin.weight), x + 1), lin=nn.Linear(2, 2)), (torch.randn(2),), fold_constants, expected=0)
    assert "tanh" in kinds(draft)


def test_a_buffer_that_changes_is_no_constant():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.ones(3))

        def forward(self, x):
            seen = torch.tanh(self.state) + x
            self.state.copy_(x)
            return seen

    assert fold_constants(draft_of(Counts().eval(), (torch.zeros(3),))) == 0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
def test_batch_norm_folds_into_the_convolution(bias, groups):
    layers = {"conv": nn.Conv2d(4, 8, 3, bias=bias, groups=groups), "norm": lively_norm(8)}
    draft = check(Apply(lambda m, x: m.norm(m.conv(x)), **layers), (torch.randn(2, 4, 8, 8),), fold_batch_norm, expected=1, tolerance=1e-4)
    assert kinds(draft) == ["conv2d"]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": "same", "dilation": 2}, {"padding": "valid", "stride": 2}], ids=str)
def test_padding_given_by_name_becomes_numbers(dimensions, options):
    conv = getattr(nn, f"Conv{dimensions}d")(4, 6, 3, **options)
    inputs = (torch.randn(2, 4, *[9, 8, 7][:dimensions]),)
    draft = check(Apply(lambda m, x: m.conv(x), conv=conv), inputs, hand_on_padding, expected=1)
    assert [node.target for node in draft.nodes] == [f"aten::conv{dimensions}d.default"]


@pytest.mark.parametrize(("pads", "stride"), [((1, 1, 2, 2), 1), ((2, 2), 2), ((0, 0, 1, 1), (2, 1))])
@pytest.mark.parametrize("padding", [0, (1, 0), "same"])
def test_zeros_around_what_a_convolution_reads_become_its_padding(pads, stride, padding):
    conv = nn.Conv2d(4, 6, 3, 1 if padding == "same" else stride, padding)
    model = Apply(lambda m, x: m.conv(nn.functional.pad(x, pads)), conv=conv)
    draft = check(model, (torch.randn(2, 4, 8, 9),), hand_on_padding, expected=1)
    assert [node.target for node in draft.nodes] == ["aten::conv2d.default"]


def test_other_padding_stays_a_call():
    def twice(m, x):
        wide = nn.functional.pad(x, (1, 1, 1, 1))
        return m.conv(wide), wide

    x = torch.randn(2, 4, 8, 9)
    check(Apply(twice, conv=nn.Conv2d(4, 6, 3)), (x,), hand_on_padding, expected=0)
    for pads, options in (((0, 1, 0, 1), {}), ((-1, -1), {}), ((1, 1), {"value": 1.0}), ((1, 1, 1, 1), {"mode": "reflect"})):
        model = Apply(lambda m, x, pads=pads, options=options: m.conv(nn.functional.pad(x, pads, **options)), conv=nn.Conv2d(4, 6, 3))
        check(model, (x,), hand_on_padding, expected=0)
    channels = Apply(lambda m, x: m.conv(nn.functional.pad(x, (0, 0, 0, 0, 1, 1))), conv=nn.Conv2d(6, 6, 3))
    check(channels, (x,), hand_on_padding, expected=0)
    check(Apply(lambda m, x: m.conv(x), conv=nn.Conv2d(4, 6, 2, padding="same")), (x,), hand_on_padding, expected=0)


@pytest.mark.parametrize("bias", [True, False])
def test_batch_norm_folds_into_a_transposed_convolution(bias):
    layers = {"conv": nn.ConvTranspose2d(4, 6, 3, stride=2, bias=bias), "norm": lively_norm(6)}
    draft = check(Apply(lambda m, x: m.norm(m.conv(x)), **layers), (torch.randn(2, 4, 5, 7),), fold_batch_norm, expected=1, tolerance=1e-4)
    assert kinds(draft) == ["conv_transpose2d"]


def test_batch_norm_folds_in_half_precision_without_losing_more():
    model = Apply(lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(4, 8, 3), norm=lively_norm(8)).to(torch.bfloat16)
    check(model, (torch.randn(2, 4, 8, 8).to(torch.bfloat16),), fold_batch_norm, expected=1, tolerance=5e-2)


def test_batch_norm_stays_where_the_convolution_is_read_twice_or_absent():
    layers = {"conv": nn.Conv2d(4, 4, 1), "norm": lively_norm(4)}

    def twice(m, x):
        made = m.conv(x)
        return m.norm(made) + made

    check(Apply(twice, **layers), (torch.randn(1, 4, 5, 5),), fold_batch_norm, expected=0)
    check(Apply(lambda m, x: m.norm(x), **layers), (torch.randn(1, 4, 5, 5),), fold_batch_norm, expected=0)
    transposed = {"conv": nn.ConvTranspose2d(4, 4, 3, groups=2), "norm": lively_norm(4)}
    check(Apply(lambda m, x: m.norm(m.conv(x)), **transposed), (torch.randn(1, 4, 5, 5),), fold_batch_norm, expected=0)


@pytest.mark.parametrize(
    ("convolution", "shape"), [(nn.Conv2d(3, 8, 1), (3, 8, 8)), (nn.Conv1d(3, 8, 1), (3, 8)), (nn.Conv2d(3, 4, 1), (3, 8, 5))]
)
def test_batch_norm_stays_where_its_channels_are_not_the_convolutions(convolution, shape):
    norm = nn.BatchNorm1d(8)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    # What a convolution makes of a tensor without a batch, a norm takes for a batch.
    check(Apply(lambda m, x: m.norm(m.conv(x)), conv=convolution, norm=norm), (torch.randn(shape),), fold_batch_norm, expected=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (partial(nn.Conv2d, 4, 8, 1), (2, 4, 5, 6)),
        (partial(nn.Conv2d, 4, 8, 3, stride=2), (2, 4, 5, 6)),
        (partial(nn.Conv2d, 4, 4, 2, groups=4), (2, 4, 5, 6)),
        (partial(nn.Conv1d, 4, 8, 2), (2, 4, 5)),
        (partial(nn.Linear, 4, 8), (3, 4)),
    ],
)
def test_batch_norm_folds_into_the_layer_behind_it(layer, shape, bias):
    norm = lively(getattr(nn, f"BatchNorm{max(len(shape) - 2, 1)}d")(4))
    model = Apply(lambda m, x: m.layer(m.norm(x)), layer=layer(bias=bias), norm=norm)
    draft = check(model, (torch.randn(shape),), fold_batch_norm_ahead, expected=1, tolerance=1e-4)
    assert len(draft.nodes) == 1


@pytest.mark.parametrize(
    ("layer", "body"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), lambda m, x: m.layer(m.norm(x))),
        (nn.Conv2d(4, 4, 3, groups=2), lambda m, x: m.layer(m.norm(x))),
        (nn.Conv2d(4, 8, 3, groups=4), lambda m, x: m.layer(m.norm(x))),
        (nn.ConvTranspose2d(4, 4, 1), lambda m, x: m.layer(m.norm(x))),
        (nn.Conv2d(4, 4, 1), lambda m, x: m.layer(y := m.norm(x)) + y),
        (nn.Conv2d(4, 4, 1), lambda m, x: m.layer(m.norm(x).relu())),
        (nn.Conv2d(4, 4, 1), lambda m, x: nn.functional.conv2d(m.norm(x), m.layer.weight * x.sum())),
        (nn.Linear(4, 4), lambda m, x: m.layer(m.norm(x))),
    ],
)
def test_batch_norm_stays_where_the_layer_behind_it_reads_others(layer, body):
    check(Apply(body, layer=layer, norm=lively_norm(4)), (torch.randn(2, 4, 4, 4),), fold_batch_norm_ahead, expected=0)


def test_batch_norm_is_not_folded_ahead_where_a_bias_would_be_rounded():
    model = Apply(lambda m, x: m.conv(m.norm(x)), conv=nn.Conv2d(4, 8, 1), norm=lively_norm(4)).to(torch.bfloat16)
    check(model, (torch.randn(2, 4, 5, 5).to(torch.bfloat16),), fold_batch_norm_ahead, expected=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4), (1, 2, 3, 4)])
def test_batch_norm_folds_into_the_linear_layer(bias, shape):
    model = Apply(
        lambda m, x: m.norm((y := m.lin(x)).flatten(0, -2)).view_as(y), lin=nn.Linear(4, 8, bias=bias), norm=lively(nn.BatchNorm1d(8))
    )
    draft = check(model, (torch.randn(shape),), fold_batch_norm, expected=1, tolerance=1e-4)
    assert "_native_batch_norm_legit_no_training" not in kinds(draft)


def test_a_norm_of_another_dimension_than_a_layers_features_stays():
    square, norm = nn.Linear(4, 4), lively(nn.BatchNorm1d(4))
    for body, shape in [
        (lambda m, x: m.norm(m.lin(x).t().contiguous()), (4, 4)),
        (lambda m, x: m.norm(m.lin(x)), (2, 4, 4)),
        (lambda m, x: m.norm(m.lin(x).transpose(1, 2)), (2, 4, 4)),
        (lambda m, x: m.norm(m.lin(x).view(2, 4)), (1, 8)),
        (lambda m, x: m.norm(y := m.lin(x)) + y, (2, 4)),
        (lambda m, x: m.norm((x @ m.lin.weight[0]).view(1, 4)), (4, 4)),
    ]:
        layer = nn.Linear(8, 8) if shape == (1, 8) else square
        check(Apply(body, lin=layer, norm=norm), (torch.randn(shape),), fold_batch_norm, expected=0)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dimensions", [0, 1, 2, 3])
def test_a_batch_norm_of_numbers_side_by_side_is_one_product_and_sum(dimensions, affine):
    norm = getattr(nn, f"BatchNorm{max(dimensions, 1)}d")(6)
    lively(norm)
    if not affine:
        norm.weight = norm.bias = None
    places = [5, 4, 3][:dimensions]
    x = torch.randn(2, *places, 6).movedim(-1, 1)
    draft = check(Apply(lambda m, x: m.norm(x), norm=norm), (x,), spell_batch_norms, expected=1)
    assert kinds(draft) == ["addcmul"]
    assert draft.specs[draft.nodes[0].outputs[0]].strides == tuple(x.stride())


def test_other_batch_norms_stay_calls():
    check(Apply(lambda m, x: m.norm(x), norm=lively_norm(4)), (torch.randn(2, 4, 5, 6),), spell_batch_norms, expected=0)
    model = Apply(lambda m, x: m.norm(x), norm=lively_norm(4)).double()
    check(model, (torch.randn(2, 5, 6, 4).double().movedim(-1, 1),), spell_batch_norms, expected=0)


def test_lines_that_a_batch_norm_leaves_as_they_lie_are_viewed():
    """As of sequences: PyTorch's own kernel gives back lines that can be viewed as one row, without the copy that export has there."""
    norm, x = lively(nn.BatchNorm1d(4)), torch.randn(2, 6, 4)
    model = Apply(lambda m, x: m.norm(x.transpose(1, 2)).flatten(1).relu(), norm=norm).eval()
    found = capture(model, (x,))
    assert {item.name: item.applied for item in found.rewrites}["spell_batch_norms"] == 1
    with torch.no_grad():
        torch.testing.assert_close(bind(found.program, found.constants, "cpu").run([x])[0], model(x))
    beside = Apply(lambda m, x: (m.norm(x.transpose(1, 2)).relu(), x.as_strided((2,), (1,)) + 1), norm=norm)
    check(beside, (x,), spell_batch_norms, expected=0)


class Scaled(nn.Module):
    """A frozen batch norm, as detectors have it: ``layer(x) * scale + shift``."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer = layer
        self.scale, self.shift = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.shift + self.layer(x) * self.scale


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "options", "shape", "given"),
    [
        (nn.Conv2d, {"kernel_size": 3}, (6, 1, 1), (2, 4, 8, 9)),
        (nn.Conv2d, {"kernel_size": 3, "groups": 2}, (1, 6, 1, 1), (2, 4, 8, 9)),
        (nn.Conv1d, {"kernel_size": 3}, (6, 1), (2, 4, 8)),
        (nn.Conv1d, {"kernel_size": 3}, (6, 1), (4, 8)),
        (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2}, (6, 1, 1), (2, 4, 8, 9)),
        (nn.Linear, {}, (6,), (2, 5, 4)),
        (nn.Linear, {}, (1, 6), (2, 5, 4)),
    ],
)
def test_what_multiplies_and_shifts_each_feature_folds_into_the_layer(bias, kind, options, shape, given):
    model = Scaled(kind(4, 6, bias=bias, **options), *shape)
    draft = check(model, (torch.randn(given),), fold_channel_scales, expected=2, tolerance=1e-4)
    assert len(draft.nodes) == 1


def test_other_products_and_sums_stay():
    conv, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 8, 8)
    for shape in ((6,), (6, 1, 6), (1,), (2, 6, 1, 1), (1, 1, 6, 1, 1)):
        check(Scaled(conv, *shape), (x,), fold_channel_scales, expected=0)
    check(Scaled(nn.ConvTranspose2d(4, 6, 3, groups=2), 6, 1, 1), (x,), fold_channel_scales, expected=0)

    def twice(m, x):
        made = m.conv(x)
        return made, made * m.conv.bias[:, None, None]

    check(Apply(twice, conv=conv), (x,), fold_channel_scales, expected=0)
    check(Apply(lambda m, x, c: m.conv(x) * c, conv=conv), (x, torch.randn(6, 1, 1)), fold_channel_scales, expected=0)


@pytest.mark.parametrize("bias", [True, False])
def test_one_number_for_all_features_folds_where_features_are_pictures(bias):
    norm = lively_norm(4)
    norm.bias = norm.bias if bias else None
    for layer in (nn.Conv2d(4, 6, 3, bias=bias), norm):
        model = Apply(lambda m, x: m.layer(x) * 0.5 + 0, layer=layer)
        draft = check(model, (torch.randn(2, 4, 8, 9),), fold_channel_scales, expected=2)
        assert len(draft.nodes) == 1
    check(Apply(lambda m, x: m.layer(x) * 0.5, layer=nn.Linear(4, 6)), (torch.randn(2, 4),), fold_channel_scales, expected=0)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_branches_of_a_layer_become_one_convolution(dimensions, groups):
    kind, norm = getattr(nn, f"Conv{dimensions}d"), getattr(nn, f"BatchNorm{dimensions}d")
    layers = {
        "large": kind(4, 4, 3, padding=2, dilation=2, groups=groups), "small": kind(4, 4, 1, groups=groups, bias=False),
        "norm": lively(norm(4)), "other": lively(norm(4)),
    }  # fmt: skip

    def branches(m, x):
        y = x.sin()
        mixed = m.other(y) - (m.small(y) + m.large(y) + m.norm(y))
        return (y - mixed if groups == 4 else mixed), y

    draft = check(
        Apply(branches, **layers), (torch.randn(2, 4, *[9, 8, 7][:dimensions]),), join_parallel_convolutions, 3 + (groups == 4), 1e-4
    )
    assert kinds(draft) == ["sin", f"conv{dimensions}d"]


def test_a_kernel_lies_anywhere_within_the_other_and_strides_are_alike():
    layers = {"large": nn.Conv2d(4, 6, 5, 2, padding=(2, 1)), "small": nn.Conv2d(4, 6, (1, 3), 2)}
    draft = check(Apply(lambda m, x: m.small(x) - m.large(x), **layers), (torch.randn(1, 4, 9, 11),), join_parallel_convolutions, 1)
    assert kinds(draft) == ["conv2d"]


@pytest.mark.parametrize(
    ("one", "other", "size"),
    [
        (nn.Conv2d(4, 4, (1, 3), padding=(0, 1)), nn.Conv2d(4, 4, (3, 1), padding=(1, 0)), 8),
        (nn.Conv2d(4, 4, 3, padding=2, dilation=2), nn.Conv2d(4, 4, 3, padding=1), 8),
        (nn.Conv2d(4, 4, 5, padding=2), nn.Conv2d(4, 4, 3, padding=2, dilation=2), 8),
        (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=4), 8),
        (nn.Conv2d(4, 4, 3, padding=1, stride=2, groups=4), nn.Identity(), 1),
        (nn.Conv2d(4, 4, 4), nn.Conv2d(4, 4, 2, stride=2, padding=1), 8),
        (nn.ConvTranspose2d(4, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 3, padding=1), 8),
        (nn.Conv2d(4, 1, 1), nn.Identity(), 8),
        (nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Identity(), 8),
        (nn.Conv2d(4, 4, 2, padding=1, dilation=2), nn.Conv2d(4, 4, 1), 8),
    ],
)
def test_branches_that_no_call_computes_at_once_stay(one, other, size):
    check(Apply(lambda m, x: m.one(x) + m.other(x), one=one, other=other), (torch.randn(1, 4, size, size),), join_parallel_convolutions, 0)


def test_branches_that_are_read_twice_or_late_stay():
    layers = {"one": nn.Conv2d(4, 4, 3, padding=1), "other": nn.Conv2d(4, 4, 1)}

    def twice(m, x):
        made = m.one(x)
        return made + m.other(x), made

    def weighted(m, x):
        return torch.add(m.one(x), m.other(x), alpha=2)

    def of_another(m, x):
        return m.one(x) + m.other(x.sin())

    def doubled(m, x):
        made = m.one(x)
        return made + made

    for call in (twice, weighted, of_another, doubled):
        check(Apply(call, **layers), (torch.randn(1, 4, 6, 6),), join_parallel_convolutions, 0)


def test_branches_stay_where_what_they_read_changes_between_them():
    model = Apply(lambda m, x: m.one(x) + m.other(x), one=nn.Conv2d(4, 4, 3, padding=1), other=nn.Conv2d(4, 4, 1)).eval()
    draft = draft_of(model, (torch.randn(1, 4, 6, 6),))
    changed = Ref(draft.inputs[0])
    draft.nodes.insert(1, Node(torch.ops.aten.add_.Tensor, (changed, changed), {}, (-1,), "changes"))
    draft.observe()
    assert join_parallel_convolutions(draft) == 0


@pytest.mark.parametrize("transposed", [False, True])
def test_one_number_stands_for_all_dimensions_of_a_convolution(transposed):
    def run(m, x):
        large, small = (
            torch.convolution(x, layer.weight, None, [1], [pad], [1], transposed, [0], 1) for layer, pad in ((m.large, 1), (m.small, 0))
        )
        return large + small

    model = Apply(run, large=nn.Conv2d(4, 4, 3), small=nn.Conv2d(4, 4, 1)).eval()
    x = torch.randn(1, 4, 6, 5)
    found = capture(model, (x,))
    with torch.no_grad():
        torch.testing.assert_close(bind(found.program, found.constants, "cpu").run([x])[0], model(x), rtol=1e-4, atol=1e-4)


def test_a_block_with_branches_is_one_packed_convolution():
    """As FastViT's mixer of tokens is trained."""
    layers = {
        "conv": nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), "pixel": nn.Conv2d(8, 8, 1, groups=8, bias=False),
        **{name: lively_norm(8) for name in ("first", "second", "third", "fourth")},
    }  # fmt: skip

    def block(m, x):
        mixed = m.second(m.pixel(x)) + m.third(x) + 0 + m.first(m.conv(x))
        return nn.functional.relu(x + (mixed - m.fourth(x)) * m.first.weight[:, None, None])

    model, x = Apply(block, **layers).eval(), torch.randn(2, 8, 9, 7)
    captured = capture(model, (x,))
    (operator,) = captured.program.graph.operators
    assert [call.target for call in operator.calls] == ["mkldnn::_convolution_pointwise.default", "aten::clone.default"]
    with torch.no_grad():
        torch.testing.assert_close(bind(captured.program, captured.constants).run([x])[0], model(x), rtol=1e-4, atol=1e-4)


def test_what_multiplies_rows_stays():
    # A weight of one dimension makes a number of each row.
    linear = nn.functional.linear
    for body in (lambda m, x: linear(x, m.norm.weight) * m.norm.bias, lambda m, x: linear(x, m.norm.weight) + m.norm.bias):
        check(Apply(body, norm=nn.LayerNorm(8)), (torch.randn(8, 8),), fold_channel_scales, expected=0)


@pytest.mark.parametrize(("dimensions", "affine"), [(1, False), (2, True), (3, False)])
def test_a_norm_of_each_channel_is_one_of_groups_of_one(dimensions, affine):
    """Also where the mean is large, behind a packed convolution, and on a picture of one channel."""
    conv, norm = (getattr(nn, f"{name}{dimensions}d") for name in ("Conv", "InstanceNorm"))
    layers = {"conv": conv(4, 6, 1), "norm": norm(6, affine=affine), "one": norm(1)}
    model = Apply(lambda m, x: (m.norm(m.conv(x) + 100), m.norm(x[:, :1].expand_as(m.conv(x)) * 2), m.one(x[:, :1])), **layers)

    def rewrite(draft):
        pack_cpu_convolutions(draft)
        draft.observe()
        return spell_instance_norms(draft)

    draft = check(model, (torch.randn(2, 4, *[9, 8, 7][:dimensions]),), rewrite, expected=3, tolerance=1e-3)
    assert "instance_norm" not in kinds(draft)


def test_norms_of_channels_that_are_no_groups_stay():
    kept = nn.InstanceNorm2d(4, track_running_stats=True)
    x = torch.randn(2, 4, 6, 6)
    check(Apply(lambda m, x: m.norm(x), norm=kept), (x,), spell_instance_norms, expected=0)
    check(Apply(lambda m, x: m.norm(x), norm=nn.InstanceNorm2d(4)), (x.double(),), spell_instance_norms, expected=0)


ACTIVATIONS = {
    "none": nn.Identity(), "relu": nn.ReLU(), "relu6": nn.ReLU6(), "hardtanh": nn.Hardtanh(-0.5, 0.25), "silu": nn.SiLU(),
    "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "leaky_relu": nn.LeakyReLU(0.2), "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(), "hardswish": nn.Hardswish(), "hardsigmoid": nn.Hardsigmoid(),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_convolution_packed_with_its_activation(name):
    model = Apply(lambda m, x: m.act(m.conv(x)), conv=nn.Conv2d(3, 8, 3, padding=1), act=ACTIVATIONS[name])
    draft = check(model, (torch.randn(2, 3, 9, 9),), pack_cpu_convolutions, expected=1, tolerance=1e-4)
    assert kinds(draft) == ["_convolution_pointwise"]


@pytest.mark.parametrize("which", ["max", "min"])
def test_a_maximum_whose_place_is_not_read_is_computed_without(which):
    x = torch.randn(3, 5, 4)
    x[0, 1, 2] = torch.nan

    def run(m, x):
        values, places = getattr(x, which)(1)
        return values, getattr(x, which)(-1, keepdim=True)[0], getattr(x.long(), which)(0), places

    draft = draft_of(Apply(run), (x,))
    assert drop_places(draft) == 1
    assert kinds(draft).count(f"a{which}") == 1
    made = draft.observe()
    for leaf, wanted in zip(draft.output_leaves, torch.utils._pytree.tree_leaves(run(None, x)), strict=True):
        torch.testing.assert_close(made[leaf.value], wanted, rtol=0, atol=0, equal_nan=True)


def test_limits_in_the_wrong_order_stay_a_call():
    conv = nn.Conv2d(3, 8, 3, padding=1)
    draft = check(Apply(lambda m, x: m.conv(x).clamp(0.5, -0.5), conv=conv), (torch.randn(2, 3, 9, 9),), pack_cpu_convolutions, expected=1)
    assert "clamp" in kinds(draft)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2}, {"dilation": 2}, {"groups": 2}, {"groups": 8, "out_channels": 8}, {"padding": (1, 2)}, {"bias": False},
        {"kernel_size": (1, 5)},
    ],
    ids=str,
)  # fmt: skip
def test_convolution_packed_for_every_geometry(options):
    conv = nn.Conv2d(**{"in_channels": 8, "out_channels": 16, "kernel_size": 3, **options})
    check(Apply(lambda m, x: m.conv(x), conv=conv), (torch.randn(1, 8, 12, 12),), pack_cpu_convolutions, expected=1, tolerance=1e-4)


def test_a_dilation_that_means_nothing_is_left_out():
    """With it, the process would end here."""
    conv = nn.Conv2d(4, 8, 1, stride=(1, 2), padding=1, dilation=(1, 2))
    check(Apply(lambda m, x: m.conv(x), conv=conv), (torch.randn(1, 4, 1, 1),), pack_cpu_convolutions, expected=1, tolerance=1e-4)


@pytest.mark.parametrize(("kernel", "stride"), [((2, 5), (1, 3)), ((3, 3), (1, 5))])
def test_convolutions_of_one_channel_that_onednn_gets_wrong_stay(kernel, stride):
    conv = nn.Conv2d(1, 16, kernel, stride)
    check(Apply(lambda m, x: m.conv(x), conv=conv), (torch.randn(2, 1, 9, 6),), pack_cpu_convolutions, expected=0)
    check(Apply(lambda m, x: m.conv(x), conv=conv), (torch.randn(2, 1, 9, 12),), pack_cpu_convolutions, expected=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"dilation": 2},
        {"groups": 2},
        {"groups": 8, "out_channels": 8},
        {"padding": 1},
        {"bias": False},
        {"kernel_size": 1},
    ],
    ids=str,
)
def test_a_convolution_of_lines_is_packed_as_one_of_pictures(options):
    """By the way that keeps the weight as it comes, it is reordered in every call: most of the time where lines are short."""
    conv = nn.Conv1d(**{"in_channels": 8, "out_channels": 16, "kernel_size": 3, **options})
    model = Apply(lambda m, x: torch.relu(m.conv(x)), conv=conv)
    draft = check(model, (torch.randn(2, 8, 12),), pack_cpu_convolutions, expected=1, tolerance=1e-4)
    assert kinds(draft) == ["unsqueeze", "_convolution_pointwise", "squeeze"]


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": (1, 2, 2)}, {"dilation": 2}, {"groups": 2}, {"groups": 8, "out_channels": 8}, {"padding": 1}, {"bias": False}],
    ids=str,
)
def test_a_convolution_of_volumes_is_packed_with_what_follows(options):
    conv = nn.Conv3d(**{"in_channels": 8, "out_channels": 16, "kernel_size": 3, **options})
    model = Apply(lambda m, x: torch.relu(m.one(torch.relu(m.conv(x))) + m.conv(x)), conv=conv, one=nn.Conv3d(*[conv.out_channels] * 2, 1))
    draft = check(model, (torch.randn(1, 8, 5, 6, 7),), pack_cpu_convolutions, expected=3, tolerance=1e-4)
    assert set(kinds(draft)) == {"_convolution_pointwise"}


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"stride": 2, "output_padding": 1}, {"padding": 1}, {"dilation": 2}, {"groups": 2}, {"bias": False}],
    ids=str,
)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_transposed_convolution_is_packed_with_its_activation(dimensions, options):
    conv = getattr(nn, f"ConvTranspose{dimensions}d")(**{"in_channels": 8, "out_channels": 6, "kernel_size": 4, **options})
    model = Apply(lambda m, x: torch.relu(m.conv(x)), conv=conv)
    draft = check(model, (torch.randn(2, 8, *[7, 5, 4][:dimensions]),), pack_cpu_convolutions, expected=1, tolerance=1e-4)
    assert [kind for kind in kinds(draft) if "squeeze" not in kind] == ["_convolution_transpose_pointwise"]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"groups": 8}, torch.float32), ({"output_padding": 1, "dilation": 2}, torch.float32), ({}, torch.bfloat16)],
    ids=str,
)
def test_transposed_convolutions_that_onednn_does_not_take_stay(options, dtype):
    model = Apply(lambda m, x: m.conv(x) + 1, conv=nn.ConvTranspose1d(8, 8, 4, **options)).to(dtype)
    check(model, (torch.randn(2, 8, 7, dtype=dtype),), pack_cpu_convolutions, expected=0)


def test_what_is_added_to_a_transposed_convolution_is_a_call():
    model = Apply(lambda m, x: m.conv(x) + x, conv=nn.ConvTranspose2d(8, 8, 3, padding=1))
    draft = check(model, (torch.randn(2, 8, 7, 5),), pack_cpu_convolutions, expected=1, tolerance=1e-4)
    assert kinds(draft) == ["_convolution_transpose_pointwise", "add"]


def test_a_residual_of_lines_is_fused():
    model = Apply(lambda m, x: torch.relu(m.conv(x) + x), conv=nn.Conv1d(8, 8, 3, padding=1))
    draft = check(model, (torch.randn(2, 8, 12),), pack_cpu_convolutions, expected=1, tolerance=1e-4)
    assert kinds(draft) == ["unsqueeze", "unsqueeze", "_convolution_pointwise", "squeeze"]
    assert draft.nodes[2].target.endswith(".binary")


@pytest.mark.parametrize("relu", [False, True])
def test_residual_fused_where_it_is_ready_before(relu):
    def run(m, x):
        made = m.conv(torch.relu(m.stem(x))) + x
        return torch.relu(made) if relu else made

    layers = {"stem": nn.Conv2d(8, 8, 3, padding=1), "conv": nn.Conv2d(8, 8, 3, padding=1)}
    draft = check(Apply(run, **layers), (torch.randn(1, 8, 10, 10),), pack_cpu_convolutions, expected=2, tolerance=1e-4)
    assert kinds(draft) == ["_convolution_pointwise", "_convolution_pointwise"]
    assert draft.nodes[1].target.endswith(".binary")


def test_a_residual_that_is_late_is_added_on_its_own():
    def run(m, x):
        return m.short(x) + m.late(torch.relu(m.long(x)))

    layers = {"short": nn.Conv2d(8, 8, 1), "long": nn.Conv2d(8, 8, 5, padding=2), "late": nn.Conv2d(8, 8, 1)}
    draft = check(Apply(run, **layers), (torch.randn(1, 8, 10, 10),), pack_cpu_convolutions, expected=3, tolerance=1e-4)
    # Fused into the late branch, never into the short one: that would make it wait.
    binary = [node for node in draft.nodes if node.target.endswith(".binary")]
    assert len(binary) == 1
    assert binary[0] is draft.nodes[-1]


@pytest.mark.parametrize("apart", ["a column", "one number for all"])
def test_a_bias_whose_numbers_are_apart_in_memory_is_copied(apart):
    """oneDNN is told where it begins, and reads what lies behind that."""

    def bias(count):
        return nn.Parameter(torch.randn(count, 2)[:, 1] if apart == "a column" else torch.randn(1).expand(count))

    cases = [
        (nn.Conv2d(3, 20, 3), torch.randn(1, 3, 8, 8), pack_cpu_convolutions),
        (nn.Linear(512, 512), torch.randn(8, 512), pack_cpu_linears),
    ]
    for layer, x, rewrite in cases:
        layer.bias = bias(len(layer.bias))
        draft = check(Apply(lambda m, x: m.layer(x), layer=layer), (x,), rewrite, expected=1, tolerance=1e-4)
        assert draft.prologue[-1].target == "aten::clone.default"


def test_convolutions_that_cannot_be_packed_stay():
    double = Apply(lambda m, x: m.conv(x), conv=nn.Conv2d(3, 4, 3)).double()
    check(double, (torch.randn(1, 3, 8, 8).double(),), pack_cpu_convolutions, expected=0)
    check(Apply(lambda m, x: m.conv(x), conv=nn.Conv1d(3, 4, 3)), (torch.randn(3, 8),), pack_cpu_convolutions, expected=0)
    check(Apply(lambda m, x: m.conv(x), conv=nn.Conv3d(3, 4, 3)), (torch.randn(3, 4, 4, 4),), pack_cpu_convolutions, expected=0)
    check(Apply(lambda m, x: m.conv(x), conv=nn.Conv2d(3, 4, 3)), (torch.randn(3, 8, 8),), pack_cpu_convolutions, expected=0)
    check(
        Apply(lambda m, x, w: nn.functional.conv2d(x, w)),
        (torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)),
        pack_cpu_convolutions,
        expected=0,
    )
    strided = Apply(lambda m, x: torch.as_strided(m.conv(x).mT, (2, 2), (1, 2)), conv=nn.Conv2d(3, 4, 3))
    check(strided, (torch.randn(1, 3, 8, 8),), pack_cpu_convolutions, expected=0)


@pytest.mark.parametrize(
    "read",
    [
        lambda y: torch.as_strided(y, (2, 2), (1, 2)),
        lambda y: torch.view_as_real(torch.view_as_complex(y.view(1, 4, 6, 3, 2)) * 1j),
        lambda y: y.view(torch.int32).view(torch.float32),
        lambda y: y.unfold(2, 2, 2).unfold(3, 3, 1).reshape(1, 4, 3, 4, 6),
    ],
    ids=["as_strided", "view_as_complex", "view.dtype", "unfold"],
)
def test_what_computes_by_strides_finds_them_after_a_packed_convolution(read):
    model = Apply(lambda m, x: read(m.conv(x)), conv=nn.Conv2d(3, 4, 3))
    check(model, (torch.randn(1, 3, 8, 8),), pack_cpu_convolutions, expected=1, tolerance=1e-4)


def test_views_of_packed_results_copy_where_they_must():
    model = Apply(lambda m, x: m.conv(x).view(1, -1) * 2, conv=nn.Conv2d(3, 4, 3))
    check(model, (torch.randn(1, 3, 8, 8),), pack_cpu_convolutions, expected=1, tolerance=1e-4)


def test_outputs_get_their_layout_back():
    model = Apply(lambda m, x: m.conv(x), conv=nn.Conv2d(3, 4, 3)).eval()
    draft = draft_of(model, (torch.randn(2, 3, 8, 8),))
    wanted = [draft.specs[leaf.value] for leaf in draft.output_leaves]
    pack_cpu_convolutions(draft)
    draft.observe()
    packed = draft.specs[draft.output_leaves[0].value]
    assert packed.strides != contiguous_strides(packed.shape)
    assert restore_output_layout(draft, wanted) == 1
    draft.observe()
    assert draft.specs[draft.output_leaves[0].value] == wanted[0]


def test_what_is_returned_twice_is_laid_out_once():
    model = Apply(lambda m, x: [m.conv(x)] * 2, conv=nn.Conv2d(3, 4, 3)).eval()
    draft = draft_of(model, (torch.randn(2, 3, 8, 8),))
    wanted = [draft.specs[leaf.value] for leaf in draft.output_leaves]
    pack_cpu_convolutions(draft)
    draft.observe()
    assert restore_output_layout(draft, wanted) == 1
    draft.observe()
    first, second = draft.output_leaves
    assert first == second
    assert draft.specs[first.value] == wanted[0]


@pytest.mark.parametrize(
    ("part", "view", "copies"),
    [
        (lambda y: y[:, :2], lambda y: y.view(2, -1), 1),
        (lambda y: y[:, 1], lambda y: y.view(torch.int32), 1),
        (lambda y: y[:, :, 1:3], lambda y: y.view(2, 4, -1), 1),
        (lambda y: y[:, :, ::2, ::2], lambda y: y.view(8, 3, 3), 1),
        (lambda y: y.permute(0, 2, 3, 1), lambda y: y.view(2, 36, 4), 0),
        (lambda y: y.transpose(2, 3), lambda y: y.flatten(0, 1), 1),
    ],
)
def test_a_part_of_a_result_may_be_viewed_as_before(part, view, copies):
    model = Apply(lambda m, x: part(m.conv(x)), conv=nn.Conv2d(3, 4, 3)).eval()
    inputs = (torch.randn(2, 3, 8, 8),)
    draft = draft_of(model, inputs)
    wanted = [draft.specs[leaf.value] for leaf in draft.output_leaves]
    pack_cpu_convolutions(draft)
    draft.observe()
    assert restore_output_layout(draft, wanted) == copies
    draft.observe()
    made = draft.specs[draft.output_leaves[0].value]
    view(torch.empty_strided(wanted[0].shape, wanted[0].strides))
    view(torch.empty_strided(made.shape, made.strides))


@pytest.mark.parametrize("shape", [(32, 512), (2, 16, 512)])
@pytest.mark.parametrize("relu", [False, True])
def test_large_linears_are_packed(shape, relu):
    model = Apply(lambda m, x: torch.relu(m.lin(x)) if relu else m.lin(x), lin=nn.Linear(512, 512))
    draft = check(model, (torch.randn(shape),), pack_cpu_linears, expected=1, tolerance=1e-4)
    assert kinds(draft) == ["_linear_pointwise"]


@pytest.mark.parametrize(
    ("rows", "features", "packed"),
    [
        ((1, 512), (512, 1024), 1),
        ((1, 512), (512, 512), 0),  # so small a model lies in a cache, where one row is read as fast unpacked
        ((2, 512), (512, 512), 1),
        ((2, 256), (256, 512), 0),
        ((4, 256), (256, 512), 1),
        ((1, 4, 256), (256, 512), 1),
        ((16, 256), (256, 256), 0),
        ((1023, 64), (64, 256), 0),
        ((1024, 64), (64, 256), 1),  # few weights, but much to do with them
        ((512,), (512, 1024), 0),  # no rows at all: oneDNN has no such product
    ],
)
def test_a_linear_is_packed_from_where_it_is_faster(rows, features, packed):
    check(Apply(lambda m, x: m.lin(x), lin=nn.Linear(*features)), (torch.randn(rows),), pack_cpu_linears, expected=packed, tolerance=1e-4)


def test_a_single_row_in_a_large_model_comes_from_memory_and_is_packed_unless_its_weights_are_read_again():
    class Decoding(nn.Module):
        def __init__(self, times: int):
            super().__init__()
            self.times = times
            self.small = nn.Linear(512, 512)
            self.head = nn.Linear(512, 1 << 14)

        def forward(self, x):
            for _ in range(self.times):
                x = torch.tanh(self.small(x))
            return self.head(x)

    for times, packed in ((1, 2), (2, 1)):
        check(Decoding(times), (torch.randn(1, 512),), pack_cpu_linears, expected=packed, tolerance=1e-4)


def test_products_with_a_parameter_are_packed_and_with_an_input_not():
    model = Apply(lambda m, x: torch.addmm(m.lin.bias, x, m.lin.weight) + torch.mm(x, m.lin.weight), lin=nn.Linear(512, 512))
    check(model, (torch.randn(32, 512),), pack_cpu_linears, expected=2, tolerance=1e-4)
    check(Apply(lambda m, x, w: torch.mm(x, w)), (torch.randn(32, 512), torch.randn(512, 512)), pack_cpu_linears, expected=0)
    check(Apply(lambda m, x: m.lin(x), lin=nn.Linear(64, 64)), (torch.randn(32, 64),), pack_cpu_linears, expected=0)


class _Masked(nn.Module):
    """Attention with a mask that is expanded: on a GPU no kernel of PyTorch 2.11 that writes its result head by head last takes it."""

    def forward(self, x, mask):
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask.expand(-1, -1, 4, 4))
        return y.transpose(1, 2).reshape(1, 4, 16)


def test_a_program_for_a_gpu_takes_any_layout_its_attention_writes():
    x, mask = torch.randn(1, 2, 4, 8), torch.ones(1, 1, 4, 1, dtype=torch.bool)
    there = capture(_Masked().eval(), (x, mask), target="cuda").program
    targets = [call.target for operator in there.graph.operators for call in operator.calls]
    assert "aten::reshape.default" in targets
    assert "aten::view.default" not in targets


@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_that_is_left_is_the_models_own_call(affine):
    norm = lively_norm(4)
    if not affine:
        norm.weight = norm.bias = None
    draft = check(Apply(lambda m, x: m.norm(x.relu()), norm=norm), (torch.randn(2, 4, 5, 5),), whole_batch_norms, expected=1)
    assert kinds(draft) == ["relu", "batch_norm"]


def test_a_gpus_programs_have_whole_batch_norms_in_every_lowering():
    model = Apply(lambda m, x: m.norm(x.relu()), norm=lively_norm(4)).eval()
    for rewrite in (True, False):
        program = capture(model, (torch.randn(2, 4, 5, 5),), rewrite=rewrite, target="cuda").program
        kinds_of = [call.target for item in program.graph.operators for call in item.calls]
        assert "aten::batch_norm.default" in kinds_of
        assert not any("legit" in kind for kind in kinds_of)
        assert sum(item.flops for item in program.graph.operators) > 0


def attend(make_mask):
    def run(m, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=make_mask(m, q))

    return run


def attention_inputs(rows: int = 4, columns: int = 4) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 3, rows, 8), torch.randn(2, 3, columns, 8), torch.randn(2, 3, columns, 8)


def settled(draft: Draft) -> int:
    """As in a capture: what does not depend on the inputs is in the prologue first."""
    fold_constants(draft)
    draft.observe()
    return settle_masks(draft)


def test_a_mask_that_hides_nothing_goes_and_a_causal_one_is_called_so():
    whole = attend(lambda m, q: torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, 4, 4))
    draft = check(Apply(whole), attention_inputs(), settled, expected=1)
    assert (draft.nodes[-1].argument("attn_mask"), draft.nodes[-1].argument("is_causal")) == (None, False)
    assert draft.prologue == []
    causal = attend(lambda m, q: torch.ones(4, 4, dtype=torch.bool).tril())
    draft = check(Apply(causal), attention_inputs(), settled, expected=1)
    assert (draft.nodes[-1].argument("attn_mask"), draft.nodes[-1].argument("is_causal")) == (None, True)
    # Fewer rows than columns: is_causal would count from the other corner than many models do.
    draft = check(Apply(attend(lambda m, q: torch.ones(2, 4, dtype=torch.bool).tril())), attention_inputs(2), settled, expected=1)
    assert draft.nodes[-1].argument("is_causal") is False


def unfilled(draft: Draft) -> int:
    fold_constants(draft)
    draft.observe()
    return drop_idle_fills(draft)


def test_filling_nothing_goes_where_that_is_so_in_every_run():
    def run(m, x, hidden):
        nowhere, somewhere = torch.arange(4) < 0, torch.arange(4) < 1
        return x.exp().masked_fill(nowhere, 3.0).relu(), x.masked_fill(somewhere, 3.0).relu(), x.masked_fill(hidden, 3.0).relu()

    draft = check(Apply(run), (torch.randn(2, 4), torch.zeros(4, dtype=torch.bool)), unfilled, expected=1)
    assert kinds(draft).count("masked_fill") == 2


def test_filling_nothing_stays_where_it_makes_another_shape_or_leaves_the_model():
    def run(m, x):
        nowhere = torch.arange(8).view(2, 4) < 0
        return x.masked_fill(nowhere, 3.0).relu(), x.masked_fill(nowhere[0], 3.0)

    check(Apply(run), (torch.randn(4),), unfilled, expected=0)


def test_other_masks_become_dense_numbers_once():
    def run(m, q, k, v):
        mask = (torch.arange(4) > 0).view(4, 1).expand(4, 4).t().t()
        first = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return nn.functional.scaled_dot_product_attention(first, k, v, attn_mask=mask)

    draft = check(Apply(run), attention_inputs(), settled, expected=2)
    masks = [node.tensor("attn_mask") for node in draft.nodes if node.kind == "aten::scaled_dot_product_attention"]
    assert masks[0] == masks[1]
    assert (draft.specs[masks[0]].dtype, draft.specs[masks[0]].strides) == ("float32", (4, 1))
    assert settle_masks(draft) == 0


def test_a_cpu_keeps_booleans_and_is_told_what_they_say():
    def run(m, q, k, v):
        attend, whole = nn.functional.scaled_dot_product_attention, torch.ones(4, 4, dtype=torch.bool)
        some = torch.arange(4) > 0
        return attend(q, k, v, attn_mask=whole), attend(q, k, v, attn_mask=whole.tril()), attend(q, k, v, attn_mask=some.expand(4, 4))

    model = Apply(run).eval()
    for lowering in (Lowering.REWRITTEN, Lowering.FUSED):
        captured = capture(model, attention_inputs(), lowering=lowering)
        (report,) = [report for report in captured.rewrites if report.name == "settle_masks"]
        assert report.applied == 2
    inputs = attention_inputs()
    for made, expected in zip(bind(captured.program, captured.constants).run(inputs), model(*inputs), strict=True):
        torch.testing.assert_close(made, expected)


def test_a_mask_that_a_buffer_or_an_input_decides_keeps_its_values():
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))

        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

    draft = check(Held(), attention_inputs(), settled, expected=1)
    assert draft.nodes[-1].tensor("attn_mask") is not None
    given = attend(lambda m, q: q[:1, :1, :, :4] > 0)
    check(Apply(given), attention_inputs(), settled, expected=0)


def test_other_masks_become_numbers_for_a_gpu_only():
    model = Apply(attend(lambda m, q: (torch.arange(4) > 0).expand(4, 4))).eval()
    for target, dtype in (("cpu", "bool"), ("cuda", "float32")):
        program = capture(model, attention_inputs(), target=target).program
        (call,) = [call for item in program.graph.operators for call in item.calls if "scaled_dot" in call.target]
        assert program.graph.values[call.args[3].value].spec.dtype == dtype


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.REWRITTEN])
def test_no_lowering_for_a_gpu_has_views_that_hold_for_one_layout(lowering):
    captured = capture(
        Apply(lambda m, x: x.transpose(1, 2).contiguous().view(2, 12).relu()), (torch.randn(2, 3, 4),), target="cuda", lowering=lowering
    )
    targets = [call.target for operator in captured.program.graph.operators for call in operator.calls]
    assert "aten::reshape.default" in targets
    assert "aten::view.default" not in targets
