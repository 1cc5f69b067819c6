"""Objects in a model's call and answer, through a bundle: caches of transformers, which grow in place, and plain dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import shutil
import warnings
from typing import Any

import pytest
import torch

from autosched.capture.export import Captured, capture
from autosched.core.errors import IncompatibleArtifact, InputMismatch, UnsupportedGraph
from autosched.core.program import ConstantSource
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.recording import record_calls
from autosched.runtime.call_form import CallReader
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.load import FallbackWarning, load
from autosched.runtime.trees import renewed_calls
from tests.conformance.bundles import evidence_for
from tests.conformance.stateful import captured_in

compiles = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")


@dataclasses.dataclass
class State:
    keys: list[torch.Tensor]
    steps: int = 0
    last: torch.Tensor | None = None


class Remembers(torch.nn.Module):
    """A step of a decoder, in little: its state grows by a row in place and comes back beside the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, state: State) -> dict[str, Any]:
        y = self.layer(x)
        state.keys[0] = torch.cat([state.keys[0], y])
        state.steps += 1
        state.last = y
        return {"answer": state.keys[0].softmax(0).sum(0), "state": state}


class Forgets(Remembers):
    def forward(self, x: torch.Tensor, state: State) -> Any:
        return super().forward(x, state)["answer"]


class Builds(Remembers):
    def forward(self, x: torch.Tensor, state: State) -> Any:
        y = self.layer(x)
        return {("made", 1): State([y, state.keys[0] * 2], state.steps, None)}


def state(rows: int = 3) -> State:
    torch.manual_seed(rows)
    return State([torch.randn(rows, 8)])


def bundle(captured: Captured) -> bytes:
    graph, device = captured.program.graph, cpu_device_key()
    literals = {
        binding.name: captured.constants[binding.value].detach()
        for binding in captured.program.bindings
        if binding.source is ConstantSource.LITERAL
    }
    evidence = evidence_for(len(graph), device, graph.hash)
    return encode_bundle(make_bundle(captured.program, sequential(graph), evidence, literals, device, software_key()))


def forged(captured: Captured, before: str, after: str) -> bytes:
    """A bundle whose answer is written down otherwise."""
    tree = captured.program.output_tree
    assert before in tree
    program = dataclasses.replace(captured.program, output_tree=tree.replace(before, after))
    return bundle(dataclasses.replace(captured, program=program))


def test_an_object_that_grows_in_place_is_the_callers_and_grows_alike() -> None:
    model = Remembers().eval()
    x, example = torch.randn(1, 8), state()
    captured = capture(model, (x, example))
    assert (len(example.keys[0]), example.steps, example.last) == (3, 0, None)
    assert CallReader(captured.program.input_tree).supported
    fast = load(bundle(captured), model, strict=True)
    theirs, mine = state(), state()
    rows = mine.keys
    with torch.no_grad():
        expected, got = model(x, theirs), fast(x=x, state=mine)
    assert got["state"] is mine
    assert mine.keys is rows
    assert mine.steps == theirs.steps == 1
    torch.testing.assert_close(got["answer"], expected["answer"])
    torch.testing.assert_close(mine.keys, theirs.keys)
    torch.testing.assert_close(mine.last, theirs.last)
    # The next call is of another shape, and of another number.
    with pytest.raises(InputMismatch):
        fast(x, mine)


def test_what_a_model_builds_is_built_anew_at_each_call() -> None:
    model = Builds().eval()
    x = torch.randn(1, 8)
    fast = load(bundle(capture(model, (x, state()))), model, strict=True)
    with torch.no_grad():
        expected, first, second = model(x, state()), fast(x, state()), fast(x, state())
    assert list(first) == [("made", 1)]
    assert type(first["made", 1]) is State
    assert first["made", 1] is not second["made", 1]
    torch.testing.assert_close(first["made", 1].keys, expected["made", 1].keys)


