"""How pair slowdowns are composed to three and more at once: several rules, on recorded groups and on a made-up GPU.

    python experiments/costmodel/rules.py                # datasets/data/<device>, into results/<device>/composition.txt; a minute
    python experiments/costmodel/rules.py STORE --out FOLDER
    python experiments/costmodel/rules.py --smoke

Recorded groups are composed from pairs that a model predicts which has not seen their model family. The made-up GPU dispatches thread
blocks (``search/leftover.py``) and its pairs are exact: what is left is the error of composing. Its columns are simulated, not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.costmodel.analytic import AnalyticModel  # noqa: E402
from autosched.costmodel.baselines import NoInterference  # noqa: E402
from autosched.costmodel.composition import run_down, shares  # noqa: E402
from autosched.costmodel.evaluate import predicted_groups  # noqa: E402
from autosched.costmodel.metrics import spearman  # noqa: E402
from autosched.costmodel.model import Floats, PairModel  # noqa: E402
from autosched.costmodel.pair_set import pair_set  # noqa: E402
from autosched.datasets.store import Store  # noqa: E402
from autosched.search.anneal import Annealer  # noqa: E402
from autosched.search.block_pairs import group_ends_us, pair_costs  # noqa: E402
from autosched.search.leftover import BlockEvaluator  # noqa: E402
from autosched.search.policies import Decoder, Policy  # noqa: E402
from autosched.search.problem import Problem  # noqa: E402
from autosched.search.simulate import Evaluator  # noqa: E402
from autosched.search.strategy import SearchContext  # noqa: E402
from autosched.search.synthetic import SHAPES, random_block_kernels, random_block_problem  # noqa: E402
from experiments.costmodel import stores, wholes  # noqa: E402

Rule = Callable[[Floats, Floats], Floats]
"""Slowdowns of those that run together, in order of start, from their excess over 1 beside each other (``[k, k]``) and their room."""

STRENGTHS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""What a correction learned from groups may be: slower by this much for each device's worth of room that is wanted beyond one."""

CHOSEN = "room in order of start, excess of those that have it"


def crowding(room: Floats) -> float:
    """Room that is wanted over what there is, at least 1, as far as no two of these show it."""
    return max(1.0, float(room.sum())) / max(1.0, float(np.sort(room)[-2:].sum()))


def at_once(room: Floats) -> float:
    """The share of the others that runs beside one of them at any time, if all take equal turns."""
    others = len(room) - 1
    return min(1.0, max(1.0, (others + 1) / crowding(room) - 1.0) / others) if others else 1.0


def summed(excess: Floats, room: Floats) -> Floats:
    return 1.0 + excess.sum(axis=1)


def summed_in_turns(excess: Floats, room: Floats) -> Floats:
    return summed(excess, room) * crowding(room)


def largest_in_turns(excess: Floats, room: Floats) -> Floats:
    return (1.0 + excess.max(axis=1)) * crowding(room)


def beside_in_turns(excess: Floats, room: Floats) -> Floats:
    return (1.0 + at_once(room) * excess.sum(axis=1)) * crowding(room)


def mean_rate_in_turns(excess: Floats, room: Floats) -> Floats:
    count = len(room)
    if count == 1:
        return np.ones(1)
    rates = np.where(np.eye(count, dtype=np.bool_), 0.0, 1.0 / (1.0 + excess)).sum(axis=1) / (count - 1)
    return crowding(room) / rates


def in_order_summed(excess: Floats, room: Floats) -> Floats:
    return summed(excess, room) / np.asarray(shares(room.tolist()))


def in_order(excess: Floats, room: Floats) -> Floats:
    part = np.asarray(shares(room.tolist()))
    return (1.0 + excess @ part) / part


def bounded(excess: Floats, room: Floats) -> Floats:
    """``in_order``, and three or more never take longer together than one after the other."""
    slowdowns = in_order(excess, room)
    return slowdowns * min(1.0, float((1.0 / slowdowns).sum())) if len(room) > 2 else slowdowns


def corrected(strength: float) -> Rule:
    return lambda excess, room: in_order(excess, room) * (1.0 + strength * (crowding(room) - 1.0))


RULES: dict[str, Rule] = {
    "sum of excess (processor sharing)": summed,
    "sum of excess, and equal turns on the cores": summed_in_turns,
    "largest excess, equal turns": largest_in_turns,
    "excess of those that have their turn, equal turns": beside_in_turns,
    "mean rate over the pairs, equal turns": mean_rate_in_turns,
    "room in order of start, sum of excess": in_order_summed,
    CHOSEN: in_order,
    "the same, and never longer than one after the other": bounded,
}


@dataclass(frozen=True, slots=True)
class Case:
    """Operators that ran together: times alone, excess beside each other (``[k, k]``), room, when each was done, and whose they are."""

    alone_us: Floats
    excess: Floats
    room: Floats
    end_us: Floats
    together_us: float
    family: str


