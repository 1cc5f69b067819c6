"""Transformers built from a configuration with random weights: name -> model and example inputs. Nothing is downloaded.

What they are, for people, is in ``suite.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Made = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


def _tokens(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def _bert(batch: int) -> Made:
    from transformers import BertConfig, BertModel

    config = BertConfig(return_dict=False)
    return BertModel(config), (), {"input_ids": _tokens(batch, 32, config.vocab_size)}


def _distilbert(batch: int) -> Made:
    from transformers import DistilBertConfig, DistilBertModel

    config = DistilBertConfig(return_dict=False)
    return DistilBertModel(config), (), {"input_ids": _tokens(batch, 32, config.vocab_size)}


def _gpt2(batch: int) -> Made:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(return_dict=False, use_cache=False)
    return GPT2Model(config), (), {"input_ids": _tokens(batch, 32, config.vocab_size)}


class _HiddenStates(torch.nn.Module):
    """An encoder and decoder that returns the decoder's last hidden states instead of transformers' own container."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        """Both int64 ``[batch, tokens]``; output float ``[batch, tokens, width]``."""
        hidden: torch.Tensor = self.model(input_ids=input_ids, decoder_input_ids=decoder_input_ids).last_hidden_state
        return hidden


def _t5(batch: int) -> Made:
    from transformers import T5Config, T5Model

    # The sizes of t5-small (Raffel et al., JMLR 2020, section 3.1.2 and its released checkpoints).
    config = T5Config(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, use_cache=False)
    inputs = {"input_ids": _tokens(batch, 32, config.vocab_size), "decoder_input_ids": _tokens(batch, 32, config.vocab_size)}
    return _HiddenStates(T5Model(config)), (), inputs


def _vit(batch: int) -> Made:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(return_dict=False)
    return ViTModel(config), (), {"pixel_values": torch.randn(batch, 3, 224, 224)}


MODELS: dict[str, Callable[[int], Made]] = {
    "bert": _bert,
    "distilbert": _distilbert,
    "gpt2": _gpt2,
    "t5": _t5,
    "vit": _vit,
}
