"""Tuning for several shapes: what is asked for is checked first, the budget is divided, and one file holds all of it."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import autosched
from autosched import pipeline
from autosched.cli import main
from autosched.cli.shapes import parse_batches
from autosched.core.errors import UnstableMeasurement, UnsupportedGraph, UsageError
from autosched.core.progress import Progress
from autosched.core.records import Failure, FailureKind
from autosched.core.report import StageTime
from autosched.core.schedule import sequential
from autosched.datasets.journal import Scope
from autosched.export.bundle import write_bundle
from autosched.pipeline import benching
from autosched.pipeline.benching import BenchResult, BenchShapes
from autosched.pipeline.memory import forget_measurements, open_journal
from autosched.pipeline.scope import software_of
from autosched.pipeline.shapes import TunedShapes
from autosched.progress import LiveProgress
from autosched.runtime.bundle.format import Bundle, read_bundles
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.shapes import choose_shapes, find_buckets, shape_name, shape_names
from tests.conformance.bundles import shapes_of, two_branches_bundle
from tests.conformance.caches import own_cache
from tests.conformance.command import run
from tests.conformance.graphs import TwoBranches

# Compilers of baselines are in nobody's budget.
STAGES = (StageTime("search", 2.0), StageTime("compiling torch_compile", 40.0, False), StageTime("final comparison", 3.0))


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(8, 8)
        self.right = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.left(x)) + torch.sigmoid(self.right(x))


@pytest.mark.parametrize(("text", "sizes"), [(None, (None,)), ("4", (4,)), ("1,4,16", (1, 4, 16)), (" 2 , 1 ", (2, 1))])
def test_batches_are_read(text: str | None, sizes: tuple[int | None, ...]) -> None:
    assert parse_batches(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "1,", "1,1", "two", "-1", "1.5", "1,4,4", "9999999999"])
def test_what_is_no_list_of_batches_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--batch is"):
        parse_batches(text)


def test_examples_are_checked_before_anything_is_measured() -> None:
    x = torch.randn(1, 8)
    with pytest.raises(UsageError, match="0 examples"):
        autosched.tune_shapes(Small().eval(), [])
    with pytest.raises(UsageError, match="same shapes"):
        autosched.tune_shapes(Small().eval(), [(x,), (torch.randn(1, 8),)])
    with pytest.raises(UsageError, match="2 examples, 1 example_kwargs"):
        autosched.tune_shapes(Small().eval(), [(x,), (x,)], [None])
    with pytest.raises(UsageError, match="got a NoneType as examples; expected a list"):
        autosched.tune_shapes(Small().eval(), None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="got a int as batches; expected a list"):
        autosched.tune_shapes(Small().eval(), [(x,)], batches=1)  # type: ignore[arg-type]


def test_the_budget_is_divided_and_what_is_left_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    lowerings: list[str | None] = []
    bundles = iter(shapes_of(TwoBranches().eval(), 1, 4, 8))

    def tune(model: object, args: object, kwargs: object, device: str, effort: str, budget_s: float, seed: int, **options: Any) -> Any:
        shares.append(budget_s)
        assert options["dtype"] == "float32"
        lowerings.append(options.get("lowering"))
        return SimpleNamespace(bundle=next(bundles), report=SimpleNamespace(stages=STAGES, lowering="fused"))

    monkeypatch.setattr(pipeline, "tune", tune)
    examples = [(torch.randn(rows, 8),) for rows in (1, 4, 8)]
    tuned = autosched.tune_shapes(TwoBranches().eval(), examples, budget_s=60.0, batches=[1, 4, 8], dtype="float32")
    assert shares == [20.0, 27.5, 50.0]
    # The lowering is chosen at the first shape; the others are tuned in it.
    assert lowerings == [None, "fused", "fused"]
    assert [dict(bundle.evidence.environment)["batch"] for bundle in tuned.bundles] == ["1", "4", "8"]


@pytest.mark.parametrize(("rows", "words"), [((1, 4), "^shape 2 of 2: no room$"), ((4,), "^no room$")])
def test_an_error_says_which_of_several_shapes_it_is_about(rows: tuple[int, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = iter(shapes_of(TwoBranches().eval(), *rows))

    def tune(model: object, args: tuple[torch.Tensor], *_: object, **__: object) -> Any:
        if len(args[0]) == 4:
            raise UnsupportedGraph("no room")
        return SimpleNamespace(bundle=next(bundles), report=SimpleNamespace(stages=STAGES, lowering="fused"))

    monkeypatch.setattr(pipeline, "tune", tune)
    with pytest.raises(UnsupportedGraph, match=words):
        autosched.tune_shapes(TwoBranches().eval(), [(torch.randn(count, 8),) for count in rows])


@pytest.mark.parametrize("there", [False, True])
def test_the_shapes_before_one_that_cannot_be_tuned_are_not_lost(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = shapes_of(TwoBranches().eval(), 1, 4)
    ready = iter(bundles)

    def tune(model: object, args: tuple[torch.Tensor], *_: object, **__: object) -> Any:
        if len(args[0]) == 8:
            raise UnsupportedGraph("no room.")
        return SimpleNamespace(bundle=next(ready), report=SimpleNamespace(stages=STAGES, lowering="fused"))

    monkeypatch.setattr(pipeline, "tune", tune)
    path = tmp_path / "m.autosched"
    if there:
        path.write_text("of an earlier night")
    words = (
        f"shape 3 of 4: no room. {path} is left as it was" if there else f"shape 3 of 4: no room. What was tuned before it is in {path}: "
    )
    with pytest.raises(UnsupportedGraph, match=f"^{re.escape(words)}"):
        autosched.tune_shapes(TwoBranches().eval(), [(torch.randn(rows, 8),) for rows in (1, 4, 8, 9)], batches=[1, 4, 8, 9], rescue=path)
    if there:
        assert path.read_text() == "of an earlier night"
    else:
        assert [bundle.program for bundle in read_bundles(path)] == [bundle.program for bundle in bundles]
        assert pipeline.read(path, batch=4).bundles[0].program == bundles[1].program


def test_what_is_measured_anew_for_one_shape_is_not_forgotten_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path))
    device: Any = SimpleNamespace(key=cpu_device_key(), software=software_key())
    scope = Scope(device.key, software_of(device))
    bundles = iter(shapes_of(TwoBranches().eval(), 1, 4))
    known: list[int] = []

    def add(signature: str) -> int:
        with open_journal(scope, private=False) as journal:
            journal.add_solo(signature, 1, Failure(FailureKind.CRASH, "tried"))
            return len(journal)

    def tune(*_: object, **__: object) -> Any:
        forget_measurements(device)
        known.append(add(f"of shape {len(known)}"))
        return SimpleNamespace(bundle=next(bundles), report=SimpleNamespace(stages=STAGES, lowering="fused"))

    add("of an earlier run")
    monkeypatch.setattr(pipeline, "tune", tune)
    autosched.tune_shapes(TwoBranches().eval(), [(torch.randn(rows, 8),) for rows in (1, 4)], fresh=True)
    assert known == [1, 2]
    forget_measurements(device)
    assert add("later") == 1


def test_the_capture_of_a_later_shape_is_not_told_the_budget_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = iter(shapes_of(TwoBranches().eval(), 1, 4))

    def tune(*_: object, progress: Progress, **__: object) -> Any:
        progress.stage("capture")
        progress.stage("starting the worker")
        progress.stage("operators alone", 0.0)
        return SimpleNamespace(bundle=next(bundles), report=SimpleNamespace(stages=STAGES, lowering="fused"))

    monkeypatch.setattr(pipeline, "tune", tune)
    console = Console(file=io.StringIO(), force_terminal=False)
    with LiveProgress(console) as progress:
        autosched.tune_shapes(TwoBranches().eval(), [(torch.randn(rows, 8),) for rows in (1, 4)], progress=progress)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "autosched: shape 1 of 2: capture",
        "autosched: shape 1 of 2: starting the worker",
        "autosched: shape 1 of 2: operators alone (budget spent, finishing)",
        "autosched: shape 2 of 2: capture (not in the budget)",
        "autosched: shape 2 of 2: starting the worker (not in the budget)",
        "autosched: shape 2 of 2: operators alone (budget spent, finishing)",
    ]


@pytest.mark.slow
def test_one_job_after_another_and_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path / "cache"))
    model = Small().eval()
    stages: list[str] = []

    class Told:
        def stage(self, name: str, left_s: float | None = None) -> None:
            stages.append(name)

        def update(self, **facts: object) -> None:
            pass

    tuned = autosched.tune_shapes(
        model, [(torch.randn(1, 8),), (torch.randn(3, 8),)], device="cpu", effort="quick", budget_s=1.0, progress=Told(), name="small"
    )
    report = tuned.save(tmp_path / "small.autosched")
    assert report.bundle == str(tmp_path / "small.autosched")
    assert len(report.shapes) == 2
    assert "shape 1 of 2: capture, rewritten" in stages
    assert [stage.split(":")[0] for stage in (stages[0], stages[-1])] == ["shape 1 of 2", "shape 2 of 2"]
    assert "shape 2 of 2: loading the searches" not in stages
    assert "[3, 8] float32" in tuned.summary()
    fast = autosched.load(tmp_path / "small.autosched", model, strict=True, pad=True)
    for rows in (1, 2, 3):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            assert torch.allclose(fast(x), model(x), atol=1e-5)
    assert [shape.calls for shape in fast.report().shapes] == [1, 2]
    assert autosched.load(tuned.to_bytes(), model, strict=True).report().ready == 2


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("several") / "two.autosched"
    write_bundle(path, *shapes_of(TwoBranches().eval(), 1, 4))
    return path


def test_a_shape_is_chosen_by_its_sizes_or_its_batch(several: Path) -> None:
    bundles = read_bundles(several)
    programs = [bundle.program for bundle in bundles]
    assert [shape_name(program) for program in programs] == ["1x8,1x8", "4x8,4x8"]
    nobody = [None, None]
    assert choose_shapes(programs, nobody) == [0, 1]
    assert choose_shapes(programs, nobody, shape="4x8,4x8") == [1]
    assert choose_shapes(programs, nobody, shape="4x8") == [1]
    assert choose_shapes(programs, nobody, batch=4) == [1]
    assert choose_shapes(programs, [7, None], batch=7) == [0]
    with pytest.raises(UsageError, match="it holds 1x8,1x8; 4x8,4x8"):
        choose_shapes(programs, nobody, batch=2)
    with pytest.raises(UsageError, match="nothing for --shape 4x8 --batch 1;"):
        choose_shapes(programs, nobody, shape="4x8", batch=1)
    buckets = find_buckets(programs)
    assert not isinstance(buckets, str)
    assert buckets.sizes == (1, 4)
    assert buckets.inputs == (0, 0)
    assert buckets.outputs == (0, 0, 0)
    assert [buckets.next_above(size) for size in (1, 2, 4, 5)] == [0, 1, 1, None]


def test_shapes_that_differ_in_plain_values_alone_are_chosen_by_their_numbers(tmp_path: Path) -> None:
    model = TwoBranches().eval()
    path = write_bundle(tmp_path / "three.autosched", *shapes_of(model, 1, 4), *map(without_flag, shapes_of(model, 4)))
    programs = [bundle.program for bundle in read_bundles(path)]
    nobody = [None] * 3
    assert shape_names(programs) == ["1x8,1x8", "4x8,4x8:1", "4x8,4x8:2"]
    asked = ("4x8", "4x8,4x8", "4x8,4x8:1", "4x8,4x8:2", "1x8,1x8")
    assert [choose_shapes(programs, nobody, shape=shape) for shape in asked] == [[1, 2], [1, 2], [1], [2], [0]]
    with pytest.raises(UsageError, match="holds 2 shapes; choose one of 4x8,4x8:1; 4x8,4x8:2 with --shape"):
        pipeline.trace(path, model, tmp_path / "t.json", shape="4x8")
    assert pipeline.trace(path, model, tmp_path / "t.json", shape="4x8,4x8:2").operators == len(programs[2].graph)


def without_flag(bundle: Bundle) -> Bundle:
    leaves = tuple(False if leaf is True else leaf for leaf in bundle.program.input_leaves)
    return dataclasses.replace(bundle, program=dataclasses.replace(bundle.program, input_leaves=leaves))


def test_check_and_trace_know_shapes(several: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", str(several), "--json"])
    assert ended.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == "exact"
    assert said["shapes"] == ["[1, 8] float32, [1, 8] float32", "[4, 8] float32, [4, 8] float32"]
    assert len(pipeline.check(several, batch=4).shapes) == 1
    with pytest.raises(UsageError, match="holds 2 shapes; choose one of 1x8,1x8; 4x8,4x8"):
        pipeline.trace(several, TwoBranches().eval(), tmp_path / "t.json")
    result = pipeline.trace(several, TwoBranches().eval(), tmp_path / "t.json", batch=4)
    assert result.operators == len(read_bundles(several)[1].program.graph)


def test_bench_measures_every_shape_or_the_one_chosen(tmp_path: Path) -> None:
    model = TwoBranches().eval()
    bundles = []
    for rows in (1, 4):
        bundle = two_branches_bundle(model, rows=rows)
        bundles.append(two_branches_bundle(model, rows=rows, schedule=sequential(bundle.program.graph)))
    path = write_bundle(tmp_path / "two.autosched", *bundles)
    try:
        results = pipeline.bench(path, model, rounds=5)
        one = pipeline.bench(path, model, rounds=5, shape="4x8")
    except UnstableMeasurement:
        pytest.skip("this machine is too loaded to time anything")
    assert isinstance(results, BenchShapes)
    if results.unstable:
        pytest.skip("this machine is too loaded to time every shape")
    assert [result.shape for result in results.shapes] == ["[1, 8] float32, [1, 8] float32", "[4, 8] float32, [4, 8] float32"]
    assert not isinstance(one, BenchShapes)
    assert one.shape == results.shapes[1].shape


@pytest.mark.parametrize(
    ("restless", "code", "shapes"), [("", 0, ["1x8", "4x8"]), ("4x8", 3, ["1x8"]), ("1x8", 3, ["4x8"]), ("1x8, 4x8", 3, [])]
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_shape_in_which_the_machine_was_restless_takes_no_other_away(
    restless: str,
    code: int,
    shapes: list[str],
    as_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_bundle(tmp_path / "two.autosched", *shapes_of(TwoBranches().eval(), 1, 4))

    def measured(path: str, bundle: Bundle, *_: object) -> BenchResult:
        if (name := shape_name(bundle.program).partition(",")[0]) in restless:
            raise UnstableMeasurement(f"{name} varied")
        return BenchResult(str(path), "m", "cpu", "beam", 1, 2, None, (1, 1), 2, (2, 2), None, 5, 1, None, name)

    monkeypatch.setattr(benching, "_bench", measured)
    monkeypatch.setattr("autosched.zoo.load", lambda *_, **__: SimpleNamespace(model=TwoBranches()))
    assert run("bench", str(path), *(["--json"] if as_json else [])) == code
    said = capsys.readouterr()
    if not as_json:
        assert all(f"m {shape} on cpu" in said.out for shape in shapes)
        assert said.out.count(" varied") == (2 - len(shapes) if shapes else 0)
    elif shapes:
        found = json.loads(said.out)
        assert [item["shape"] for item in found["shapes"]] == shapes
        assert len(found["unstable"]) == 2 - len(shapes)
    else:
        assert json.loads(said.out)["error"]["type"] == "UnstableMeasurement"
    assert ("too noisy" in said.err or "varied" in said.err) == (code == 3)


@pytest.mark.parametrize("unstable", [False, True])
def test_the_command_line_reports_every_shape(
    unstable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundles = shapes_of(TwoBranches().eval(), 1, 4)
    asked: dict[str, Any] = {}

    def tune_shapes(model: object, examples: list[Any], kwargs: list[Any], **options: Any) -> TunedShapes:
        asked.update(options, shapes=[tuple(args[0].shape) for args in examples])
        reports = [dataclasses.replace(bundle.evidence.report, unstable=unstable) for bundle in bundles]
        jobs: list[Any] = [SimpleNamespace(bundle=bundle, report=report) for bundle, report in zip(bundles, reports, strict=True)]
        return TunedShapes(jobs, options["batches"])

    monkeypatch.setattr("autosched.pipeline.shapes.tune_shapes", tune_shapes)
    path = tmp_path / "toy.autosched"
    for as_json in (True, False):
        with pytest.raises(SystemExit) as ended:
            main(["tune", "autosched:toy", "--device", "cpu", "--batch", "1,4", "-o", str(path), *(["--json"] if as_json else [])])
        assert ended.value.code == (3 if unstable else 0)
        said = capsys.readouterr().out
        if as_json:
            tree = json.loads(said)
            assert tree["bundle"] == str(path)
            assert [shape["chosen"] for shape in tree["shapes"]] == ["beam", "beam"]
        else:
            assert "batch 1\n" in said
            assert "batch 4\n" in said
            assert said.count("beam is faster") == 2
            assert f"2 shapes written to {path}\nmeasure it again: autosched bench {path}\n" in said
            assert said.count("run it:") == 1
    assert asked["batches"] == (1, 4)
    assert asked["shapes"] == [(1, 3, 32, 32), (4, 3, 32, 32)]
    assert len(read_bundles(path)) == 2
    assert pipeline.read(path, batch=4).bundles[0].program == bundles[1].program