def ends(case: Case, rule: Rule) -> Floats:
    """When ``rule`` says that each is done: float64 ``[k]``, microseconds."""
    return run_down(case.alone_us, lambda active: rule(case.excess[np.ix_(active, active)], case.room[active]))


def excess_of(first: Floats, last: Floats) -> Floats:
    order = np.arange(len(first))
    excess = np.where(order[:, None] < order[None, :], first, last) - 1.0
    np.fill_diagonal(excess, 0.0)
    return excess


def recorded(store: Store, seed: int) -> dict[str, list[Case]]:
    """The groups of a store by who predicted their pairs, each without its own model family."""
    pairs = pair_set(store)
    learned = wholes.without_each_family(pairs, "xgboost", seed)
    rivals: dict[str, dict[str, PairModel]] = {
        "xgboost": learned,
        "analytic": dict.fromkeys(learned, AnalyticModel()),
        "no interference": dict.fromkeys(learned, NoInterference()),
    }
    found: dict[str, list[Case]] = {}
    for name, models in rivals.items():
        for family, model in models.items():
            for group in predicted_groups(model, pairs, [row for row in store.groups() if row.family == family]):
                record = group.row.record
                excess = excess_of(group.first, group.last)
                case = Case(np.asarray(group.alone_us), excess, group.room, np.asarray(record.finish_us), record.together_us, family)
                found.setdefault(name, []).append(case)
    return found


def made_up(devices: int, groups: int, seed: int) -> list[Case]:
    """Random groups on made-up GPUs whose pairs are known exactly; a device counts as a family."""
    rng = np.random.default_rng(seed)
    found = []
    for device in range(devices):
        kernels = random_block_kernels(rng, 30)
        costs = pair_costs(kernels, np.arange(30, dtype=np.int32)[:, None])
        room = np.minimum(1.0, kernels.blocks / kernels.capacity)
        for size in (3, 4, 6, 8):
            for _ in range(groups):
                members = rng.choice(30, size, replace=False)
                index = np.ix_(members, members)
                end_us = np.asarray(group_ends_us(kernels, members.tolist()))
                excess = excess_of(costs.slowdown_first[index], costs.slowdown_last[index])
                found.append(Case(costs.solo_us[members], excess, room[members], end_us, float(end_us.max()), str(device)))
    return found


def error_pct(cases: Sequence[Case], rule: Rule, size: int) -> float:
    """Mean absolute error of the time together, percent."""
    return float(np.mean([abs(ends(case, rule).max() / case.together_us - 1.0) for case in cases if len(case.room) == size]) * 100)


def each_end_pct(cases: Sequence[Case], rule: Rule) -> float:
    """Median absolute error of when each operator is done, percent."""
    return float(np.median(np.concatenate([np.abs(ends(case, rule) / case.end_us - 1.0) for case in cases])) * 100)


def learned_error_pct(cases: Sequence[Case], sizes: Sequence[int]) -> list[float]:
    """``error_pct`` for each size, of ``corrected`` with the strength that is best on the groups of all other families."""
    off = {strength: [abs(ends(case, corrected(strength)).max() / case.together_us - 1.0) for case in cases] for strength in STRENGTHS}
    found = []
    for case_number, case in enumerate(cases):
        others = [number for number, other in enumerate(cases) if other.family != case.family]
        best = min(STRENGTHS, key=lambda strength: sum(off[strength][number] for number in others))
        found.append(off[best][case_number])
    return [float(np.mean([value for value, case in zip(found, cases, strict=True) if len(case.room) == size]) * 100) for size in sizes]


@dataclass(frozen=True, slots=True)
class WholeError:
    """Predicted against true times of schedules of made-up graphs on made-up GPUs; means over graphs, percent but the rank correlation."""

    mape_pct: float
    bias_pct: float
    spearman: float
    regret_pct: float
    found_bias_pct: float
    found_over_list_pct: float


