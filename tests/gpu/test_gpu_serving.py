"""From the tuner to the caller: a job on the device, its bundle, and what a loaded schedule promises whoever calls it."""

from __future__ import annotations

import ctypes
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import autosched
from autosched import pipeline, zoo
from autosched.core.errors import DeviceError
from autosched.core.records import Failure
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.torch_streams import TorchStreams
from autosched.runtime.guard import FallbackWarning, LoadedModel
from autosched.runtime.numerics import compare
from tests.conformance.graphs import random_placement
from tests.conformance.waiting import at_once

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420), pytest.mark.gpu_only(reason="the tuner opens the real device")]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> pipeline.Tuned:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSCHED_CACHE", str(tmp_path_factory.mktemp("cache")))
        toy = zoo.load("autosched:toy")
        return autosched.tune(toy.model, toy.args, toy.kwargs, device="cuda", effort="quick", budget_s=15, name=toy.name)


@pytest.fixture
def model() -> torch.nn.Module:
    return zoo.load("autosched:toy").model.cuda()


@pytest.fixture(scope="module")
def spread_bundle(tuned: pipeline.Tuned) -> bytes:
    """The tuned program on three lanes at random, so that what is served has branches whatever the job chose."""
    made = tuned.bundle
    schedule = random_placement(random.Random(5), made.program.graph, 3)
    return encode_bundle(make_bundle(made.program, schedule, made.evidence, made.literals, made.key.device, made.key.software))


@pytest.fixture
def spread(spread_bundle: bytes, model: torch.nn.Module) -> LoadedModel:
    loaded = autosched.load(spread_bundle, model, strict=True)
    assert loaded.report().lanes == 3
    return loaded


def image(seed: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).cuda()


def assert_like(got: torch.Tensor, model: torch.nn.Module, given: torch.Tensor) -> None:
    with torch.no_grad():
        wanted = model(given)
    # Weights are folded, so that a GPU that rounds to TF32 rounds other numbers than the model's; loading compares them without.
    answer = compare([got.cpu()], [wanted.cpu()], rounded=torch.float16)
    assert answer.within_tolerance, answer.reason


def test_a_job_on_the_device_ends_with_a_schedule_that_was_proved_and_measured(tuned: pipeline.Tuned) -> None:
    report = tuned.report
    assert report.device.kind == "cuda"
    rows = {row.name: row for row in report.strategies}
    chosen = rows[report.chosen]
    assert chosen.failure is None
    assert chosen.measured_us is not None
    assert chosen.max_abs_error is not None
    failed = [(row.name, row.failure) for row in report.strategies if row.failure is not None]
    assert {"sequential", "eager"} <= rows.keys() - {name for name, _ in failed}, failed


