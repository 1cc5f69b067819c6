"""What can be known to be wrong with a request before a model is built, which for a large one takes longer than reading the message."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autosched.core.variants import lowering_named
from autosched.costmodel.persist import read_card
from autosched.device.registry import device_named
from autosched.pipeline.budget import budget_for
from autosched.pipeline.granularity import AUTO
from autosched.pipeline.replaying import PREFIX
from autosched.search.strategy import STRATEGIES


def check_request(
    device: str,
    effort: str,
    budget_s: float | None = None,
    lowering: str | None = None,
    strategies: Sequence[str] | None = None,
    cost_model: Path | None = None,
) -> None:
    """Look at the options of ``tune`` and ``compare``; a replay's folder is looked at when it is read.

    Raises:
        UsageError: an effort, a budget or a lowering that there is not.
        UnknownName: a device or a strategy that there is not.
        DeviceMissing: a device that this machine does not have.
        ArtifactError: a folder that holds no cost model, or a damaged one.
    """
    budget_for(effort, budget_s)
    if lowering not in (None, AUTO):
        lowering_named(str(lowering))
    for name in strategies or ():
        if name != "tuned":
            STRATEGIES.get(name)
    if cost_model is not None:
        read_card(cost_model)
    if not device.startswith(PREFIX):
        device_named(device)
