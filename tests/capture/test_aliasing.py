"""What an operator changes in place is what its schema says, however its arguments are given; memory is shared by storage, not by value."""

from __future__ import annotations

import pytest
import torch

from autosched.capture.aliasing import shared_with, written_values
from autosched.core.program import Ref

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "written"),
    [
        (aten.add.Tensor, (Ref(1), Ref(2)), {}, ()),
        (aten.view.default, (Ref(1), [4]), {}, ()),  # shares memory and changes none
        (aten.add_.Tensor, (Ref(1), Ref(2)), {}, (1,)),
        (aten.add_.Tensor, (Ref(1), Ref(1)), {}, (1,)),
        (aten.mul.out, (Ref(1), Ref(2)), {"out": Ref(3)}, (3,)),
        (aten.max.dim_max, (Ref(1), 0), {"max": Ref(3), "max_values": Ref(4)}, (3, 4)),
        (aten.unbind_copy.int_out, (Ref(1), 0), {"out": [Ref(5), Ref(4)]}, (5, 4)),
        (aten._foreach_add_.Scalar, ([Ref(2), Ref(1)], 1), {}, (2, 1)),
        (aten._foreach_add_.List, ([Ref(2)], [Ref(1)]), {}, (2,)),
        (aten.copy_.default, (), {"self": Ref(7), "src": Ref(8)}, (7,)),
        (aten.batch_norm_update_stats.out, (Ref(1), None, None, 0.1), {"out0": Ref(2), "out1": Ref(3)}, (2, 3)),
    ],
)
def test_what_is_written_is_what_the_schema_marks(
    op: object, args: tuple[object, ...], kwargs: dict[str, object], written: tuple[int, ...]
) -> None:
    assert written_values(op, args, kwargs) == written  # type: ignore[arg-type]


def test_memory_is_shared_with_the_first_that_has_it() -> None:
    whole, other = torch.arange(6.0), torch.arange(6.0)
    part, turned = whole[2:], whole.view(2, 3).t()
    assert shared_with(part, iter([(3, other), (1, whole), (2, turned)])) == 1
    assert shared_with(turned, iter([(2, part), (1, whole)])) == 2
    assert shared_with(other, iter([(1, whole), (2, part)])) is None
    assert shared_with(other.clone(), iter([(3, other)])) is None
