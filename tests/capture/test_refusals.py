"""What cannot be scheduled is refused with the operator, the line and what to do; nothing is printed."""

import enum
import importlib
import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import library, nn
from torch._higher_order_ops import triton_kernel_wrap

from autosched.capture.export import capture
from autosched.capture.screen import explain_export_failure, require_schedulable
from autosched.core.errors import UnsupportedGraph
from autosched.recording import record_calls
from autosched.runtime.bundle.program_check import check_program
from tests.conformance.quantised import Quantised


class BranchOnValue(nn.Module):
    def forward(self, x):
        if x.sum().item() > 0:
            return x
        return -x


class ItemAsScale(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


class NonZero(nn.Module):
    def forward(self, x):
        return torch.nonzero(x)


class BooleanIndex(nn.Module):
    def forward(self, x):
        return x[x > 0]


class DrawsNumbers(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class AlwaysDrops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)


class Branches(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))


class KeepsItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(3, 4))

    def forward(self, x):
        made = x - self.last
        self.last = x
        return made


class Raises(nn.Module):
    def forward(self, x):
        raise KeyError("the weather")


class WrongShape(nn.Module):
    def forward(self, x):
        return x @ x


CASES = [
    (BranchOnValue, "if x.sum().item() > 0", "depend|decides"),
    (ItemAsScale, "aten::item", "depends on the data"),
    (NonZero, "aten::nonzero", "depends on the data"),
    (BooleanIndex, "aten::index", "depends on the data"),
    (DrawsNumbers, "aten::rand_like", "model.eval"),
    (AlwaysDrops, "dropout", "model.eval"),
    (Branches, "cond", "Unroll"),
    (KeepsItsInput, "cannot be captured", "copy_"),
    (Raises, "the weather", "call it yourself"),
    (WrongShape, "must have same reduction dim", "call it yourself"),
]


@pytest.mark.parametrize(("model", "names", "advises"), CASES, ids=[case[0].__name__ for case in CASES])
def test_refused_with_operator_line_and_advice(model, names, advises, capsys):
    with pytest.raises(UnsupportedGraph, match=advises) as caught:
        capture(model(), (torch.randn(3, 4),))
    message = str(caught.value)
    assert names in message
    if model is not KeepsItsInput:
        assert "test_refusals.py:" in message
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == ""


def test_an_integer_beyond_64_bits_is_refused_before_anything_is_tuned():
    class Inverts(nn.Module):
        def forward(self, x):
            return x ^ (2**64 - 1)

    class Fills(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 0, torch.iinfo(torch.int64).min)

    with pytest.raises(UnsupportedGraph, match="takes the argument 18446744073709551615"):
        capture(Inverts(), (torch.ones(3, dtype=torch.uint64),))
    # What the smallest of 64 bits is for, a file holds.
    check_program(capture(Fills(), (torch.ones(3, dtype=torch.int64),)).program)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("meta", lambda: nn.Sequential(nn.Linear(4, 4))),
        ("graph", lambda: nn.Linear(4, 4)),
        ("code", lambda: nn.Parameter(torch.ones(4))),
    ],
)
def test_a_part_with_a_name_that_graphs_use_themselves_is_told_to_be_renamed_where_the_graph_is_traced_again(name, part):
    class Named(nn.Module):
        def __init__(self, plain):
            super().__init__()
            self.plain = plain
            setattr(self, name, part())

        def forward(self, x):
            named = getattr(self, name)
            y = named(x) if callable(named) else named * x
            if not self.plain:
                y[0] += 1
            return y

    with pytest.raises(UnsupportedGraph, match=f"{name}.*meta, graph and code: .* another one, or tune a module that holds the model"):
        capture(Named(plain=False), (torch.ones(3, 4),))
    for model in (Named(plain=True), nn.Sequential(Named(plain=False))):
        assert len(capture(model, (torch.ones(3, 4),)).program.graph)


_library = library.Library("refusals", "FRAGMENT")
_library.define("thrice(Tensor x) -> Tensor")
_library.impl("thrice", lambda x: x * 3, "CompositeImplicitAutograd")
_library.define("twice(Tensor x) -> Tensor")
_library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")


