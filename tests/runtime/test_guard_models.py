"""Models with habits of their own, tuned as they are: what changes after load is noticed, and answers are the model's to the last bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from autosched.capture.export import capture
from autosched.core.program import ConstantSource
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.load import FallbackWarning, LoadedModel, load
from autosched.runtime.prepared import Prepared
from tests.conformance.bundles import evidence_for


class Options(dict[str, float]):
    """A configuration as some libraries have it."""

    __setattr__ = dict.__setitem__


class Settings(torch.nn.Module):
    """A model with attributes of every kind, some of which its forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.scale = 1.0
        self.mask = torch.ones(8)
        self.options = Options(rate=1.0)
        self.rates = [torch.tensor(1.0)]
        self.active = {"rate"}
        # No part of it for PyTorch: export takes its weights for numbers in the code.
        self.hidden = [torch.nn.Linear(8, 8)]
        self.seen = 0
        self.last: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        rate = self.options["rate"] if "rate" in self.active else 3.0
        y: torch.Tensor = self.hidden[0](self.norm(self.a(x)) * self.scale * self.mask) * rate * self.rates[0]
        self.last = tuple(y.shape)
        return y


def _encoded(model: torch.nn.Module, *args: Any) -> bytes:

    captured = capture(model, args)
    graph = captured.program.graph
    literals = {item.name: captured.constants[item.value] for item in captured.program.bindings if item.source is ConstantSource.LITERAL}
    evidence = evidence_for(len(graph), cpu_device_key(), graph.hash)
    return encode_bundle(make_bundle(captured.program, sequential(graph), evidence, literals, cpu_device_key(), software_key()))


def _loaded(model: torch.nn.Module, *args: Any) -> LoadedModel:
    return load(_encoded(model, *args), model)


def prepared_of(loaded: LoadedModel) -> Prepared:
    assert loaded._table is not None
    prepared = loaded._table.slots[0].prepared
    assert prepared is not None
    return prepared


def _doubled(model: torch.nn.Module) -> None:
    before = model.forward
    model.forward = lambda *args: before(*args) * 2  # type: ignore[method-assign]