def made_up_schedules(graphs: int, lanes: int, seed: int, *, room: bool, evaluations: int) -> WholeError:
    """How far the search's simulator is from the block level, with and without room.

    Thirty list schedules of each graph, made with and without room, are predicted; then annealing goes on from the one predicted fastest.
    ``found_bias_pct`` is the error of what it found, ``found_over_list_pct`` its true time over that of the truly fastest list schedule.
    """
    rows = []
    for graph in range(graphs):
        full, kernels = random_block_problem(seed + graph, 60, max_lanes=lanes, shape=sorted(SHAPES)[graph % len(SHAPES)])
        without = Problem.make(full.graph, replace(full.costs, room=None))
        block = BlockEvaluator(full, kernels, lanes)
        narrow = np.zeros(1, dtype=np.int32)
        decoders = [Decoder(problem, lanes, narrow) for problem in (full, without)]
        made = [decoder.decode(Policy(alpha=2.0 * place / 14)) for place in range(15) for decoder in decoders]
        true_us = np.asarray([block.makespan_us(item.order, item.lane, item.width_index, item.wait) for item in made])
        problem = full if room else without
        simulator = Evaluator(problem, lanes)
        said_us = np.asarray([simulator.makespan_us(item.order, item.lane, item.width_index, item.wait) for item in made])
        annealer = Annealer(problem, lanes, narrow)
        start = replace(made[int(said_us.argmin())], makespan_us=float(said_us.min()))
        candidates, _ = annealer.run(start, SearchContext(np.random.default_rng(seed), max_evaluations=evaluations), "rules")
        found = min(candidates, key=lambda item: item.makespan_us)
        found_us = block.makespan_us(found.order, found.lane, found.width_index, found.wait)
        off = said_us / true_us - 1.0
        rank = spearman(said_us, true_us)
        least_us = float(true_us.min())
        chosen_us = float(true_us[said_us.argmin()])
        errors = (float(np.abs(off).mean()), float(off.mean()), 0.0 if rank is None else rank, chosen_us / least_us - 1.0)
        rows.append((*errors, found.makespan_us / found_us - 1.0, found_us / least_us - 1.0))
    mape, bias, rank, regret, found_bias, over_list = np.mean(rows, axis=0).tolist()
    return WholeError(mape * 100, bias * 100, rank, regret * 100, found_bias * 100, over_list * 100)


def schedules_as_text(graphs: int, seed: int, *, evaluations: int) -> str:
    """``made_up_schedules`` with 4 and 8 lanes, as Markdown."""
    header = (
        "lanes",
        "simulator",
        "MAPE",
        "bias",
        "Spearman",
        "regret of its choice",
        "bias of what annealing found",
        "found over best list schedule",
    )
    lines = ["", "| " + " | ".join(header) + " |", "|---:|---|" + "---:|" * (len(header) - 2)]
    for lanes in (4, 8):
        for room in (False, True):
            row = made_up_schedules(graphs, lanes, seed, room=room, evaluations=evaluations)
            cells = f"{row.mape_pct:.1f} | {row.bias_pct:+.1f} | {row.spearman:.2f} | {row.regret_pct:.1f} | {row.found_bias_pct:+.1f} | "
            lines.append(f"| {lanes} | {'**with room**' if room else 'without'} | {cells}{row.found_over_list_pct:+.2f} |")
    footer = (
        f"Percent; whole schedules of {graphs} made-up graphs of 60 operators on the simulated GPU: 30 list schedules each, then annealing "
        f"by {evaluations:,} evaluations from the one predicted fastest, and its true time over the truly fastest of the list. Simulated, "
        "nothing measured."
    )
    return "\n".join([*lines, "", footer]) + "\n"


def as_text(groups: dict[str, list[Case]], gpu: list[Case], label: str) -> str:
    """The table, as Markdown."""
    models, sizes = list(groups), (3, 4, 6, 8)
    measured = sorted({len(case.room) for cases in groups.values() for case in cases})
    header = [f"{name}, {size}" for name in models for size in measured]
    header += [f"{models[0]}, each end"] if models else []
    header += [f"simulated GPU, {size}" for size in sizes]
    lines = ["| rule | " + " | ".join(header) + " |", "|---|" + "---:|" * len(header)]
    for name, rule in RULES.items():
        values = [error_pct(groups[model], rule, size) for model in models for size in measured]
        values += [each_end_pct(groups[models[0]], rule)] if models else []
        values += [error_pct(gpu, rule, size) for size in sizes]
        lines.append(f"| {'**' + name + '**' if name == CHOSEN else name} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    values = [value for model in models for value in learned_error_pct(groups[model], measured)]
    cells = [f"{value:.1f}" for value in values] + (["-"] if models else []) + [f"{value:.1f}" for value in learned_error_pct(gpu, sizes)]
    lines.append("| the same, corrected by groups of other families | " + " | ".join(cells) + " |")
    counts = ", ".join(f"{sum(len(case.room) == size for case in next(iter(groups.values())))} of {size}" for size in measured)
    footer = (
        f"Mean error of the time together, percent; *each end*: median error of when each operator is done. Measured groups of {label}: "
        f"{counts or 'none'}, pairs predicted without their model family. *Simulated GPU*: thread blocks dispatched in order, exact pairs, "
        "nothing measured."
    )
    return "\n".join([*lines, "", footer]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = stores.parser_of(__doc__, "composition.txt")
    options = parser.parse_args(arguments)
    with stores.chosen(parser, options) as given:
        simulated = "" if given.place is not None else " (simulated, not measured)"
        label = ", ".join(sorted({row.facts.name for row in given.store.scopes()})) + simulated
        gpu = made_up(1, 2, options.seed) if options.smoke else made_up(12, 25, options.seed)
        text = as_text(recorded(given.store, options.seed), gpu, label)
    graphs, evaluations = (1, 500) if options.smoke else (12, 40_000)
    text += schedules_as_text(graphs, options.seed, evaluations=evaluations)
    if given.out is not None:
        (given.out / "composition.txt").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
