"""Where the numbers of a tensor end up that is reshaped, permuted and copied: each dimension as a product of factors of the first ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosched.capture.draft import contiguous_strides
from autosched.core.graph import TensorSpec


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of a dimension.

    Args:
        step: how many numbers of the source, counted row by row, lie between neighbours. No two factors share one.
        size: how many there are, more than one.
        origin: their stride in the source.
        stride: their stride now.
    """

    step: int
    size: int
    origin: int
    stride: int

    def split(self, inner: int) -> tuple[Factor, Factor]:
        """An outer factor, and one of size ``inner``."""
        outer = Factor(self.step * inner, self.size // inner, self.origin * inner, self.stride * inner)
        return outer, replace(self, size=inner)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A tensor made of a source.

    Args:
        dimensions: the factors of each, outer ones first; none of one of size one.
        copied: how often the numbers were.
    """

    dimensions: tuple[tuple[Factor, ...], ...]
    copied: int = 0

    def reshaped(self, shape: Sequence[int]) -> Arrangement | None:
        """As ``reshape`` does, which copies where no view has that shape; ``None`` if a factor would have to be split in uneven parts.

        >>> turned = arrangement_of(TensorSpec((4, 6), "float32", (6, 1))).permuted((1, 0))
        >>> turned.reshaped((2, 12)).copied, turned.reshaped((2, 3, 4)).copied, turned.reshaped((5, 5))
        (1, 0, None)
        """
        left = [factor for dimension in self.dimensions for factor in dimension]
        dimensions: list[tuple[Factor, ...]] = []
        for size in reversed(shape):
            taken: list[Factor] = []
            while size > 1:
                factor = left.pop()
                if factor.size > size and factor.size % size == 0:
                    outer, factor = factor.split(size)
                    left.append(outer)
                if size % factor.size:
                    return None
                size //= factor.size
                taken.insert(0, factor)
            dimensions.insert(0, tuple(taken))
        made = Arrangement(tuple(dimensions), self.copied)
        pairs = (pair for dimension in dimensions for pair in itertools.pairwise(dimension))
        return made if all(outer.stride == inner.stride * inner.size for outer, inner in pairs) else made.cloned()

    def permuted(self, order: Sequence[int]) -> Arrangement:
        """As ``permute`` does."""
        return Arrangement(tuple(self.dimensions[place] for place in order), self.copied)

    def cloned(self) -> Arrangement:
        """Copied row by row."""
        step = math.prod(self.shape())
        dimensions: list[tuple[Factor, ...]] = []
        for dimension in self.dimensions:
            factors: list[Factor] = []
            for factor in dimension:
                step //= factor.size
                factors.append(replace(factor, stride=step))
            dimensions.append(tuple(factors))
        return Arrangement(tuple(dimensions), self.copied + 1)

    def shape(self) -> list[int]:
        """Of the tensor."""
        return [math.prod(factor.size for factor in dimension) for dimension in self.dimensions]

    def factors(self, order: Sequence[int]) -> list[Factor]:
        """Those of the dimensions in that order."""
        return [factor for place in order for factor in self.dimensions[place]]

    def lies(self, order: Sequence[int]) -> bool:
        """Whether the numbers lie side by side with the dimensions in that order, the last one innermost."""
        return _dense([(factor.size, factor.stride) for factor in self.factors(order)])

    def lay(self, order: Sequence[int]) -> bool:
        """Whether they did in the source."""
        return _dense([(factor.size, factor.origin) for factor in self.factors(order)])

    def order(self) -> list[int]:
        """The dimensions as they lie, the innermost one last."""
        strides: list[int] = []
        for dimension in reversed(self.dimensions):
            strides.insert(0, dimension[-1].stride if dimension else (strides or [1])[0])
        return sorted(range(len(strides)), key=lambda place: -strides[place])


def arrangement_of(spec: TensorSpec) -> Arrangement | None:
    """A source as it is; ``None`` for one without numbers, or without a place of memory for each."""
    if len(spec.strides) != len(spec.shape) or not spec.elements:
        return None
    each = list(zip(contiguous_strides(spec.shape), spec.shape, spec.strides, strict=True))
    if any(size > 1 > stride for _, size, stride in each):
        return None
    return Arrangement(tuple((Factor(step, size, stride, stride),) if size > 1 else () for step, size, stride in each))


def _dense(factors: Sequence[tuple[int, int]]) -> bool:
    step = 1
    for size, stride in reversed(factors):
        if stride != step:
            return False
        step *= size
    return True
