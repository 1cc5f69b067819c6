"""The models of the suite by name, without building or importing any: listing them takes no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

OWN = {
    "randwire": "randomly wired network WS(32, 4, 0.75), three stages, small channels",
    "deepfm": "DeepFM, 64 embedding look-ups",
    "lstm": "two-layer LSTM, 24 steps written out",
    "tagger": "two-layer LSTM in both directions, 50 tokens",
    "speech": "convolutions and three layers of GRU in both directions, 100 frames",
    "moe": "two blocks of eight dense experts",
    "decoder": "one step of decoding with a cache of 512 tokens that each call changes",
    "decoder_int8": "the same with the weights of its products in eight bits, as quantizing them alone leaves them",
    "encoder_int8": "a text encoder whose products are of eight bits, weights and rows alike, 32 tokens",
    "toy": "a small branchy convolution net, for trying things out",
}
TORCHVISION = ("googlenet", "inception_v3", "squeezenet1_1", "resnet50", "mobilenet_v2", "densenet121", "densenet201", "resnext50_32x4d")
TIMM = ("hrnet_w18", "nasnetalarge", "pnasnet5large", "inception_v4")
TRANSFORMERS = {
    "bert": "BERT base, 32 tokens",
    "distilbert": "DistilBERT base, 32 tokens",
    "gpt2": "GPT-2 small, 32 tokens",
    "t5": "T5 small, encoder and decoder of 32 tokens",
    "vit": "ViT base, 224 x 224",
}


@dataclass(frozen=True, slots=True)
class ZooEntry:
    """A model worth trying. ``package`` is what must be installed beside autosched, or empty."""

    name: str
    description: str
    package: str


def names() -> list[ZooEntry]:
    """The models of the suite. Any other name of torchvision or timm works too."""
    found = [ZooEntry(f"autosched:{name}", description, "") for name, description in OWN.items()]
    found += [ZooEntry(f"torchvision:{name}", "torchvision classifier", "torchvision") for name in TORCHVISION]
    found += [ZooEntry(f"timm:{name}", "timm classifier", "timm") for name in TIMM]
    found += [ZooEntry(f"transformers:{name}", description, "transformers") for name, description in TRANSFORMERS.items()]
    return found
