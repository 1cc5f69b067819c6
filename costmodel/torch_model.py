"""A small network on the same rows, fitted as a correction of the analytic prior."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact
from autosched.costmodel.design import design, log_targets
from autosched.costmodel.features import PAIR_FEATURES
from autosched.costmodel.model import Floats, PairLabels, PairQuery, Prediction, check_labels, not_fitted, point_prediction
from autosched.costmodel.threads import threads_for

if TYPE_CHECKING:
    import torch

HIDDEN = 64
"""Neurons of each of the two hidden layers."""

STEPS = 1500
"""Steps of the optimiser; the rate falls to zero along a cosine."""

BATCH = 512
"""Rows drawn, with replacement, for each step."""


class TorchModel:
    """Two hidden layers; the output is added to the analytic log slowdown, so that no data means no change."""

    name = "torch"

    def __init__(self) -> None:
        self._weights: dict[str, NDArray[np.float32]] | None = None

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        """Adam with weight decay on a Huber loss of the log slowdown; the mean of the last quarter's weights is kept."""
        import torch

        check_labels(query, labels)
        made = design(query)
        mean = made.rows.mean(axis=0)
        # A feature that is constant in training says nothing; it must not explode on a device where it varies.
        spread = made.rows.std(axis=0)
        scale = np.where(spread > 1e-6, 1.0 / np.maximum(spread, 1e-6), 0.0).astype(np.float32)
        inputs = torch.from_numpy((made.rows - mean) * scale)
        target = torch.from_numpy((log_targets(labels) - made.prior_log).astype(np.float32))
        weight = torch.from_numpy(np.concatenate([labels.weight, labels.weight]).astype(np.float32))
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        tensors = _initial(len(PAIR_FEATURES), generator)
        averaged = _optimise(tensors, inputs, target, weight, generator)
        self._weights = {name: tensor.numpy().copy() for name, tensor in averaged.items()}
        self._weights["mean"], self._weights["scale"] = mean.astype(np.float32), scale

    def predict_rows(self, rows: NDArray[np.float32], prior_log: Floats) -> Floats:
        """Log slowdown of directional rows: float64 ``[n]``.

        Raises:
            UsageError: before ``fit``.
        """
        if self._weights is None:
            raise not_fitted(self.name, "answer")
        w = self._weights
        # Beyond five spreads of the training data the network would extrapolate; it is held there instead.
        hidden = np.clip((rows - w["mean"]) * w["scale"], -5.0, 5.0)
        for layer in ("1", "2"):
            hidden = hidden @ w["weight" + layer] + w["bias" + layer]
            hidden = hidden / (1.0 + np.exp(-np.clip(hidden, -30.0, 30.0)))
        correction = (hidden @ w["weight3"] + w["bias3"])[:, 0]
        result: Floats = prior_log + correction.astype(np.float64)
        return result

    def predict(self, query: PairQuery) -> Prediction:
        """Predict every pair; numpy only, so that a process that tunes needs no second thread pool."""
        made = design(query)
        slowdowns = np.exp(self.predict_rows(made.rows, made.prior_log))
        return point_prediction(query, slowdowns[: len(query)], slowdowns[len(query) :])

    def save(self, directory: Path) -> None:
        """Write ``network.safetensors``; the feature names are its metadata."""
        from safetensors.numpy import save

        if self._weights is None:
            raise not_fitted(self.name, "be saved")
        content = save(self._weights, metadata={"features": ",".join(PAIR_FEATURES)})
        (directory / "network.safetensors").write_bytes(content)

    @classmethod
    def load(cls, directory: Path) -> TorchModel:
        """Read ``network.safetensors``.

        Raises:
            ArtifactCorrupt, IncompatibleArtifact: as ``PairModel.load``.
        """
        from safetensors import SafetensorError, safe_open

        path = directory / "network.safetensors"
        try:
            with safe_open(path, framework="numpy") as file:
                features = (file.metadata() or {}).get("features", "")
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError) as error:
            raise ArtifactCorrupt(str(path), str(error)) from error
        if features != ",".join(PAIR_FEATURES):
            raise IncompatibleArtifact(str(path), [f"features: {features} there, {','.join(PAIR_FEATURES)} here"])
        expected = {"mean", "scale"} | {f"{kind}{layer}" for kind in ("weight", "bias") for layer in "123"}
        if set(weights) != expected:
            raise ArtifactCorrupt(str(path), f"it holds tensors {sorted(weights)}; expected {sorted(expected)}")
        model = cls()
        model._weights = weights
        return model


def _initial(features: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    import torch

    sizes = [(features, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)]
    tensors: dict[str, torch.Tensor] = {}
    for layer, (before, after) in enumerate(sizes, start=1):
        # The last layer begins at zero: an unfitted network is the analytic prior.
        scale = 0.0 if layer == 3 else (2.0 / before) ** 0.5
        tensors[f"weight{layer}"] = torch.randn(before, after, generator=generator) * scale
        tensors[f"bias{layer}"] = torch.zeros(after)
    return tensors


def _optimise(
    tensors: dict[str, torch.Tensor], inputs: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    import torch
    from torch.nn.functional import huber_loss, silu

    for tensor in tensors.values():
        tensor.requires_grad_(True)
    optimiser = torch.optim.AdamW(tensors.values(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    averaged = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    tail = STEPS // 4
    with threads_for(BATCH), torch.enable_grad():
        for step in range(STEPS):
            rows = torch.randint(len(inputs), (min(BATCH, len(inputs)),), generator=generator)
            hidden = silu(inputs[rows] @ tensors["weight1"] + tensors["bias1"])
            hidden = silu(hidden @ tensors["weight2"] + tensors["bias2"])
            answer = (hidden @ tensors["weight3"] + tensors["bias3"])[:, 0]
            loss = (huber_loss(answer, target[rows], delta=0.5, reduction="none") * weight[rows]).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            if step >= STEPS - tail:
                for name, tensor in tensors.items():
                    averaged[name] += tensor.detach() / tail
    return averaged