@library.custom_op("refusals::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(1)


class Composite(nn.Module):
    def forward(self, x):
        return torch.ops.refusals.thrice(x)


class Opaque(nn.Module):
    def forward(self, x):
        return torch.ops.refusals.twice(x)


class Bumps(nn.Module):
    def forward(self, x):
        y = x * 2
        bump(y)
        return y


def test_a_custom_operator_written_in_pytorchs_own_is_captured_and_others_are_refused_by_name():
    operators = capture(Composite(), (torch.randn(3),)).program.graph.operators
    assert [call.target for operator in operators for call in operator.calls] == ["aten::mul.Tensor"]
    with pytest.raises(UnsupportedGraph, match=r"refusals::twice.*CompositeImplicitAutograd"):
        capture(Opaque(), (torch.randn(3),))
    with pytest.raises(UnsupportedGraph, match=r"refusals::bump.*changes its arguments"):
        capture(Bumps(), (torch.randn(3),))


class Unknown:
    def __init__(self, value):
        self.value = value


class ReturnsUnknown(nn.Module):
    def forward(self, x):
        return Unknown(x * 2)


class Padded(nn.Module):
    def __init__(self, nested):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

    def forward(self, tokens, padding=None):
        return self.encoder(tokens, src_key_padding_mask=padding)


def test_an_encoder_that_zeros_padding_in_eager_mode_only_is_refused():
    tokens, padding = torch.randn(2, 4, 16), torch.tensor([[False] * 4, [False, False, True, True]])
    with pytest.raises(UnsupportedGraph, match=r"src_key_padding_mask.*enable_nested_tensor=False"):
        capture(Padded(True).eval(), (tokens, padding))
    model = Padded(True).eval()
    assert capture(model, (tokens,)).program.graph.operators
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert capture(Padded(False).eval(), (tokens, padding)).program.graph.operators


class ScalesInAnAttribute(nn.Module):
    """As a layer of bitsandbytes reads what it keeps beside its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.weight.CB = torch.randn(3)

    def forward(self, x):
        return x * self.weight.CB


def test_what_a_weight_keeps_in_an_attribute_is_refused_with_what_to_quantize_by():
    with pytest.raises(UnsupportedGraph, match=r"'CB'.*quantize the model as it came with torchao"):
        capture(ScalesInAnAttribute(), (torch.randn(3),))


def test_an_assertion_of_bitsandbytes_is_refused_with_what_to_quantize_by(tmp_path, monkeypatch):
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    package.joinpath("four_bits.py").write_text("def forward(x):\n    assert type(x).__name__ != 'FakeTensor'\n    return x * 2\n")
    monkeypatch.syspath_prepend(tmp_path)

    class FourBits(nn.Module):
        def forward(self, x):
            return importlib.import_module("bitsandbytes.four_bits").forward(x)

    with pytest.raises(UnsupportedGraph, match=r"bitsandbytes.four_bits.py:2.*quantize the model as it came with torchao"):
        capture(FourBits(), (torch.randn(3),))


class Policy(nn.Module):
    def forward(self, x, checked):
        return torch.distributions.Normal(x, x.exp(), validate_args=checked).mean * 2


def test_a_distribution_that_checks_its_arguments_is_refused_and_the_switch_named():
    x = torch.randn(3)
    with pytest.raises(UnsupportedGraph, match=r"test_refusals.py.*validate_args=False.*set_default_validate_args\(False\)"):
        capture(Policy(), (x, True))
    assert capture(Policy(), (x, False)).program.graph.operators


class Ascending(nn.Module):
    def forward(self, x):
        assert (x[1:] > x[:-1]).all(), "expected ascending numbers"
        return x * 2


def test_an_assertion_about_values_is_refused_and_how_to_do_without_is_named():
    with pytest.raises(UnsupportedGraph, match=r"\(assert \(x.*It is an assertion about values: .*python -O"):
        capture(Ascending(), (torch.arange(3.0),))


_WITHOUT_ASSERTIONS = """
import sys, torch
from autosched.capture.export import capture
from autosched.core.errors import UnsupportedGraph

class Decides(torch.nn.Module):
    def forward(self, x):
        assert (x > 5).all(), "left out"
        return x * 2 if x.sum() > 0 else x

try:
    capture(Decides().eval(), (torch.ones(3),))
except UnsupportedGraph as error:
    print(error)
"""


@pytest.mark.slow
def test_without_assertions_a_value_that_decides_is_named_as_such(tmp_path: Path) -> None:
    """PyTorch looks for an assertion where a value is asked for, and fails where Python has left them all out."""
    (tmp_path / "decides.py").write_text(_WITHOUT_ASSERTIONS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-O", str(tmp_path / "decides.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert re.search(r"decides\.py:9 \(return x \* 2 if x\.sum.*a value decides what runs next\. Expected", ended.stdout), ended.stderr


class LeastSquares(nn.Module):
    def forward(self, x):
        return torch.linalg.lstsq(x, x).solution


def test_an_operator_whose_shape_export_cannot_know_is_refused_for_that():
    with pytest.raises(UnsupportedGraph, match=r"the shape of what aten.linalg_lstsq.default makes depends on the data"):
        capture(LeastSquares().eval(), (torch.randn(3, 3),))


class Combinations(nn.Module):
    def forward(self, x):
        return torch.combinations(x)


# From 2.15 on, its shape is known.
@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="this PyTorch makes combinations of a fixed shape")
def test_a_shape_that_an_operator_of_pytorchs_leaves_open_is_refused_for_that():
    with pytest.raises(UnsupportedGraph, match=r"torch.combinations\(x\)\): a shape depends on the data .*pad to a fixed size") as caught:
        capture(Combinations().eval(), (torch.randn(4),))
    assert "register_fake" not in str(caught.value)


class Picture(torch.Tensor):
    """As fastai's ``TensorImage``: what is computed from one is one, too."""


def test_an_input_of_a_class_that_no_call_takes_is_refused_when_there_is_time_to_mend_it():
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    (call,) = record_calls(model, lambda: model(x.as_subclass(Picture)))
    with pytest.raises(UnsupportedGraph, match=r"is a Picture; .*Give x\.as_subclass\(torch\.Tensor\), here and in calls"):
        capture(model, call.args)
    assert capture(model, (nn.Parameter(x),)).program.graph.hash == capture(model, (x,)).program.graph.hash


def test_a_sparse_input_is_refused():
    with pytest.raises(UnsupportedGraph, match=r"sparse_coo.*to_dense"):
        capture(nn.Linear(4, 4), (torch.eye(4).to_sparse(),))


def test_an_object_that_cannot_be_opened_is_refused_with_what_to_give_instead():
    class Reads(nn.Module):
        def forward(self, graph):
            return graph.x + 1

    advice = r"dict\(\.\.\.\) of it, .*one by one, to a module around the model.*dataclass of a module that can be imported"
    with pytest.raises(UnsupportedGraph, match=advice):
        capture(Reads(), (SimpleNamespace(x=torch.randn(2)),))


class SetsAsKeys(nn.Module):
    def forward(self, x):
        return {frozenset({1}): x * 2}


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.part = torch.jit.script(nn.Linear(4, 4))

    def forward(self, x):
        return self.part(x)


class KeyCache:
    def __init__(self, keys):
        self.keys = keys


class ReturnsCache(nn.Module):
    """As Reformer, whose cache no other model has."""

    def forward(self, x):
        return x + 1, KeyCache(x)


@pytest.mark.parametrize(
    ("model", "advises"),
    [
        (ReturnsCache(), "Call the model with use_cache=False"),
        (ReturnsUnknown(), "torch.export refuses it.*register_dataclass"),
        (SetsAsKeys(), "text, numbers or tuples of them as keys"),
        (Scripted(), "torch.export refuses it.*Python module that was scripted"),
    ],
)
def test_what_export_refuses_says_so_and_what_to_do(model, advises):
    with pytest.raises(UnsupportedGraph, match=advises):
        capture(model, (torch.randn(3, 4),))


class Packs(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer(3, 4, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, 1], batch_first=True)
        found, _ = self.layer(packed)
        return nn.utils.rnn.pad_packed_sequence(found, batch_first=True)[0]


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_packed_sequence_is_refused_with_what_to_give_instead(layer):
    with pytest.raises(UnsupportedGraph, match=r"found, _ = self\.layer\(packed\)\).*the padded batch.*torch\.gather"):
        capture(Packs(layer).eval(), (torch.randn(2, 3, 3),))


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(4)])
def test_training_mode_is_refused(layer):
    with pytest.raises(UnsupportedGraph, match=r"training mode.*model\.eval\(\)"):
        capture(nn.Sequential(nn.Linear(4, 4), layer).train(), (torch.randn(3, 4),))


