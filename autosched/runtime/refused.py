"""PyTorch's own operators that no schedule may run, whoever wrote it.

A schedule may come from a stranger. It runs operators that make tensors of tensors and that check what they are given: no captured model
needs any other.
"""

from __future__ import annotations

from typing import Any

# Reading files, printing, and changing what memory a tensor means.
_EFFECTS = frozenset(
    {
        "from_file", "_print", "set_", "set_data", "resize_", "resize_as_", "_resize_output_", "set_source", "pin_memory", "_pin_memory",
        "data_ptr",
    }
)  # fmt: skip
# These write to an argument, or give it other memory, and their schemas do not say so.
_UNTOLD = frozenset({"_copy_from", "_copy_from_and_resize", "_cudnn_rnn_flatten_weight"})
# These believe the indices, offsets or strides that they are given, and read or write wherever those point.
_UNCHECKED = frozenset(
    {
        "_sparse_coo_tensor_unsafe", "_sparse_coo_tensor_with_dims_and_tensors", "_sparse_compressed_tensor_unsafe",
        "_sparse_csr_tensor_unsafe", "_sparse_csc_tensor_unsafe", "_sparse_bsr_tensor_unsafe", "_sparse_bsc_tensor_unsafe",
        "_convert_indices_from_coo_to_csr", "_convert_indices_from_csr_to_coo", "_reshape_alias", "_reshape_alias_copy",
        "_nested_view_from_buffer", "_nested_view_from_buffer_copy", "_nested_view_from_jagged", "_nested_view_from_jagged_copy",
        "_jagged_to_padded_dense_forward", "_padded_dense_to_jagged_forward",
    }
)  # fmt: skip
_REFUSED = _EFFECTS | _UNTOLD | _UNCHECKED


def is_refused(name: str) -> bool:
    """Whether no operator of this name may run, whatever its namespace."""
    return name in _REFUSED or name.startswith("__")


def makes_tensors(schema: Any) -> bool:
    """Whether an operator returns a tensor, or a list of them. TorchScript's own, which write files and print among other things, do not.

    Args:
        schema: its ``torch.FunctionSchema``.
    """
    return any("Tensor" in str(item.type) for item in schema.returns)
