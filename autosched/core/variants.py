"""How a model is cut into operators, and how one operator may be run: two closed sets that every room names alike.

An operator's *variant* is part of a schedule, never of a program: a bundle holds calls and variant numbers, and the machine that loads it
compiles what it needs itself.
"""

from __future__ import annotations

import enum

from autosched.core.errors import UsageError


class Lowering(enum.StrEnum):
    """What one operator of a captured model is."""

    ATEN = "aten"  # one call of the exported graph
    REWRITTEN = "rewritten"  # folded, simplified, small pointwise chains merged
    FUSED = "fused"  # a region that a compiler can make one callable of
    INDUCTOR = "inductor"  # one launch of Inductor's whole-graph code
    MAX_AUTOTUNE = "max_autotune"  # the same in Inductor's mode of that name: templates chosen by timing
    MAX_AUTOTUNE_COMBO = "max_autotune_combo"  # and small kernels of one level put into one launch (CUDA)


WHOLE = (Lowering.INDUCTOR, Lowering.MAX_AUTOTUNE, Lowering.MAX_AUTOTUNE_COMBO)
"""The lowerings whose operators are the launches of Inductor's code for the whole model, one for each mode that Inductor compiles in."""


class Variant(enum.IntEnum):
    """How an operator runs. Numbers are written to bundles: never renumber, only add."""

    CALLS = 0  # its ATen calls, one after the other
    COMPILED = 1  # compiled by Inductor as it stands
    TUNED_TEMPLATES = 2  # compiled by Inductor, matrix products chosen among templates and libraries by timing (CUDA)
    TEMPLATES = 3  # as TUNED_TEMPLATES, from templates alone: other tiles than the libraries have, and epilogues inside (CUDA)
    HALF_SMS = 4  # its calls, matrix products aimed at half of the multiprocessors (CUDA, half precision); since bundle schema 3
    CUDNN_FUSED = 5  # its calls, convolutions with bias, residual and relu in one kernel of cuDNN's (CUDA); since bundle schema 4
    CUBLASLT = 6  # its calls, matrix products without a bias by cuBLASLt in the place of cuBLAS (CUDA); since bundle schema 6
    WINOGRAD_2 = 7  # its calls, 3x3 convolutions by Winograd's algorithm in tiles of 2x2 results (CPU, float32); since bundle schema 7
    WINOGRAD_4 = 8  # the same in tiles of 4x4
    OWN_PRODUCT = 9  # its calls, products with constant weights by a kernel of our own (CPU, 8 to 32 bits); since bundle schema 8
    OWN_CONVOLUTION = 10  # its calls, convolutions summed as they are by a kernel of our own (CPU, float32); since bundle schema 9
    OWN_RECURRENCE = 11  # its calls, layers of GRU and LSTM by a kernel of our own (CPU, float32); since bundle schema 9
    OWN_ATTENTION = 12  # its calls, attention by a kernel of our own (CPU, 16 or 32 bits); since bundle schema 10
    OWN_CHAIN = (
        13  # its calls, a convolution and the depthwise one that alone reads it by one kernel of our own (CPU, float32); since schema 11
    )
    OWN_POOLING = 14  # its calls, pooling by a kernel of our own (CPU, float32); since bundle schema 12


def lowering_named(name: str) -> Lowering:
    """The lowering called ``name``.

    Raises:
        UsageError: listing those there are.
    """
    try:
        return Lowering(name)
    except ValueError:
        raise UsageError(f"lowering is {name!r}; expected one of {', '.join(Lowering)}, auto") from None


def variant_signature(signature: str, variant: int) -> str:
    """Under what name measurements of a variant are kept: the operator's signature itself for its calls.

    >>> variant_signature("ab12", 0), variant_signature("ab12", 1)
    ('ab12', 'ab12+compiled')
    """
    return signature if variant == Variant.CALLS else f"{signature}+{Variant(variant).name.lower()}"


def operator_signature(name: str) -> str:
    """The signature of the operator whose variant :func:`variant_signature` called ``name``.

    >>> operator_signature("ab12+compiled"), operator_signature("ab12")
    ('ab12', 'ab12')
    """
    return name.partition("+")[0]
