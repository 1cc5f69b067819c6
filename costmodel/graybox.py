"""The grey box: every kernel has a demand for each resource and a sensitivity to its lack, fitted from a few runs.

Form. With ``S`` the share of cores or block slots from the analytic prior, ``d[k, r]`` the demand of kernel ``k`` for resource ``r``
(a fraction of the device) and ``f[k, r]`` its sensitivity::

    log slowdown = bias + g[k] * log S + log(1 + sum_r f[k, r] * soft(d[k, r] + d[other, r] - 1))

Demands start at what the features say; each kernel's deviation is drawn to zero, so that a kernel that was never measured gets what its
features say, and one with six probe runs gets its own. *Source:* sensitivity and pressure as in Bubble-Up (Mars et al., MICRO 2011);
partial pooling as in Gelman and Hill, Data Analysis Using Regression, chapter 12.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from autosched.core.decoding import decode_json
from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact, UsageError
from autosched.costmodel.analytic import structural
from autosched.costmodel.design import log_targets, take, take_labels
from autosched.costmodel.features import FEATURE_SET, KernelColumns, kernel_columns, readable
from autosched.costmodel.model import Floats, PairLabels, PairQuery, Prediction, check_labels, not_fitted, point_prediction
from autosched.costmodel.threads import threads_for

if TYPE_CHECKING:
    import torch

RESOURCES = ("compute", "bandwidth", "units")
PER_KERNEL = 2 * len(RESOURCES) + 1
"""Deviations of one kernel: log demand and logit sensitivity of each resource, and log of ``g``."""

PER_CLASS = 3 * len(RESOURCES) + 4
"""Shared by all kernels of a kind of device: demand scale, sensitivity offset and slope of each resource; ``g`` and bias by direction."""

DEVIATION = 0.6
"""Standard deviation that a kernel's deviations are drawn to; half an order of magnitude at two deviations."""

NOISE = 0.08
"""Standard deviation of a measured log slowdown; with ``DEVIATION`` it decides how many runs outweigh the features."""

STEPS = 250
"""Steps of the optimiser over all rows; the rate falls to zero along a cosine."""

MOST_PAIRS = 6_000
"""More rows than this are thinned at random: seven numbers a kernel and thirteen shared ones need no more, and time grows with rows."""

SOFTNESS = 0.15
"""Width of the bend at saturation: contention begins a little before a resource is full."""


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    feature_set: int
    kernels: list[tuple[str, str, int]]
    classes: list[str]