class Doubling(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


_SETTINGS: dict[str, Callable[[Settings], object]] = {
    "number": lambda model: setattr(model, "scale", 2.0),
    "tensor replaced": lambda model: setattr(model, "mask", torch.zeros(8)),
    "tensor in place": lambda model: model.mask.mul_(3.0),
    "tensor past all counts": lambda model: model.mask.data.mul_(3.0),
    "item of a dictionary of a class of its own": lambda model: setattr(model.options, "rate", 2.0),
    "setting of PyTorch's own module": lambda model: setattr(model.norm, "eps", 1.0),
    "set": lambda model: model.active.clear(),
    "tensor in a list, in place": lambda model: model.rates[0].mul_(3.0),
    "tensor of one number, past all counts": lambda model: model.rates[0].data.mul_(3.0),
    "weight of a module in a list": lambda model: model.hidden[0].weight.mul_(3.0),
    "forward": lambda model: _doubled(model.a),
    "class": lambda model: setattr(model.a, "__class__", Doubling),
}


@pytest.mark.parametrize("name", _SETTINGS)
def test_changes_of_what_is_neither_weight_nor_module_are_noticed(name: str) -> None:
    model = Settings().eval()
    x = torch.randn(4, 8)
    loaded = _loaded(model, x)
    with torch.no_grad():
        assert torch.allclose(loaded(x), model(x), atol=1e-5)
        _SETTINGS[name](model)
        with pytest.warns(FallbackWarning, match="no longer fits"):
            assert torch.allclose(loaded(x), model(x), atol=1e-5)


_WRITTEN_AGAIN: dict[str, Callable[[Settings, float], object]] = {
    "tensor in place": lambda model, value: model.mask.fill_(value),
    "tensor in a list": lambda model, value: model.rates.__setitem__(0, torch.tensor(value)),
    "tensor in a list, in place": lambda model, value: model.rates[0].fill_(value),
    "item of a dictionary": lambda model, value: setattr(model.options, "rate", value),
}


@pytest.mark.parametrize("name", _WRITTEN_AGAIN)
def test_what_was_written_again_and_again_as_it_was_is_noticed_when_it_is_another(name: str) -> None:
    model = Settings().eval()
    x = torch.randn(4, 8)
    loaded = _loaded(model, x)
    with torch.no_grad():
        for _ in range(5):
            # Another object each time.
            _WRITTEN_AGAIN[name](model, float("1.0"))
            loaded(x)
        assert loaded.report().calls == 5
        _WRITTEN_AGAIN[name](model, 0.5)
        with pytest.warns(FallbackWarning, match="no longer fits"):
            assert torch.allclose(loaded(x), model(x), atol=1e-5)


def test_what_a_forward_sets_itself_is_no_change() -> None:
    model = Settings().eval()
    x = torch.randn(4, 8)
    loaded = _loaded(model, x)
    runner = prepared_of(loaded).runner
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(loaded(x), model(x), atol=1e-5)
    assert prepared_of(loaded).runner is runner
    assert loaded.report().calls == 3


def test_a_hook_in_place_of_another_and_a_hook_of_all_modules_are_noticed() -> None:
    model = torch.nn.Linear(8, 8).eval()
    x = torch.randn(4, 8)
    handle = model.register_forward_hook(lambda module, args, output: output * 2)
    loaded = _loaded(model, x)
    assert loaded.report().scheduled
    handle.remove()
    model.register_forward_hook(lambda module, args, output: output * 3)
    with torch.no_grad(), pytest.warns(FallbackWarning, match="hooks"):
        assert torch.equal(loaded(x), model(x))
    other = torch.nn.Linear(8, 8).eval()
    loaded = _loaded(other, x)
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
    try:
        with torch.no_grad(), pytest.warns(FallbackWarning, match="hooks"):
            assert torch.equal(loaded(x), other(x))
    finally:
        everywhere.remove()


class Tied(torch.nn.Module):
    """One weight under two names, of which a program has one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(8, 8)
        self.b = torch.nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(torch.relu(self.a(x)))
        return y


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_tied_weight_that_is_replaced_under_either_name_is_noticed(name: str) -> None:
    model = Tied().eval()
    x = torch.randn(4, 8)
    loaded = _loaded(model, x)
    with torch.no_grad():
        assert torch.allclose(loaded(x), model(x), atol=1e-5)
        model.get_submodule(name).weight = torch.nn.Parameter(torch.randn(8, 8))
        with pytest.warns(FallbackWarning, match="no longer fits"):
            assert torch.allclose(loaded(x), model(x), atol=1e-5)


def test_new_weights_in_the_memory_of_the_old_are_noticed() -> None:
    # Packed ahead of time, so that the schedule itself keeps none of the old memory.
    model = torch.nn.Sequential(torch.nn.Linear(512, 512)).eval()
    x = torch.randn(64, 512)
    loaded = _loaded(model, x)
    assert prepared_of(loaded).program.prologue
    weight = model[0].weight
    with torch.no_grad():
        for value in (0.01, 0.02, 0.03):
            weight.data = torch.empty(0)
            weight.data = torch.full((512, 512), value)
            torch.testing.assert_close(loaded(x), model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("make", [lambda y: torch.fft.fft(y).conj(), lambda y: torch.fft.fft(y).conj().imag], ids=["conjugate", "negative"])
def test_lazily_conjugated_and_negated_outputs_are_what_the_model_gives(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Spectrum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return make(x * 2.0)

    model = Spectrum().eval()
    x = torch.randn(4, 8)
    loaded = _loaded(model, x)
    assert torch.allclose(loaded(x), model(x), atol=1e-5)
    assert loaded.report().calls == 1


def test_plain_outputs_that_json_cannot_write_are_the_models_own() -> None:
    class Bounded(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"y": x * 2.0, "bound": (float("inf"), None, 3)}

    x = torch.randn(4)
    loaded = _loaded(Bounded().eval(), x)
    assert loaded(x)["bound"] == (float("inf"), None, 3)
    assert loaded.report().calls == 1


@pytest.mark.parametrize("part", [torch.nn.BatchNorm1d(8), torch.nn.Dropout(1e-6)], ids=["batch norm", "dropout"])
def test_a_part_in_training_mode_is_refused_before_anything_runs(part: torch.nn.Module) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), part).eval()
    data = _encoded(model, torch.randn(4, 8))
    part.train()
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(FallbackWarning, match=r"1 is in training mode; call model\.eval"):
        assert not load(data, model).report().scheduled
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Pair(NamedTuple):
    value: torch.Tensor
    count: int


class ReturnsContainers(torch.nn.Module):
    def forward(self, pair: Pair) -> Any:
        return Pair(pair.value * 2, 3), pair.value.shape, pair.value.topk(2)


def test_named_tuples_and_sizes_are_what_the_model_takes_and_gives() -> None:
    model, pair = ReturnsContainers().eval(), Pair(torch.randn(3, 4), 2)
    result, expected = _loaded(model, pair)(pair), model(pair)
    assert type(result[0]) is Pair
    assert torch.equal(result[0].value, expected[0].value)
    assert result[0].count == 3
    assert type(result[1]) is torch.Size
    assert result[1] == expected[1]
    assert type(result[2]) is torch.return_types.topk
    assert torch.equal(result[2].indices, expected[2].indices)


class CountsAndReturnsSizes(torch.nn.Module):
    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> Any:
        if self.replaces:
            self.calls = self.calls + 1
        else:
            self.calls.add_(1)
        return x.shape, {"doubled": x * 2, "sizes": [x[0].shape]}


@pytest.mark.parametrize("replaces", [False, True])
def test_sizes_stay_sizes_beside_a_state(replaces: bool) -> None:
    model, x = CountsAndReturnsSizes(replaces=replaces).eval(), torch.randn(3, 4)
    loaded = _loaded(model, x)
    assert loaded.report().scheduled, loaded.report().reason
    shape, rest = loaded(x)
    assert (type(shape), type(rest["sizes"][0])) == (torch.Size, torch.Size)
    assert (tuple(shape), tuple(rest["sizes"][0]), float(model.calls)) == ((3, 4), (4,), 1.0)


class TakesASize(torch.nn.Module):
    def forward(self, x: torch.Tensor, size: torch.Size) -> torch.Tensor:
        return x.exp().expand(size)


def test_a_call_with_a_size_runs_on_the_schedule_made_for_one() -> None:
    model, x, size = TakesASize().eval(), torch.randn(4), torch.Size([3, 4])
    loaded = _loaded(model, x, size)
    assert torch.equal(loaded(x, size), model(x, size))
    assert loaded.report().calls == 1


class Clamps(torch.nn.Module):
    def forward(self, x: torch.Tensor, most: float) -> torch.Tensor:
        return x.exp().clamp(max=most)


def test_a_call_with_another_number_is_told_the_one_of_tuning_as_python_writes_it() -> None:
    loaded = _loaded(Clamps().eval(), torch.randn(3), float("inf"))
    with pytest.warns(FallbackWarning, match=r"is 2\.0; the schedule was made for inf\. Tune"):
        loaded(torch.randn(3), 2.0)


class Flattens(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1).exp()


def test_an_input_laid_out_otherwise_is_laid_out_as_in_tuning_and_runs_on_the_schedule() -> None:
    """What was captured is a view, which is none of another layout."""
    model = Flattens().eval()
    loaded = _loaded(model, torch.randn(4, 6))
    for x in (torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(8, 6)[::2], torch.randn(4, 12)[:, ::2], torch.randn(1, 6).expand(4, 6)):
        kept = x.clone()
        assert torch.equal(loaded(x), model(x)), x.stride()
        assert torch.equal(x, kept)
    assert loaded.report().stepped_aside == ()
    assert loaded.report().calls == 5


class Bits(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.resolve_conj().resolve_neg().view(torch.int32) + 1


@pytest.mark.parametrize(
    ("example", "lazy"),
    [
        (torch.tensor([1 + 2j, 3 - 4j]), lambda x: x.conj()),
        (torch.tensor([1.0, -2.0]), torch._neg_view),
    ],
)
def test_an_input_that_is_to_be_conjugated_or_negated_is_so_before_its_bits_are_read(
    example: torch.Tensor, lazy: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = Bits().eval()
    loaded = _loaded(model, example)
    for x in (example, lazy(example), lazy(example + 1)):
        assert torch.equal(loaded(x), model(x))
    assert loaded.report().stepped_aside == ()


class ReadsByStride(torch.nn.Module):
    def __init__(self, *offset: int) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((2, 2), (1, 1), *self.offset).exp()


@pytest.mark.parametrize("offset", [(), (0,)])
def test_an_input_read_by_strides_of_the_models_own_is_never_a_copy_of_other_memory(offset: tuple[int, ...]) -> None:
    model, memory = ReadsByStride(*offset).eval(), torch.randn(20)
    loaded = _loaded(model, torch.randn(5))
    for x in (memory[:5], memory[:10:2], memory[3:8], memory[:1].expand(5)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert torch.equal(loaded(x), model(x)), x.stride()
    assert sum(calls for _, calls in loaded.report().stepped_aside) == 2 + len(offset)
    assert all("read by as_strided" in reason for reason, _ in loaded.report().stepped_aside)


def test_a_program_of_export_has_no_mode_to_be_in() -> None:
    inside = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    x = torch.randn(3, 4)
    model = torch.export.export(inside, (x,)).module()
    assert torch.allclose(_loaded(model, x)(x), inside(x))


def test_changes_of_a_traced_part_are_noticed() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self.part = torch.jit.trace(torch.nn.Linear(4, 4).eval(), torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.part(x)
            return result

    model, x = Holder().eval(), torch.randn(3, 4)
    loaded = _loaded(model, x)
    with torch.no_grad():
        assert torch.allclose(loaded(x), model(x))
        model.part.weight.mul_(2)
        assert torch.allclose(loaded(x), model(x))
    assert loaded.report().calls == 2


class Counts(torch.nn.Module):
    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.decides = decides
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.layer(x) * (self.calls if self.decides else 2)
        return result


def test_a_model_whose_count_of_calls_decides_is_refused_although_the_first_answer_agrees() -> None:
    x = torch.randn(3, 4)
    with pytest.warns(FallbackWarning, match="outputs differ"):
        assert not _loaded(Counts(decides=True).eval(), x).report().scheduled
    assert _loaded(Counts(decides=False).eval(), x).report().scheduled


def test_a_sparse_buffer_is_used_as_it_is_and_so_is_its_replacement() -> None:
    class Sparse(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.weight, x)

    model, x = Sparse().eval(), torch.randn(4, 3)
    loaded = _loaded(model, x)
    assert torch.allclose(loaded(x), x)
    assert loaded.report().calls == 1
    model.weight = torch.ones(4, 4).to_sparse()
    assert torch.allclose(loaded(x), model(x))
