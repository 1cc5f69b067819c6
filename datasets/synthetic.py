"""A synthetic device, for tests and rehearsals only: every record it makes says ``simulated`` and its name begins with ``synthetic``.

Blocks are dispatched in start order into free slots; resident blocks share arithmetic and memory. The hidden demands are not a
function of the features, so that a model has something to be wrong about. Nothing it answers says anything about a real device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autosched.core.records import MAX_SLOWDOWN, Contamination, DeviceKey, GroupRecord, PairRecord, Samples, SoftwareKey, Source
from autosched.datasets.facts import DeviceFacts, KernelFacts, LaunchFacts
from autosched.datasets.journal import Scope
from autosched.datasets.schema import GroupRow, PairRow, Row, ScopeRow, SoloRow
from autosched.datasets.store import Store

_KINDS = ("aten::convolution", "aten::addmm", "aten::relu", "aten::cat", "aten::max_pool2d")


@dataclass(frozen=True, slots=True)
class HiddenKernel:
    """A kernel with what the device knows and a model does not.

    ``block_us`` is the time of one block alone; ``slots`` the share of the device one block takes; ``compute`` and ``memory`` what
    all its resident blocks together ask of each resource; ``compute_bound`` and ``memory_bound`` how far their lack slows it.
    """

    facts: KernelFacts
    blocks: int
    block_us: float
    slots: float
    compute: float
    memory: float
    compute_bound: float
    memory_bound: float


def synthetic_device(name: str = "synthetic-a") -> DeviceFacts:
    """A device of kind ``cuda`` whose name says that it does not exist."""
    honest = name if name.startswith("synthetic") else f"synthetic-{name}"
    return DeviceFacts(honest, "cuda", 32, 10_000.0, 1_000.0, 8 << 20, 2048)


def synthetic_kernels(count: int, device: DeviceFacts, rng: np.random.Generator, *, prefix: str = "k") -> list[HiddenKernel]:
    """Random kernels: some fill the device, some take a corner of it; some are bound by arithmetic, some by memory."""
    kernels = []
    for index in range(count):
        kind = _KINDS[int(rng.integers(len(_KINDS)))]
        dense = "conv" in kind or "addmm" in kind
        per_unit = int(rng.choice([1, 2, 4, 8]))
        capacity = per_unit * device.units
        blocks = max(1, int(capacity * math.exp(rng.normal(-0.7, 1.0))))
        block_us = float(math.exp(rng.normal(2.0, 0.6)))
        fill = min(1.0, blocks / capacity)
        compute = fill * float(rng.beta(4, 3) if dense else rng.beta(1.2, 8))
        memory = fill * float(rng.beta(2, 5) if dense else rng.beta(4, 2))
        solo_us = math.ceil(blocks / capacity) * block_us
        flops = int(compute * device.peak_gflops * 1e3 * solo_us)
        moved = int(memory * device.bandwidth_gb_s * 1e3 * solo_us)
        launch = LaunchFacts(blocks, 256, 32, 0, per_unit)
        read = moved * 3 // 5
        facts = KernelFacts(f"{prefix}{index}", 1, kind, flops, read, moved - read, blocks * 1024, solo_us, 1, launch)
        bound = float(rng.uniform(0.3, 1.0))
        share = compute / max(compute + memory, 1e-9)
        kernels.append(
            HiddenKernel(facts, blocks, block_us, 1.0 / capacity, compute / fill, memory / fill, bound * share, bound * (1 - share))
        )
    return kernels


def finish_times(kernels: Sequence[HiddenKernel]) -> tuple[list[float], list[list[float]]]:
    """When each kernel is done, microseconds from the common start, all started at once in the order given.

    Returns:
        The finish times, and for each kernel the work (microseconds of its own solo time) it had done at each of them.
    """
    left = [kernel.blocks for kernel in kernels]
    running: list[tuple[int, int, float]] = []  # kernel, blocks, microseconds of work left in each
    finish = [0.0] * len(kernels)
    done = [0.0] * len(kernels)
    at_finish: list[tuple[int, list[float]]] = []
    now = 0.0
    while running or any(left):
        free = 1.0 - sum(kernels[k].slots * blocks for k, blocks, _ in running)
        for index, kernel in enumerate(kernels):
            started = min(left[index], int(free / kernel.slots + 1e-9))
            if started > 0:
                running.append((index, started, kernel.block_us))
                left[index] -= started
                free -= started * kernel.slots
            if left[index]:
                break
        rates = _rates(kernels, running)
        step = min(work / rates[k] for k, _, work in running)
        now += step
        for index, blocks, _ in running:
            done[index] += step * rates[index] * blocks / kernels[index].blocks * kernels[index].facts.solo_us / kernels[index].block_us
        running = [(k, blocks, work - step * rates[k]) for k, blocks, work in running if work - step * rates[k] > 1e-9]
        for index in range(len(kernels)):
            if not finish[index] and not left[index] and all(k != index for k, _, _ in running):
                finish[index] = now
                at_finish.append((index, list(done)))
    table = dict(at_finish)
    return finish, [table[index] for index in range(len(kernels))]


def _rates(kernels: Sequence[HiddenKernel], running: Sequence[tuple[int, int, float]]) -> dict[int, float]:
    """Progress of each kernel's resident blocks, 1.0 alone; slightly steeper than linear, unlike any model here."""
    compute = sum(kernels[k].compute * kernels[k].slots * blocks for k, blocks, _ in running)
    memory = sum(kernels[k].memory * kernels[k].slots * blocks for k, blocks, _ in running)
    rates = {}
    for k in {k for k, _, _ in running}:
        kernel = kernels[k]
        lack = kernel.compute_bound * (max(1.0, compute) ** 1.2 - 1.0) + kernel.memory_bound * (max(1.0, memory) ** 1.2 - 1.0)
        rates[k] = 1.0 / (1.0 + lack)
    return rates