def test_dropout_in_inference_and_attention_without_dropout_are_no_random_operators():
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(self.drop(x), x, x)

    assert len(capture(Attends().eval(), (torch.randn(1, 2, 4, 8),)).program.graph) == 1


class QuantisedTensor(nn.Module):
    def forward(self, x):
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()


class Jagged(nn.Module):
    def forward(self, x):
        return torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged).values()


# From PyTorch 2.15 on.
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*:UserWarning")
def test_quantised_and_nested_tensors_are_refused_with_what_to_use_instead():
    with pytest.raises(UnsupportedGraph, match=r"(?=.*quantize_per_tensor).*test_refusals.py:\d+.*torch.qint8.*scales"):
        capture(QuantisedTensor(), (torch.randn(4),))
    with pytest.raises(UnsupportedGraph, match="padded to a fixed size"):
        capture(Jagged(), (torch.randn(3, 2),))


@pytest.mark.parametrize("known", [True, False])
def test_a_triton_kernel_of_the_models_own_is_named_with_what_to_register_it_with(known, monkeypatch):
    def my_kernel():
        """What an autotuner of Triton's holds."""

    # Triton itself is not installed with PyTorch for a CPU; export's table of kernels and its operator are there.
    table = SimpleNamespace(get_kernel=lambda index: SimpleNamespace(fn=SimpleNamespace(fn=my_kernel)))
    if known:
        monkeypatch.setattr(triton_kernel_wrap, "kernel_side_table", table)
    graph = torch.fx.Graph()
    node = graph.call_function(triton_kernel_wrap.triton_kernel_wrapper_functional, (), {"kernel_idx": 10**6})
    with pytest.raises(UnsupportedGraph, match=("my_kernel" if known else "a kernel") + " at .*triton_op.*custom_operators"):
        require_schedulable(node)