def test_one_that_is_changed_and_not_returned_is_refused() -> None:
    with pytest.raises(UnsupportedGraph, match="changes the State that it is given and does not return it"):
        capture(Forgets().eval(), (torch.randn(1, 8), state()))


def test_what_fails_leaves_the_callers_object_to_the_model() -> None:
    model = Remembers().eval()
    fast = load(bundle(capture(model, (torch.randn(1, 8), state()))), model)
    x, mine, other = torch.randn(2, 8), state(), state()
    with torch.no_grad(), pytest.warns(FallbackWarning, match=r"\[2, 8\]"):
        got = fast(x, mine)
    assert got["state"] is mine
    assert (len(mine.keys[0]), mine.steps) == (5, 1)
    with torch.no_grad():
        model(x, other)
    torch.testing.assert_close(mine.keys, other.keys)


MARKED, UNTOUCHED, NEW = r"[0, 1]]\"", r"[0]]\"", r"[]]\""


@pytest.mark.parametrize("mark", [UNTOUCHED, NEW, r"[1, 1]]\""])
def test_a_file_that_says_otherwise_what_becomes_of_an_object_is_not_used(mark: str) -> None:
    model = Remembers().eval()
    captured = capture(model, (torch.randn(1, 8), state()))
    with pytest.raises(IncompatibleArtifact):
        load(forged(captured, MARKED, mark), model, strict=True)


def test_a_file_that_claims_an_object_which_the_model_leaves_alone_is_not_used() -> None:
    model = Builds().eval()
    captured = capture(model, (torch.randn(1, 8), state()))
    with pytest.raises(IncompatibleArtifact, match="other containers"):
        load(forged(captured, NEW, MARKED), model, strict=True)


@pytest.mark.parametrize("name", ["subprocess.Popen", "torch.nn.Linear", "antigravity.State"])
def test_a_file_that_names_another_class_is_not_used(name: str) -> None:
    model = Builds().eval()
    captured = capture(model, (torch.randn(1, 8), state()))
    with pytest.raises(IncompatibleArtifact, match=r"neither a dataclass nor a cache|other containers"):
        load(forged(captured, f"{__name__}.State", name), model, strict=True)


def test_one_object_given_twice_is_another_call() -> None:
    class Two(Remembers):
        def forward(self, x: torch.Tensor, one: State, other: State) -> Any:  # type: ignore[override]
            return super().forward(x, one), super().forward(x, other)

    model = Two().eval()
    x = torch.randn(1, 8)
    fast = load(bundle(capture(model, (x, state(), state()))), model)
    mine, theirs = state(), state()
    with torch.no_grad(), pytest.warns(FallbackWarning, match="given twice"):
        fast(x, mine, mine)
    with torch.no_grad():
        model(x, theirs, theirs)
    assert len(mine.keys[0]) == len(theirs.keys[0]) == 5


def test_calls_that_are_timed_have_objects_of_their_own() -> None:
    given = state()
    calls = renewed_calls((given,), {"x": torch.ones(1)}, 3)
    assert len({id(args[0]) for args, _ in calls} | {id(given)}) == 4
    assert all(args[0].keys[0] is given.keys[0] for args, _ in calls)
    plain = ((torch.ones(1),), {"y": [1]})
    assert all(call == plain and call[1] is plain[1] for call in renewed_calls(*plain, 2))


# Caches of transformers.


@pytest.fixture(scope="module")
def llama() -> Any:
    pytest.importorskip("transformers")
    from autosched.zoo_models.torchvision_schemas import import_torchvision

    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            head_dim=8,
        )
    ).eval()


def with_cache(llama: Any, cache: Any) -> dict[str, Any]:
    """The option of a cache, in the words of the transformers that is here: it had another name before 5.24."""
    return {"cache" if "cache" in inspect.signature(llama.forward).parameters else "past_key_values": cache}


def prefilled(llama: Any, tokens: int = 16) -> Any:
    with torch.no_grad():
        return llama(torch.arange(tokens)[None]).past_key_values


