"""Folds that test what is claimed: prediction for model families, kinds of operator, or devices that were not trained on."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autosched.core.custom_operators import known_kind
from autosched.core.errors import UsageError

_FAMILIES = (
    "googlenet", "inception", "nasnet", "squeezenet", "randwire", "deepfm", "resnext", "resnet", "mobilenet", "densenet", "hrnet",
    "efficientnet", "bert", "gpt", "t5", "vit", "swin", "lstm", "moe", "vgg", "alexnet", "regnet", "convnext", "shufflenet", "mnasnet",
    "tagger", "speech",
)  # fmt: skip
# A name as short as T5 is in many a word.
_SHORT = 3
# What a function or a file is called whatever model it makes.
_SAY_NOTHING = frozenset(
    {"make", "build", "create", "load", "get", "new", "model", "models", "network", "module", "main", "export", "exported", "the", "my"}
)


@dataclass(frozen=True, slots=True)
class Fold:
    """One held-out group: row indices, int64. No key of ``test`` occurs in ``train``."""

    name: str
    train: NDArray[np.int64]
    test: NDArray[np.int64]


def family_of(model: str) -> str:
    """The family a model's name belongs to: ``torchvision:resnet50`` -> ``resnet``; an unknown one's first word that tells models apart.

    The longest of those in the name: MnasNet is no NASNet. What is a family with something before it is of that family
    (``distilbert``, ``pnasnet5large``): one is no test of a model trained on the other. Short ones must begin a word: ``net5`` is no T5.
    Of a file, its name counts and no folder: models that somebody keeps in one place are not alike. ``make_ranker`` and ``make_reader``
    are two; where a function's name says nothing, its module's counts.

    >>> family_of("timm:hrnet_w18"), family_of("torchvision:inception_v3"), family_of("mine:net2"), family_of("torchvision:mnasnet0_5")
    ('hrnet', 'inception', 'net', 'mnasnet')
    >>> family_of("/srv/bert/ranker_2.pt2"), family_of("shop:make_reader"), family_of("shop.ranker:make_model")
    ('ranker', 'reader', 'ranker')
    """
    if model.endswith(".pt2"):
        names = [Path(model).stem.lower()]
    else:
        module, _, function = model.lower().rpartition(":")
        names = [function, *reversed(module.split("."))]
    found = [family for family in _FAMILIES if re.search(family if len(family) > _SHORT else f"(?<![a-z]){family}", names[0])]
    if found:
        return max(found, key=len)
    words = [word for name in names for word in re.split(r"[\d_.\-]+", name) if word]
    return next((word for word in words if word not in _SAY_NOTHING), names[0])


def operator_family(kind: str) -> str:
    """A coarse class of a main call: convolution, matmul, or memory (everything bound by moving data).

    >>> operator_family("aten::convolution"), operator_family("aten::addmm"), operator_family("aten::relu")
    ('convolution', 'matmul', 'memory')
    """
    kind = known_kind(kind)
    if "conv" in kind:
        return "convolution"
    return "matmul" if any(word in kind for word in ("mm", "linear", "attention", "einsum", "lstm", "rnn", "gru")) else "memory"


def leave_one_out(groups: Sequence[str], keys: Sequence[Hashable]) -> list[Fold]:
    """One fold for each group; rows of other groups whose key also occurs in the held-out group are left out of training.

    Args:
        groups: the group of each row: a model family, a device, or a kind of operator.
        keys: what must not be on both sides: the unordered pair of kernels of each row.

    Raises:
        UsageError: fewer than two groups.
    """
    names = sorted(set(groups))
    if len(names) < 2:
        raise UsageError(
            f"only one group ({', '.join(names) or 'no rows'}); expected two to hold one out: collect from another model family"
        )
    return [_fold(name, np.asarray([group == name for group in groups]), keys) for name in names]


def by_kernel(keys: Sequence[tuple[Hashable, Hashable]], folds: int, rng: np.random.Generator) -> list[Fold]:
    """Folds for one family only: kernels are dealt out at random; a fold tests the pairs that have a kernel of its share.

    Weaker than families: it says how well unseen kernels of a *seen* family are predicted. No pair of kernels is on both sides.

    Raises:
        UsageError: not even two kernels.
    """
    kernels = sorted({kernel for key in keys for kernel in key}, key=str)
    if len(kernels) < 2:
        raise UsageError(f"{len(kernels)} distinct kernels; expected at least two to hold one out")
    share = dict(zip((kernels[i] for i in rng.permutation(len(kernels))), (i % folds for i in range(len(kernels))), strict=True))
    result = []
    for fold in range(min(folds, len(kernels))):
        test = np.asarray([fold in (share[a], share[b]) for a, b in keys])
        result.append(Fold(f"kernels {fold + 1} of {folds}", np.flatnonzero(~test), np.flatnonzero(test)))
    return [fold for fold in result if len(fold.train) and len(fold.test)]


def by_operator_family(kinds: Sequence[tuple[str, str]]) -> list[Fold]:
    """One fold for each class of operator: tested on pairs that have one, trained on pairs that have none."""
    classes = [(operator_family(a), operator_family(b)) for a, b in kinds]
    folds = []
    for name in sorted({item for pair in classes for item in pair}):
        test = np.asarray([name in pair for pair in classes])
        if test.any() and not test.all():
            folds.append(Fold(name, np.flatnonzero(~test), np.flatnonzero(test)))
    return folds


def _fold(name: str, test: NDArray[np.bool_], keys: Sequence[Hashable]) -> Fold:
    held = {keys[row] for row in np.flatnonzero(test).tolist()}
    train = np.asarray([row for row in np.flatnonzero(~test).tolist() if keys[row] not in held], dtype=np.int64)
    return Fold(name, train, np.flatnonzero(test))