class GrayboxModel:
    """Demand vectors by torch autograd. ``fit`` forgets; :meth:`adapt` keeps what is shared and fits new kernels from their probes."""

    name = "graybox"

    def __init__(self) -> None:
        self._shared: NDArray[np.float64] | None = None
        self._classes: tuple[str, ...] = ()
        self._deviations: dict[tuple[str, str, int], NDArray[np.float64]] = {}

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        """Fit what is shared and every kernel's deviation together, each row once in each step; at most ``MOST_PAIRS``."""
        check_labels(query, labels)
        self._classes = tuple(sorted({device.kind for device in query.devices}))
        self._deviations = {}
        self._shared = np.tile(_initial_shared(), (len(self._classes), 1))
        if len(query) > MOST_PAIRS:
            rows = np.sort(rng.choice(len(query), MOST_PAIRS, replace=False))
            query, labels = take(query, rows), take_labels(labels, rows)
        self._optimise(query, labels, shared=True)

    def adapt(self, query: PairQuery, labels: PairLabels) -> None:
        """Fit only the deviations of the kernels in ``query``, starting from what is known of them.

        Raises:
            UsageError: before ``fit``, or for a kind of device it was not fitted on.
        """
        check_labels(query, labels)
        self._require(query)
        self._optimise(query, labels, shared=False)

    def predict(self, query: PairQuery) -> Prediction:
        """Predict every pair; kernels that were not in the fit by their features."""
        self._require(query)
        assert self._shared is not None
        logs = self._log_slowdowns(query)
        return point_prediction(query, np.exp(logs[: len(query)]), np.exp(logs[len(query) :]))

    def predict_log(self, query: PairQuery) -> Floats:
        """Log slowdowns in the order of the directional rows, not cut at 1: float64 ``[2n]``."""
        self._require(query)
        return self._log_slowdowns(query)

    def save(self, directory: Path) -> None:
        """Write ``graybox.safetensors`` and ``graybox.json``."""
        from safetensors.numpy import save

        if self._shared is None:
            raise not_fitted(self.name, "be saved")
        names = sorted(self._deviations)
        table = np.stack([self._deviations[name] for name in names]) if names else np.zeros((0, PER_KERNEL))
        (directory / "graybox.safetensors").write_bytes(save({"shared": self._shared, "deviations": table}))
        (directory / "graybox.json").write_bytes(msgspec.json.encode(_Saved(FEATURE_SET, names, list(self._classes))))

    @classmethod
    def load(cls, directory: Path) -> GrayboxModel:
        """Read both files.

        Raises:
            ArtifactCorrupt, IncompatibleArtifact: as ``PairModel.load``.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = directory / "graybox.safetensors"
        try:
            tensors = load_file(path)
            saved = decode_json((directory / "graybox.json").read_bytes(), _Saved)
        except (SafetensorError, OSError, msgspec.DecodeError) as error:
            raise ArtifactCorrupt(str(path), str(error)) from error
        if not readable(saved.feature_set, saved.classes):
            raise IncompatibleArtifact(str(path), [f"feature set: {saved.feature_set} there, {FEATURE_SET} here"])
        expected = {"shared": (len(saved.classes), PER_CLASS), "deviations": (len(saved.kernels), PER_KERNEL)}
        if {name: tensor.shape for name, tensor in tensors.items()} != expected:
            raise ArtifactCorrupt(str(path), f"its tensors are not of shapes {expected}")
        model = cls()
        model._classes = tuple(saved.classes)
        model._shared = tensors["shared"].astype(np.float64)
        model._deviations = dict(zip(saved.kernels, tensors["deviations"].astype(np.float64), strict=True))
        return model

    def _require(self, query: PairQuery) -> None:
        if self._shared is None:
            raise not_fitted(self.name, "answer")
        unknown = sorted({device.kind for device in query.devices} - set(self._classes))
        if unknown:
            raise UsageError(
                f"the graybox model was fitted on {', '.join(self._classes)}, not on {', '.join(unknown)}: collect there and train"
            )

    def _table(self, query: PairQuery) -> Floats:
        """Known deviations of the query's kernels: float64 ``[n_kernels, PER_KERNEL]``."""
        table = np.zeros((len(query.kernels), PER_KERNEL))
        for row, key in enumerate(_kernel_keys(query)):
            known = self._deviations.get(key)
            if known is not None:
                table[row] = known
        return table

    def _log_slowdowns(self, query: PairQuery) -> Floats:
        import torch

        assert self._shared is not None
        with torch.no_grad():
            form = _Form(query, self._classes)
            shared, table = torch.from_numpy(self._shared), torch.from_numpy(self._table(query))
            result: Floats = form.log_slowdowns(shared, table).numpy()
            return result

    def _optimise(self, query: PairQuery, labels: PairLabels, *, shared: bool) -> None:
        import torch
        from torch.nn.functional import huber_loss

        assert self._shared is not None
        form = _Form(query, self._classes)
        target = torch.from_numpy(log_targets(labels))
        weight = torch.from_numpy(np.concatenate([labels.weight, labels.weight]))
        start = torch.from_numpy(self._shared.copy())
        base = start.clone().requires_grad_(shared)
        keys = _kernel_keys(query)
        # A kernel that was timed with several versions of software is one: the deviations of the last of them would stand for all.
        names = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        begun = np.zeros((len(names), PER_KERNEL))
        row_of = np.asarray([names[key] for key in keys], dtype=np.int64)
        begun[row_of] = self._table(query)
        table, rows = torch.from_numpy(begun).requires_grad_(True), torch.from_numpy(row_of)
        parameters = [{"params": [table], "lr": 0.05}] + ([{"params": [base], "lr": 0.02}] if shared else [])
        optimiser = torch.optim.Adam(parameters)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
        with threads_for(len(target)), torch.enable_grad():
            for _ in range(STEPS):
                error = huber_loss(form.log_slowdowns(base, table.index_select(0, rows)), target, delta=3 * NOISE, reduction="none")
                loss = (error * weight).sum() / NOISE**2 + (table**2).sum() / (2 * DEVIATION**2) + ((base - start) ** 2).sum() / 2
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
        self._shared = base.detach().numpy().copy()
        fitted = table.detach().numpy()
        for row in np.unique(np.concatenate([query.first, query.last])).tolist():
            self._deviations[keys[row]] = fitted[row_of[row]].copy()


