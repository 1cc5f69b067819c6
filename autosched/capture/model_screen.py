"""Which models are refused before anything is captured: in training mode, or without their weights here."""

from __future__ import annotations

import itertools

import torch

from autosched.core.errors import UnsupportedGraph
from autosched.core.wrappers import spread_over_processes


def require_inference(model: torch.nn.Module) -> None:
    """Refuse a model whose dropout or batch norm is in training mode.

    Raises:
        UnsupportedGraph: naming the first such module.
    """
    kinds = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)
    for name, module in model.named_modules():
        if module.training and isinstance(module, kinds):
            if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p == 0:
                continue
            raise UnsupportedGraph(
                f"module {name or '(the model)'} ({type(module).__name__}) is in training mode; expected inference. "
                "Call model.eval() first."
            )


def require_values(model: torch.nn.Module) -> None:
    """Refuse a model without weights: made on the meta device, or one whose weights lie elsewhere, until it is called or for good.

    Raises:
        UnsupportedGraph: naming the first such weight.
    """
    if spread := spread_over_processes(model):
        raise UnsupportedGraph(
            f"{spread}, which several processes share; expected whole weights in this one. Give the model as it was before it was sharded "
            "(fully_shard, FullyShardedDataParallel, parallelize_module, distribute_module): a schedule runs in one process."
        )
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedGraph(
                f"weight {name} is on the meta device, which holds no values; expected a model with its weights in memory. Load them "
                "first, onto the device that it will run on and without offloading."
            )
