"""What cannot be scheduled is refused with the operator, the line and what to do; nothing is printed."""

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.errors import UnsupportedGraph


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


class ChangesItsInput(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x


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
    (ChangesItsInput, "changes its input", "Clone"),
    (Raises, "the weather", "call it yourself"),
    (WrongShape, "must have same reduction dim", "call it yourself"),
]


@pytest.mark.parametrize(("model", "names", "advises"), CASES, ids=[case[0].__name__ for case in CASES])
def test_refused_with_operator_line_and_advice(model, names, advises, capsys):
    with pytest.raises(UnsupportedGraph, match=advises) as caught:
        capture(model(), (torch.randn(3, 4),))
    message = str(caught.value)
    assert names in message
    if model is not ChangesItsInput:
        assert "test_refusals.py:" in message
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == ""


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
