"""Optuna over the list-policy space, then over schedules near the incumbent; resumable in SQLite, where the Optuna dashboard opens it.

Optuna costs milliseconds for a trial that simulates in microseconds, so it gets the small spaces: eight policy parameters, then the
lanes and launch places of the few operators that contention slows most. Each trial's sampler is seeded by its number: a study that
was interrupted goes on with the trials it would have made.

*Source:* Akiba et al., "Optuna: A Next-generation Hyperparameter Optimization Framework", KDD 2019; Bergstra et al., "Algorithms for
Hyper-Parameter Optimization", NeurIPS 2011 (TPE).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search.policies import ALWAYS, NEVER, Candidate, Decoder, Policy, portfolio
from autosched.search.problem import Ints, Problem, one_wide_lane
from autosched.search.simulate import Evaluator
from autosched.search.strategy import SearchContext

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GATES = (1.0, 2.0, 1e9)
_WIDE_BELOW = (NEVER, 0.0, 1.0, 3.0, ALWAYS)


@dataclass(frozen=True, slots=True)
class OptunaSearch:
    """TPE over policies, then near the incumbent.

    Args:
        trials: most trials in all; Optuna's own time, not the simulator, is what they cost.
        policy_share: share of the trials spent on policies.
        moved: operators that a trial near the incumbent moves.
    """

    name: str = "optuna"
    is_baseline: bool = False
    trials: int = 150
    policy_share: float = 0.7
    moved: int = 5

    def propose(self, problem: Problem, context: SearchContext) -> list[Schedule]:
        """Distinct schedules of all trials, best first."""
        study = _Study(self, problem, context)
        return list(dict.fromkeys(candidate.schedule(problem) for candidate in study.run()))


class _Study:
    def __init__(self, settings: OptunaSearch, problem: Problem, context: SearchContext) -> None:
        self.settings, self.problem, self.context = settings, problem, context
        self.lanes, self.widths = context.lanes(problem), context.width_indices(problem)
        self.decoder = Decoder(problem, self.lanes, self.widths)
        self.evaluator = Evaluator(problem, self.lanes)
        self.seed = int(context.rng.integers(0, 2**31 - 1))
        self.found: list[Candidate] = [self.decoder.decode(Policy())]

    def run(self) -> list[Candidate]:
        """All candidates, best first."""
        total = min(self.settings.trials, self.context.max_evaluations)
        if total <= 0 or self.context.expired():
            return self.found
        policies = max(1, int(total * self.settings.policy_share))
        first = [_parameters(policy, len(self.widths) > 1) for policy in portfolio(self.widths)[:6]]
        self._phase("policy", policies, self._policy_value, first)
        self.found.sort(key=lambda candidate: candidate.makespan_us)
        incumbent = self.found[0]
        movable = self._most_slowed(incumbent)
        if movable:
            self._phase("near", total - policies, lambda trial: self._near_value(trial, incumbent, movable), [])
        return sorted(self.found, key=lambda candidate: candidate.makespan_us)

    def _phase(self, phase: str, trials: int, value: Any, first: Sequence[dict[str, float]]) -> None:
        """Trials until the study has ``trials``; ``first`` are the parameters of the first ones."""
        import optuna

        waiting = optuna.trial.TrialState.WAITING

        def go_on(study: optuna.Study) -> None:
            for known in study.get_trials(deepcopy=False):
                if known.state == optuna.trial.TrialState.COMPLETE:
                    value(optuna.trial.FixedTrial(known.params))
            while True:
                # A trial that was running when the process died is told to have failed; its number is not used again.
                number = sum(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.get_trials(deepcopy=False))
                if number >= trials or self.context.expired():
                    return
                study.sampler = sampler_of(self.seed + number)
                # One at a time: an interrupted trial takes its place in the queue with it.
                if number < len(first) and not study.get_trials(deepcopy=False, states=(waiting,)):
                    study.enqueue_trial(first[number])
                trial = study.ask()
                study.tell(trial, value(trial))
                if number % 16 == 0:
                    best_us = min(candidate.makespan_us for candidate in self.found)
                    self.context.progress(self.settings.name, len(self.found), best_us)

        in_study(self.context.study_path, f"{phase}-{self.problem.graph.hash[:16]}-{self._question()}-{self.seed}", go_on)

    def _question(self) -> str:
        """A digest of what a trial's parameters and its value depend on, beside the graph: with other lanes or costs they say nothing."""
        digest = hashlib.sha256(repr((self.lanes, self.widths.tolist(), self.settings.moved)).encode())
        for array in self.problem.arrays:
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]

    def _policy_value(self, trial: Any) -> float:
        policy = policy_of(trial, several_widths=len(self.widths) > 1)
        candidate = self.decoder.decode(policy)
        self.found.append(candidate)
        return candidate.makespan_us

    def _most_slowed(self, incumbent: Candidate) -> list[int]:
        """The operators that lose most time to their neighbours in the incumbent."""
        self.evaluator.makespan_us(incumbent.order, incumbent.lane, incumbent.width_index, incumbent.wait)
        alone = self.problem.solo_us[self.problem.kernel[np.arange(self.problem.count), incumbent.width_index]]
        lost = self.evaluator.ends_us() - self.evaluator.starts_us() - alone
        return [int(index) for index in np.argsort(-lost, kind="stable")[: self.settings.moved]]

    def _near_value(self, trial: Any, incumbent: Candidate, movable: list[int]) -> float:
        lane, order = incumbent.lane.copy(), incumbent.order.tolist()
        for number, operator in enumerate(movable):
            lane[operator] = trial.suggest_int(f"lane{number}", 0, self.lanes - 1)
            order = self._shifted(order, operator, incumbent.wait, trial.suggest_float(f"place{number}", 0.0, 1.0))
        launch: Ints = np.array(order, dtype=np.int32)
        # As it is exported: operators of several threads share a lane, whatever the trial says.
        lane = one_wide_lane(lane, incumbent.width_index, len(self.problem.costs.widths))
        makespan = self.evaluator.makespan_us(launch, lane, incumbent.width_index, incumbent.wait)
        self.found.append(Candidate(makespan, launch, lane, incumbent.width_index, incumbent.wait))
        return makespan

    def _shifted(self, order: list[int], operator: int, wait: Ints, share: float) -> list[int]:
        """The launch order with ``operator`` at ``share`` of the places it may take."""
        place = {index: number for number, index in enumerate(order)}
        before = self.problem.predecessors(operator) + ([int(wait[operator])] if wait[operator] >= 0 else [])
        after = self.problem.successors(operator) + [int(index) for index in np.flatnonzero(wait == operator)]
        low = max((place[index] for index in before), default=-1) + 1
        high = min((place[index] for index in after), default=len(order)) - 1
        rest = [index for index in order if index != operator]
        target = low + round(share * (high - low))
        return [*rest[:target], operator, *rest[target:]]