def test_a_prefill_returns_a_fresh_cache(llama: Any) -> None:
    ids = torch.arange(16)[None]
    fast = load(bundle(capture(llama, (), {"input_ids": ids})), llama, strict=True)
    with torch.no_grad():
        expected, first, second = llama(input_ids=ids), fast(input_ids=ids), fast(input_ids=ids)
    assert type(first) is type(expected)
    assert type(first.past_key_values) is type(expected.past_key_values)
    assert first.past_key_values is not second.past_key_values
    assert first.past_key_values.get_seq_length() == 16
    assert vars(first.past_key_values.layers[1]).keys() == vars(expected.past_key_values.layers[1]).keys()
    for mine, theirs in zip(first.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close((mine.keys, mine.values), (theirs.keys, theirs.values))
    # It goes on in the model as it came.
    with torch.no_grad():
        llama(torch.tensor([[3]]), **with_cache(llama, first.past_key_values))
    assert (first.past_key_values.get_seq_length(), second.past_key_values.get_seq_length()) == (17, 16)


def test_decoding_goes_through_the_shapes_there_are_and_on_in_the_model(llama: Any) -> None:
    step = torch.tensor([[7]])
    example = prefilled(llama)
    bundles = [capture(llama, (step,), with_cache(llama, cache)) for cache in (example, prefilled(llama, 17))]
    assert example.get_seq_length() == 16
    loaded = [load(bundle(item), llama) for item in bundles]
    mine, theirs = prefilled(llama), prefilled(llama)
    layers = list(mine.layers)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for fast in loaded:
            got, expected = fast(step, **with_cache(llama, mine)), llama(step, **with_cache(llama, theirs))
            assert got.past_key_values is mine
            torch.testing.assert_close(got.logits, expected.logits)
    assert all(now is before for now, before in zip(mine.layers, layers, strict=True))
    assert mine.get_seq_length() == theirs.get_seq_length() == 18
    with torch.no_grad(), pytest.warns(FallbackWarning, match=r"\[1, 1, 18, 8\]"):
        got = loaded[0](step, **with_cache(llama, mine))
    assert got.past_key_values is mine
    assert mine.get_seq_length() == 19


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, pytest.param(Lowering.INDUCTOR, marks=compiles)])
def test_every_step_into_a_static_cache_is_one_shape_and_written_in_place(llama: Any, lowering: Lowering) -> None:
    from transformers import StaticCache

    def begun() -> Any:
        cache = StaticCache(config=llama.config, max_cache_len=24)
        with torch.no_grad():
            llama(torch.arange(4)[None], **with_cache(llama, cache))
        return cache

    example = begun()
    captured = captured_in(lowering, llama, (torch.tensor([[7]]),), with_cache(llama, example))
    fast = load(bundle(captured), llama, strict=True)
    mine, theirs = begun(), begun()
    held = [layer.keys for layer in mine.layers]
    with torch.no_grad():
        for token in range(6):
            step = torch.tensor([[token + 5]])
            got, expected = fast(step, **with_cache(llama, mine)), llama(step, **with_cache(llama, theirs))
            assert got.past_key_values is mine
            torch.testing.assert_close(got.logits, expected.logits)
            for one, other in zip(mine.layers, theirs.layers, strict=True):
                torch.testing.assert_close((one.keys, one.values), (other.keys, other.values))
    assert all(layer.keys is keys for layer, keys in zip(mine.layers, held, strict=True))
    assert int(mine.get_seq_length()) == int(theirs.get_seq_length()) == 10
    assert int(example.get_seq_length()) == 4
    assert fast.report().calls == 6
    assert fast.report().shapes[0].copied_back_bytes == 0


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")  # of the prompt
def test_generate_runs_its_steps_on_a_schedule(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import StaticCache

    cache = StaticCache(config=llama.config, max_cache_len=24)
    # Asked before another forward is in the model's place.
    option, prompt = with_cache(llama, cache), torch.tensor([[3, 9, 4]])

    def answer() -> torch.Tensor:
        cache.reset()
        return llama.generate(prompt, **option, min_new_tokens=8, max_new_tokens=8, do_sample=False)  # type: ignore[no-any-return]

    expected = answer()
    prefill, step = record_calls(llama, answer)
    assert (prefill.times, step.times) == (1, 7)
    fast = load(bundle(capture(llama, step.args, step.kwargs)), llama)
    monkeypatch.setattr(llama, "forward", fast)
    # It gives a model positions and a mask only if its forward has parameters of these names.
    assert torch.equal(answer(), expected)
    report = fast.report()
    assert report.calls == 7
    assert [calls for _, calls in report.stepped_aside] == [1]
    assert report.shapes[0].copied_back_bytes == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_no_shape_to_look_up_and_goes_to_the_model() -> None:
    model = torch.nn.Linear(8, 4).eval()
    fast = load(bundle(capture(model, (torch.randn(2, 8),))), model)
    rows = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    with torch.no_grad(), pytest.warns(FallbackWarning, match=r"input 0 is a nested tensor; .* \[2, 8\] float32"):
        torch.testing.assert_close(fast(rows).unbind(), model(rows).unbind())
    # Nor once calls are recognised by the guard, which would end the process.
    with torch.no_grad():
        fast(torch.randn(2, 8))
        torch.testing.assert_close(fast(rows).unbind(), model(rows).unbind())


def test_a_value_within_an_argument_is_named_by_its_place() -> None:
    class Counts(torch.nn.Module):
        def forward(self, x: torch.Tensor, state: State, options: dict[str, list[Any]], *, last: bool = True) -> torch.Tensor:
            return x * state.steps * options["more"][1] + last

    def given(steps: int, factor: float, last: bool) -> dict[str, Any]:
        return {"state": State([x], steps), "options": {"less": [], "more": [x, factor]}, "last": last}

    x = torch.randn(1, 8)
    model = Counts().eval()
    fast = load(bundle(capture(model, (x,), given(2, 3.0, True))), model, strict=True)
    with torch.no_grad():
        fast(x, **given(2, 3.0, True))
        for call, words in (
            (given(1, 3.0, True), r"input 2 \(argument 'state'\.steps\) is 1; the schedule was made for 2\."),
            (given(2, 4.0, True), r"input 5 \(argument 'options'\['more'\]\[1\]\) is 4\.0; .* 3\.0\."),
            (given(2, 3.0, False), r"input 6 \(argument 'last'\) is False; .* True\."),
        ):
            with pytest.raises(InputMismatch, match=words):
                fast(x, **call)


def test_a_cache_that_was_begun_otherwise_is_another_call_and_the_warning_names_what_differs(llama: Any) -> None:
    from transformers import DynamicCache, EncoderDecoderCache

    step = torch.tensor([[7]])
    fast = load(bundle(capture(llama, (step,), with_cache(llama, prefilled(llama)))), llama, strict=True)
    other = DynamicCache()
    with torch.no_grad():
        llama(torch.arange(16)[None], **with_cache(llama, other))
        with pytest.raises(InputMismatch, match=r"DynamicCache of the call differs .* in layer_class_to_replicate\. Call"):
            fast(step, **with_cache(llama, other))
        with pytest.raises(InputMismatch, match=r"has a transformers\.cache_utils\.EncoderDecoderCache where .*DynamicCache"):
            fast(step, **with_cache(llama, EncoderDecoderCache(other, DynamicCache())))
    assert other.get_seq_length() == 16


def test_a_copied_cache_is_taken_as_well(llama: Any) -> None:
    step = torch.tensor([[7]])
    cache = prefilled(llama)
    fast = load(bundle(capture(llama, (step,), with_cache(llama, cache))), llama, strict=True)
    with torch.no_grad():
        fast(step, **with_cache(llama, copy.deepcopy(cache)))
    assert cache.get_seq_length() == 16