def test_its_bundle_loads_and_computes_what_the_model_computes(tuned: pipeline.Tuned, model: torch.nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "toy.autosched"
    tuned.save(path)
    loaded = autosched.load(path, model, strict=True)
    for seed in range(3):
        assert_like(loaded(image(seed)), model, image(seed))
    report = loaded.report()
    assert (report.scheduled, report.calls, report.verdict) == (True, 3, "exact")
    assert report.workspace_bytes > 0


def test_an_answer_belongs_to_the_caller(spread: LoadedModel, model: torch.nn.Module) -> None:
    first = spread(image(1))
    second = spread(image(2))
    assert_like(first, model, image(1))
    assert_like(second, model, image(2))


def test_weights_changed_in_place_or_replaced_are_the_next_answers(spread: LoadedModel, model: torch.nn.Module) -> None:
    before = spread(image(1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    changed = spread(image(1))
    assert not torch.equal(before, changed)
    assert_like(changed, model, image(1))
    # A graph holds addresses: those of the weights before.
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
    torch.full((1 << 20,), torch.nan, device="cuda")
    assert_like(spread(image(1)), model, image(1))


def test_a_model_that_was_moved_away_is_served_again_once_it_is_back(spread_bundle: bytes, model: torch.nn.Module) -> None:
    loaded = autosched.load(spread_bundle, model)
    assert_like(loaded(image(1)), model, image(1))
    model.cpu()
    with torch.no_grad(), pytest.warns(FallbackWarning, match="weights are on cpu now"), pytest.raises(RuntimeError):
        loaded(image(1))
    model.cuda()
    torch.full((1 << 20,), torch.nan, device="cuda")
    assert_like(loaded(image(2)), model, image(2))
    assert loaded.report().calls == 2


def test_callers_on_several_streams_and_threads_take_turns(spread: LoadedModel, model: torch.nn.Module) -> None:
    wanted = [spread(image(seed)) for seed in range(4)]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def call(seed: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            given = image(seed)
            for _ in range(10):
                if not torch.equal(spread(given), wanted[seed]):
                    wrong.append(seed)

    at_once(call, range(4))
    assert wrong == []


def test_a_call_after_one_on_a_stream_that_its_library_has_destroyed(spread: LoadedModel) -> None:
    """Its handle means nothing by then, or another stream."""
    library, given = torch.cuda.cudart(), image(1)
    wanted = spread(given)
    for _ in range(3):
        handle = ctypes.c_uint64()
        assert int(library.cudaStreamCreate(ctypes.addressof(handle))) == 0
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            got = spread(given)
        torch.cuda.synchronize()
        assert torch.equal(got, wanted)
        assert int(library.cudaStreamDestroy(handle.value)) == 0
    assert torch.equal(spread(given), wanted)


def test_another_thread_draws_random_numbers_while_a_schedule_is_captured() -> None:
    backend = TorchStreams()
    capturer = GraphCapturer(backend)
    lane = capturer.streams.lane(0)
    drawn: list[torch.Tensor] = []

    def draw() -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return torch.rand(8, device="cuda")

    def body() -> None:
        with backend.on(lane):
            backend.touch()
        drawn.append(other.submit(draw).result())

    capturer.scratch_pool()
    torch.cuda.manual_seed(7)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.get_offset()
    with ThreadPoolExecutor(1) as other:
        made = capturer.capture_script([lane], body)
    assert not isinstance(made, Failure), made.detail
    torch.cuda.synchronize()
    assert len(drawn) == 1
    # Drawn from the generator that everybody seeds.
    assert (generator.initial_seed(), generator.get_offset() > before) == (7, True)
    backend.reset(made[0])
    capturer.close()


def test_a_call_of_another_shape_runs_the_model_as_it_came(spread_bundle: bytes, model: torch.nn.Module) -> None:
    loaded = autosched.load(spread_bundle, model)
    with pytest.warns(FallbackWarning, match="Tune for this shape too"):
        assert_like(loaded(image(3, batch=2)), model, image(3, batch=2))
    assert_like(loaded(image(3)), model, image(3))
    assert loaded.report().calls == 1


def test_a_call_that_the_caller_captures_is_the_model_as_it_came_in_that_graph(spread_bundle: bytes, model: torch.nn.Module) -> None:
    loaded = autosched.load(spread_bundle, model)
    given, stream = image(1), torch.cuda.Stream()
    with torch.no_grad():
        loaded(given)
        with torch.cuda.stream(stream):
            model(given)  # libraries must have what they need before a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.warns(FallbackWarning, match="captured into a CUDA graph"), torch.cuda.graph(graph, stream=stream):
            answer = loaded(given)
    for seed in (1, 2):
        given.copy_(image(seed))
        graph.replay()
        assert_like(answer, model, image(seed))
    assert_like(loaded(image(3)), model, image(3))
    assert loaded.report().calls == 2


def test_a_load_within_a_capture_is_the_model_and_leaves_the_capture_alone(spread_bundle: bytes, model: torch.nn.Module) -> None:
    given, stream = image(1), torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            model(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.warns(FallbackWarning, match="load before the capture"), torch.cuda.graph(graph, stream=stream):
            answer = autosched.load(spread_bundle, model)(given)
        with pytest.raises(DeviceError, match="load before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            autosched.load(spread_bundle, model, strict=True)
    given.copy_(image(2))
    graph.replay()
    assert_like(answer, model, image(2))
    assert autosched.load(spread_bundle, model).report().scheduled