def pair_record(first: HiddenKernel, last: HiddenKernel, rng: np.random.Generator) -> PairRecord:
    """One pair run with multiplicative noise on each time."""
    finish, work = finish_times([first, last])
    solo_first, solo_last = first.facts.solo_us, last.facts.solo_us
    early, late = (0, 1) if finish[0] <= finish[1] else (1, 0)
    slow = [0.0, 0.0]
    slow[early] = finish[early] / (solo_first, solo_last)[early]
    slow[late] = min(MAX_SLOWDOWN, finish[early] / max(work[early][late], 1e-6))
    factors = np.exp(rng.normal(0.0, 0.02, size=3))
    together = max(finish) * float(factors[2])
    return PairRecord(
        first.facts.signature, 1, last.facts.signature, 1, solo_first, solo_last, together, max(0.9, slow[0] * float(factors[0])),
        max(0.9, slow[1] * float(factors[1])), together / (solo_first + solo_last), 1, 1, 9, Contamination(0.0, 0.0), Source.SIMULATED,
    )  # fmt: skip


def synthetic_store(
    folder: Path,
    *,
    families: Sequence[str] = ("alpha", "beta", "gamma", "delta"),
    kernels: int = 12,
    pairs: int = 60,
    seed: int = 0,
    device: str = "synthetic-a",
) -> Store:
    """A store full of simulated rows: ``pairs`` ordered pairs and four groups for each family."""
    rng = np.random.default_rng(seed)
    facts = synthetic_device(device)
    key = DeviceKey("cuda", facts.name, (("sm_count", str(facts.units)), ("synthetic", "true")))
    software = SoftwareKey((("synthetic", "1"),))
    scope = Scope(key, software).digest
    rows: list[Row] = [ScopeRow(scope, key, software, facts)]
    for family in families:
        hidden = synthetic_kernels(kernels, facts, rng, prefix=f"{family}-")
        model = f"synthetic:{family}"
        for kernel in hidden:
            median = kernel.facts.solo_us
            samples = Samples(median, median * 0.99, median * 1.01, median * 1.02, median * 0.98, 9)
            rows.append(SoloRow(scope, family, model, kernel.facts, samples, Contamination(0.0, 0.0), Source.SIMULATED))
        for _ in range(pairs):
            a, b = (int(i) for i in rng.choice(kernels, 2, replace=False))
            rows.append(PairRow(scope, family, model, pair_record(hidden[a], hidden[b], rng)))
        for size in (3, 3, 4, 4):
            members = [hidden[int(i)] for i in rng.choice(kernels, size, replace=False)]
            finish, _ = finish_times(members)
            names = tuple(member.facts.signature for member in members)
            solo = tuple(member.facts.solo_us for member in members)
            group = GroupRecord(
                names, (1,) * size, solo, (1,) * size, tuple(finish), max(finish), 9, Contamination(0.0, 0.0), Source.SIMULATED
            )
            rows.append(GroupRow(scope, family, model, group))
        for repeat in (1, 2):
            a, b = (int(i) for i in rng.choice(kernels, 2, replace=False))
            for number in range(repeat, repeat + 2):
                rows.append(PairRow(scope, family, model, pair_record(hidden[a], hidden[b], rng), number))
    store = Store.create(folder)
    store.append(rows)
    return store