def test_a_kernel_that_export_runs_into_is_told_to_be_registered():
    error = RuntimeError("Cannot access data pointer of Tensor. It is likely that we are erroneously tracing into a custom kernel.")
    assert "triton_op of PyTorch's library module" in str(explain_export_failure(error))


def test_quantised_weights_that_require_gradients_are_told_to_require_none():
    model = Quantised().eval().requires_grad_(True)
    with torch.no_grad(), pytest.raises(UnsupportedGraph, match=r"model\.requires_grad_\(False\)"):
        capture(model, (torch.randn(3, 8),))
    model.requires_grad_(False)
    assert capture(model, (torch.randn(3, 8),)).program.graph.operators


class Asserts(nn.Module):
    """Asserts something of what ``about`` gives for the model and its input."""

    def __init__(self, about):
        super().__init__()
        self.about = about
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x):
        torch._assert_async(self.about(self, x), "all of them positive")
        self.steps += 1
        return x * self.scale


VARYING = {
    "input": lambda model, x: (x > 0).all(),
    "one of several outputs": lambda model, x: x.max(dim=1)[0].min() > 0,
    "state": lambda model, x: (model.steps < 10).all(),
}


@pytest.mark.parametrize("name", VARYING)
def test_an_assertion_on_values_that_vary_is_refused(name):
    with pytest.raises(UnsupportedGraph, match=r"_assert_async at .*test_refusals.py:\d+ .*positive.*asserts something of the values"):
        capture(Asserts(VARYING[name]).eval(), (torch.rand(2, 4),))