def policy_of(trial: Any, *, several_widths: bool) -> Policy:
    """The policy that a trial suggests."""
    wide_below = trial.suggest_categorical("wide_below", _WIDE_BELOW) if several_widths else NEVER
    return Policy(
        bottom=trial.suggest_float("bottom", 0.0, 2.0),
        duration=trial.suggest_float("duration", -1.0, 2.0),
        successors=trial.suggest_float("successors", -1.0, 2.0),
        pressure=trial.suggest_float("pressure", -2.0, 2.0),
        alpha=trial.suggest_float("alpha", 0.0, 3.0),
        gate=trial.suggest_categorical("gate", _GATES),
        wide_below=wide_below,
        lanes_share=trial.suggest_float("lanes_share", 0.25, 1.0),
    )


def _parameters(policy: Policy, several_widths: bool) -> dict[str, float]:
    found = {
        "bottom": policy.bottom, "duration": policy.duration, "successors": policy.successors, "pressure": policy.pressure,
        "alpha": policy.alpha, "gate": min(policy.gate, _GATES[-1]), "lanes_share": policy.lanes_share,
    }  # fmt: skip
    if several_widths:
        found["wide_below"] = policy.wide_below
    return found


def sampler_of(seed: int) -> optuna.samplers.BaseSampler:
    """The one sampler, with every option that changed between Optuna 4 and 5 spelled out."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate was experimental before 5.0
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=12)


@contextlib.contextmanager
def open_study(path: str | None, name: str) -> Iterator[optuna.Study]:
    """A study in the SQLite file ``path`` (in memory if None), made or continued; interrupted trials in it are marked failed.

    The file is closed at the end, by the thread that opened it. One that cannot be used costs a warning: the study is in memory then, and
    cannot be continued.
    """
    import optuna
    from sqlalchemy.pool import QueuePool

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with contextlib.ExitStack() as closing:
        try:
            storage = None
            if path is not None:
                with contextlib.closing(sqlite3.connect(path)) as file:
                    file.execute("PRAGMA schema_version")  # Optuna leaves a file open that turns out to be no database
                # Not in the URL: it would end at a "?", Optuna fills in what is in braces, and SQLAlchemy's releases differ in "%".
                opening = {"creator": lambda: sqlite3.connect(path, check_same_thread=False), "poolclass": QueuePool}
                storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs=opening)
                closing.callback(storage.engine.dispose)
                closing.callback(storage.remove_session)
            study = optuna.create_study(storage=storage, study_name=name, direction="minimize", load_if_exists=True, sampler=sampler_of(0))
            study.get_trials(deepcopy=False)  # what is damaged further inside shows when it is read
        except Exception as error:  # whatever the database driver says: no place to remember in must not end a search
            if path is None:
                raise
            _in_memory_only(name, path, error)
            study = optuna.create_study(study_name=name, direction="minimize", sampler=sampler_of(0))
        for trial in study.get_trials(deepcopy=False):
            if trial.state == optuna.trial.TrialState.RUNNING:
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                logger.info("trial %d of study %s was interrupted and is made again", trial.number, name)
        yield study


def in_study(path: str | None, name: str, go_on: Callable[[optuna.Study], T]) -> T:
    """What ``go_on`` makes of :func:`open_study`.

    If the file cannot be used any more meanwhile (it was removed, the disk is full, another process holds it), ``go_on`` is called again
    with an empty study in memory: a trial's sampler is seeded by its number, so the trials are the same.
    """
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with open_study(path, name) as study:
            return go_on(study)
    except (StorageInternalError, SQLAlchemyError) as error:
        _in_memory_only(name, path, error)
    with open_study(None, name) as study:
        return go_on(study)


def _in_memory_only(name: str, path: str | None, error: BaseException) -> None:
    # Optuna's own words are of invalid data, whatever it is.
    why = str(error.__cause__ or error).splitlines()[0]
    logger.warning("the study %s is kept in memory only: %s cannot be used (%s)", name, path, why)


OPTUNA = OptunaSearch()
