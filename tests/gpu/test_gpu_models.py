"""The suite's models through the whole CUDA device: measured, proved, audited, stressed, beside their baselines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from autosched.capture.export import capture
from autosched.core.program import Program
from autosched.core.records import Failure, PairRecord, ScheduleRecord, SoloRecord
from autosched.core.schedule import Schedule, sequential
from autosched.device.base import Comparison, Pair
from autosched.device.cuda.baselines import BaselineKind
from autosched.device.cuda.profile import OperatorProfile
from autosched.device.cuda.session import CudaSession
from autosched.runtime.cuda.audit import audit_graph, node_counts
from autosched.runtime.cuda.captured import CapturedGraph
from autosched.runtime.kernels import random_inputs
from autosched.runtime.plan import make_plan
from autosched.runtime.trees import output_tensors, unflatten_inputs
from autosched.verify.race_stress import StressReport, stress
from tests.conformance.graphs import random_placement
from tests.gpu.gpu_rig import open_baseline, open_session, rehearsing

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

MODELS = ("torchvision:googlenet", "torchvision:inception_v3", "transformers:bert", "transformers:t5", "autosched:deepfm")


@dataclass
class Opened:
    """A model of the zoo, captured and opened."""

    name: str
    program: Program
    constants: dict[int, torch.Tensor]
    session: CudaSession
    inputs: list[list[torch.Tensor]]
    references: list[list[torch.Tensor]]

    def schedules(self, count: int) -> list[Schedule]:
        graph = self.program.graph
        lanes = max(2, self.session.limits.max_lanes)
        return [sequential(graph), *(random_placement(random.Random(seed), graph, min(4, lanes), 1) for seed in range(count))]


def zoo_name(wanted: str) -> str:
    """The zoo's entry that begins so: sizes are part of some names."""
    from autosched.zoo import names

    found = [entry.name for entry in names() if entry.name.startswith(wanted)]
    if not found:
        pytest.skip(f"the zoo has no {wanted}")
    return found[0]


@pytest.fixture(scope="module", params=MODELS)
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    from autosched.zoo import load

    if rehearsing() and request.param != MODELS[-1]:
        pytest.skip("one small model is enough for a rehearsal")
    package = {"torchvision": "torchvision", "transformers": "transformers"}.get(request.param.partition(":")[0])
    if package is not None:
        pytest.importorskip(package)
    name = "autosched:toy" if rehearsing() else zoo_name(request.param)
    made = load(name)
    captured = capture(made.model, made.args, made.kwargs, target="cuda")
    inputs, references = [], []
    for seed in (11, 12, 13):
        drawn = random_inputs(captured.program, seed)
        args, kwargs = unflatten_inputs(captured.program, [tensor.clone() for tensor in drawn])
        with torch.inference_mode():
            references.append([tensor.clone() for tensor in output_tensors(made.model(*args, **kwargs))])
        inputs.append(drawn)
    session = open_session(captured.program, captured.constants)
    yield Opened(name, captured.program, dict(captured.constants), session, inputs, references)
    session.close()


def test_every_schedule_is_bitwise_equal_to_one_stream_and_close_to_the_model(opened: Opened) -> None:
    for schedule in opened.schedules(3):
        answer = opened.session.compare(schedule, opened.inputs, opened.references)
        assert isinstance(answer, Comparison), answer
        assert answer.bitwise
        assert answer.within_tolerance, answer.max_abs_error


def test_every_captured_graph_passes_the_audit(opened: Opened) -> None:
    graph = opened.program.graph
    counts: tuple[int, ...] | None = None
    for schedule in opened.schedules(2):
        captured = opened.session.captured(schedule)
        assert isinstance(captured, CapturedGraph), captured
        report = audit_graph(graph, make_plan(graph, schedule), captured, expected_nodes=counts)
        assert report.problems == ()
        counts = counts or node_counts(graph, captured)


def test_no_race_shows_under_delays_and_poison(opened: Opened) -> None:
    report = stress(opened.session, opened.program.graph, opened.schedules(1)[1], rng=random.Random(0), replays=100)
    assert isinstance(report, StressReport), report
    assert report.problems == ()
    assert report.replays >= 100


def test_operators_pairs_and_schedules_have_times(opened: Opened) -> None:
    session, graph = opened.session, opened.program.graph
    rows = session.solo([1], repeats=3)
    assert all(isinstance(row[0], SoloRecord) for row in rows), [row[0] for row in rows if isinstance(row[0], Failure)][:3]
    free = [(a, b) for a in range(len(graph)) for b in range(a + 1, len(graph)) if graph.independent(a, b)][:400:40]
    pairs = session.pairs([pair for a, b in free for pair in (Pair(a, b), Pair(b, a))], repeats=3)
    assert all(isinstance(item, PairRecord) for item in pairs), [item for item in pairs if isinstance(item, Failure)][:3]
    records = session.schedules(opened.schedules(2), rounds=3, trace=True)
    for record in records:
        assert isinstance(record, ScheduleRecord), record
        assert record.peak_memory_bytes > 0
        for edge in graph.edges:
            # Time stamps resolve half a microsecond, and a view has no time at all.
            assert record.operator_start_us[edge.after] >= record.operator_end_us[edge.before] - 2.0


def test_memory_by_rule(opened: Opened) -> None:
    result = opened.session.memory(opened.schedules(1)[1])
    assert not isinstance(result, Failure), result
    assert 0 < result.eager_bytes <= result.hold_all_bytes
    assert result.vector_clock_bytes <= result.hold_all_bytes


def test_every_operator_has_a_profile(opened: Opened) -> None:
    profiles = opened.session.profiles(cold=False)
    assert all(isinstance(item, OperatorProfile) for item in profiles), [item for item in profiles if isinstance(item, Failure)][:3]
    heavy = [item for item in profiles if isinstance(item, OperatorProfile) and item.flops > 0]
    assert heavy
    assert all(item.kernels for item in heavy)


def test_the_eager_baseline_computes_the_same(opened: Opened) -> None:
    if not rehearsing() and opened.name != zoo_name(MODELS[-1]):
        pytest.skip("one model is enough for what does not depend on the model")
    with open_baseline(opened.program, opened.constants, BaselineKind.EAGER) as baseline:
        prepared = baseline.prepare()
        assert not isinstance(prepared, Failure), prepared
        assert prepared.max_abs_error == 0.0
        taken = baseline.round_us()
        assert isinstance(taken, float)
        assert taken > 0