class Checks(nn.Module):
    def forward(self, x, lengths):
        torch._check(lengths.max().item() <= x.shape[0])
        return x * lengths[:, None]


def test_a_check_of_what_is_in_an_input_is_refused_as_an_assertion():
    with pytest.raises(UnsupportedGraph, match=r"aten::item at .*test_refusals.py:\d+ asserts something of the values of an input"):
        capture(Checks().eval(), (torch.rand(2, 4), torch.tensor([1, 2])))


STAYING = {
    "weight": lambda model, x: (model.scale > 0).all(),
    "constant": lambda model, x: torch.arange(x.shape[1]).min() == 0,
    "size": lambda model, x: torch.tensor(x.shape[0] == 2),
}


@pytest.mark.parametrize("name", STAYING)
def test_an_assertion_on_what_stays_is_left_out(name):
    captured = capture(Asserts(STAYING[name]).eval(), (torch.rand(2, 4),))
    assert not any("assert" in operator.name for operator in captured.program.graph.operators)


def test_checks_of_sizes_are_left_out():
    class Checks(nn.Module):
        def forward(self, x):
            torch._check(x.shape[0] == 2)
            torch._assert(x.shape[1] == 4, "four columns")
            return x.to(torch.float64)

    assert len(capture(Checks().eval(), (torch.rand(2, 4),)).program.graph) == 1


class Mode(enum.IntEnum):
    NONE = 0
    FAST = 1


class Scales(nn.Module):
    def forward(self, x, by):
        return x.exp() * by


@pytest.mark.parametrize(
    ("by", "advice"),
    [(Mode.FAST, "its name or value"), (np.float64(2.5), "a plain one"), (np.float32(2.5), "a plain one"), (np.int64(2), "a plain one")],
)
def test_a_number_that_is_more_than_a_number_is_refused_before_a_file_is_made_that_no_call_is_like(by, advice):
    with pytest.raises(UnsupportedGraph, match=f"example input is .*{type(by).__name__}.* Give {advice}"):
        capture(Scales(), (torch.ones(3),), {"by": by})
    capture(Scales(), (torch.ones(3),), {"by": by.item() if isinstance(by, np.generic) else by.value})


@pytest.mark.parametrize(
    ("what", "advice"), [(Mode.FAST, "its name or value"), (Mode.NONE, "its name or value"), (np.float64(2.5), "a plain one")]
)
def test_a_number_that_is_more_than_a_number_cannot_be_returned(what, advice):
    class Tells(nn.Module):
        def forward(self, x):
            return x.exp(), what

    with pytest.raises(UnsupportedGraph, match=f"model returns .*{type(what).__name__}.* Return {advice}"):
        capture(Tells(), (torch.ones(3),))


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 3))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x])
        return self.seen.sum(0)


class Widens(Grows):
    def forward(self, x):
        self.seen = (self.seen + x).double()
        return x + 1


class Resizes(Grows):
    def forward(self, x):
        return torch.exp(self.seen.expand(2, 3), out=x) + 1


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Grows, r"replaces its buffer 'seen', \[1, 3\] torch.float32, by one that is \[2, 3\] torch.float32"),
        (Widens, r"replaces its buffer 'seen', \[1, 3\] torch.float32, by one that is \[1, 3\] torch.float64"),
        (Resizes, r"makes its input 0 \[2, 3\] float32, and is given it as \[1, 3\] float32"),
    ],
)
def test_what_changes_must_keep_its_shape_and_dtype(kind, says):
    with pytest.raises(UnsupportedGraph, match=says):
        capture(kind().eval(), (torch.ones(1, 3),))


class NoRoom(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


class SaysSo(nn.Module):
    def forward(self, x):
        print("at work", file=sys.stderr)
        return x + 1


@pytest.mark.parametrize("stderr", [None, NoRoom()], ids=["none", "full"])
def test_a_model_is_captured_where_nothing_can_be_written_to_stderr(stderr, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr)
    captured = capture(SaysSo().eval(), (torch.ones(2),))
    assert [operator.kind for operator in captured.program.graph.operators] == ["aten::add"]
