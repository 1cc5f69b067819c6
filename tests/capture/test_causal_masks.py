"""Masks of PyTorch's Transformer modules: their numbers decide nothing while the model is exported."""

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.runtime.kernels import bind

WIDTH = 16


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True), 1)

    def forward(self, x):
        return self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 32, batch_first=True), 1)

    def forward(self, x, mask):
        return self.layers(x, x, mask)


class Placed(Decoder):
    def forward(self, x, mask):
        return self.layers(x, x, mask, None, None, None, None)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Transformer(WIDTH, 4, 1, 1, 32, batch_first=True)

    def forward(self, x, mask):
        return self.layers(x, x, src_mask=mask, tgt_mask=mask)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
SOME = torch.zeros(5, 5).masked_fill_(torch.eye(5).bool().roll(1, 0), float("-inf"))


@pytest.mark.parametrize("kind", [Encoder, Decoder, Placed, Both])
def test_a_mask_may_be_the_causal_one_or_any_other(kind):
    model, x = kind().eval(), torch.randn(2, 5, WIDTH)
    masks = () if kind is Encoder else (CAUSAL,)
    captured = capture(model, (x, *masks))
    bound = bind(captured.program, captured.constants)
    for mask in (CAUSAL, SOME)[: 1 + len(masks)]:
        call = (torch.randn(2, 5, WIDTH), mask)[: 1 + len(masks)]
        with torch.no_grad():
            torch.testing.assert_close(bound.run(call)[0], model(*call))
    assert not any(module._forward_pre_hooks for module in model.modules())


class Subclass(nn.TransformerEncoder):
    def forward(self, x):
        return super().forward(x, None, None, False)


def test_a_subclass_with_arguments_of_its_own_is_told_nothing():
    model = Subclass(nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True), 1).eval()
    assert capture(model, (torch.randn(2, 5, WIDTH),)).program.graph.operators