class _Form:
    """The formula of this file's docstring over one query, in torch, float64."""

    def __init__(self, query: PairQuery, classes: tuple[str, ...]) -> None:
        import torch

        columns: KernelColumns = kernel_columns(query.kernels, query.devices, query.kernel_device)
        base = np.stack([columns.compute, columns.bandwidth, columns.units], axis=1)
        self._base = torch.from_numpy(np.log(np.clip(base, 0.01, 1.0)))
        kinds = np.asarray([classes.index(device.kind) for device in query.devices], dtype=np.int64)
        self._kernel_class = torch.from_numpy(kinds[query.kernel_device])
        self._first, self._last = torch.from_numpy(query.first), torch.from_numpy(query.last)
        slots = np.concatenate(structural(query, columns)) if len(query) else np.zeros(0)
        self._log_structural = torch.from_numpy(np.log(slots))
        self._directed = torch.from_numpy(np.concatenate([query.first, query.last + len(query.kernels)]))

    def log_slowdowns(self, shared: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """``shared`` ``[n_classes, PER_CLASS]``, ``table`` ``[n_kernels, PER_KERNEL]`` -> ``[2n]``."""
        import torch
        from torch.nn.functional import softplus

        count = len(RESOURCES)
        # index_select, because the gradient of plain indexing is several times slower.
        kind = shared.index_select(0, self._kernel_class)
        demand = (self._base + kind[:, :count] + table[:, :count]).exp()
        sensitivity = (kind[:, count : 2 * count] + kind[:, 2 * count : 3 * count] * self._base + table[:, count : 2 * count]).sigmoid()
        # What is lacking is the same for both of a pair, and the dearest part: computed once for the two.
        asked = demand.index_select(0, self._first) + demand.index_select(0, self._last)
        lack = SOFTNESS * softplus((asked - 1.0) / SOFTNESS)
        suffered = [(sensitivity.index_select(0, own) * lack).sum(dim=1) for own in (self._first, self._last)]
        contention = torch.cat(suffered).log1p()
        # One column for each direction and kernel; a row takes the one of its own direction.
        exponent = (kind[:, 3 * count : 3 * count + 2] + table[:, -1:]).exp()
        directed = exponent.T.reshape(-1).index_select(0, self._directed)
        bias = kind[:, 3 * count + 2 :].T.reshape(-1).index_select(0, self._directed)
        return bias + directed * self._log_structural + contention


def _initial_shared() -> Floats:
    """Demands as the features say; memory-bound and compute-bound kernels sensitive in proportion; slots as the prior says."""
    count = len(RESOURCES)
    values = np.zeros(PER_CLASS)
    values[count : 2 * count] = (1.0, 1.0, -2.0)
    values[2 * count : 3 * count] = (0.7, 0.7, 0.0)
    values[3 * count :] = (0.0, 0.0, 0.01, 0.01)
    return values


def _kernel_keys(query: PairQuery) -> list[tuple[str, str, int]]:
    return [
        (query.devices[place].name, kernel.signature, kernel.width)
        for kernel, place in zip(query.kernels, query.kernel_device.tolist(), strict=True)
    ]
