import builtins
import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autosched
from autosched import zoo
from autosched.capture.export import capture
from autosched.core.custom_operators import trusting
from autosched.core.errors import UnknownModel, UsageError
from autosched.device.registrations import describe_registrations
from autosched.runtime.kernels import bind
from autosched.runtime.load import load
from autosched.runtime.trees import flatten_inputs
from autosched.zoo_models import suite
from tests.conformance.stateful import assert_like_eager, bundle_bytes

OWN = [entry.name for entry in suite.names() if entry.name.startswith("autosched:")]


def needs(name):
    # Importing to see would bypass the zoo's own way of importing torchvision.
    package = name.partition(":")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def run_both(made: zoo.ZooModel, *, rewrite: bool = True):
    captured = capture(made.model, made.args, made.kwargs, rewrite=rewrite)
    inputs = flatten_inputs(captured.program, made.args, made.kwargs)
    outputs = bind(captured.program, captured.constants).run(inputs)
    with torch.inference_mode():
        expected = torch.utils._pytree.tree_leaves(made.model(*made.args, **made.kwargs))
    return captured, outputs, expected


def assert_close(outputs, expected):
    for output, reference in zip(outputs, expected, strict=True):
        scale = float(reference.abs().max())
        assert scale > 1e-3
        torch.testing.assert_close(output, reference, rtol=1e-3, atol=1e-4 * scale)


def test_names_are_unique_and_need_no_library():
    names = [entry.name for entry in suite.names()]
    assert len(set(names)) == len(names)
    assert {"torchvision:googlenet", "timm:hrnet_w18", "transformers:t5", "autosched:toy"} <= set(names)


@pytest.mark.parametrize("name", [name for name in OWN if not name.startswith(("autosched:randwire", "autosched:decoder"))])
def test_own_models_captured_and_rewritten_equal_eager(name):
    captured, outputs, expected = run_both(zoo.load(name))
    captured.program.graph.validate()
    assert_close(outputs, expected)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_small_decoder_changes_its_cache_as_it_does_eagerly(batch):
    from autosched.zoo_models.decoder import Decoder, Size

    torch.manual_seed(0)
    model = Decoder(Size(layers=2, heads=2, width=16, length=8, batch=batch)).eval()
    steps = [(torch.randn(batch, 1, 16), torch.tensor([position])) for position in (0, 1, 5)]
    fast = load(bundle_bytes(model, steps[0]), model, strict=True)
    assert_like_eager(fast, model, steps)
    # What was written is there, and nothing else.
    written = model.layers[1].values.abs().sum(dim=(0, 1, 3)) > 0
    assert written.nonzero().flatten().tolist() == [0, 1, 5]


def test_a_small_randwire_equals_eager():
    from autosched.zoo_models.randwire import RandWire

    torch.manual_seed(0)
    made = zoo.ZooModel("small", RandWire(nodes=8, channels=(8, 16), classes=10).eval(), (torch.randn(1, 3, 64, 64),), {})
    zoo._enliven(made.model)
    captured, outputs, expected = run_both(made)
    assert_close(outputs, expected)
    assert captured.program.graph.width >= 2


def test_the_wide_models_are_wide():
    assert capture(*_of("autosched:deepfm")).program.graph.width >= 64
    assert capture(*_of("autosched:moe")).program.graph.width >= 8


def _of(name):
    made = zoo.load(name)
    return made.model, made.args


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchvision:googlenet", "torchvision:squeezenet1_1", "transformers:bert"])
def test_larger_models_captured_and_rewritten_equal_eager(name):
    needs(name)
    captured, outputs, expected = run_both(zoo.load(name))
    assert_close(outputs, expected)
    assert captured.program.lowering == "rewritten"
    if name == "torchvision:googlenet":
        applied = {report.name: report.applied for report in captured.rewrites}
        assert applied["fold_batch_norm"] == 57
        assert applied["cpu_convolution"] == 57


def test_a_seed_decides_weights_and_inputs_and_nothing_else_changes():
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first, again, other = (zoo.load("autosched:toy", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.args[0], again.args[0])
    pairs = [(a, b) for a, b in zip(first.model.state_dict().values(), again.model.state_dict().values(), strict=True)]
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.args[0], other.args[0])
    assert not torch.equal(first.model.stem[0].weight, other.model.stem[0].weight)
    assert not first.model.training


def test_batch_and_dtype_are_honoured():
    made = zoo.load("autosched:toy", batch=3, dtype="bfloat16")
    assert made.args[0].shape == (3, 3, 32, 32)
    assert made.args[0].dtype == torch.bfloat16
    assert made.model.stem[0].weight.dtype == torch.bfloat16
    deep = zoo.load("autosched:deepfm", batch=2, dtype="float64")
    assert deep.args[0].dtype == torch.int64
    assert deep.args[1].dtype == torch.float64


@pytest.mark.parametrize("options", [{"batch": 0}, {"dtype": "int8"}])
def test_bad_options_are_usage_errors(options):
    with pytest.raises(UsageError, match="expected"):
        zoo.load("autosched:toy", **options)


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("autosched:toi", "autosched:toy"),
        ("googlenet", "torchvision:googlenet"),
        ("transformers:bort", "transformers:bert"),
        ("nothing_like_this:at_all", "autosched"),
    ],
)
def test_unknown_names_list_the_closest(name, close):
    with pytest.raises(UnknownModel, match=close) as caught:
        zoo.load(name)
    assert caught.value.exit_code == 2


def test_unknown_library_models_list_the_closest():
    needs("torchvision:")
    needs("timm:")
    with pytest.raises(UnknownModel, match="torchvision:googlenet"):
        zoo.load("torchvision:goglenet")
    with pytest.raises(UnknownModel, match="timm:hrnet_w18"):
        zoo.load("timm:hrnet_w1")


def test_a_missing_package_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest, **named):
        if name.partition(".")[0] == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name, *rest, **named)

    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    kept = re.escape(str(torch.__version__).partition("+")[0])
    with pytest.raises(UsageError, match=rf"pip install 'autosched\[zoo\]' 'torch=={kept}'$"):
        zoo.load("transformers:bert")


MODULE = """
import os
import torch

def make(batch=1):
    return torch.nn.Linear(4, 2), (torch.ones(batch, 4),)

def plain():
    return torch.nn.Linear(4, 2), torch.ones(1, 4)

def with_kwargs():
    return torch.nn.Linear(4, 2), (), {"input": torch.ones(1, 4)}

def attribute():
    model = torch.nn.Linear(4, 2)
    model.example_inputs = (torch.ones(5, 4),)
    return model

def wrong():
    return 3

def fails():
    raise ValueError("no weights here")

def stops():
    raise SystemExit("no data set")

def late():
    import users_helpers

    return users_helpers.Late(), (torch.ones(1, 4),)

def goes_away():
    os.chdir("elsewhere")
    return plain()

def goes_and_fails():
    os.chdir("elsewhere")
    raise ValueError
"""

HELPERS = """
import torch

class Late(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, given):
        import users_later

        return users_later.twice(super().forward(given))
"""


OPERATORS = """
import torch

@torch.library.custom_op("users_operators::double", mutates_args=())
def double(given: torch.Tensor) -> torch.Tensor:
    return given * 2

@double.register_fake
def _(given):
    return torch.empty_like(given)

def make():
    return torch.nn.Linear(4, 2), (torch.ones(1, 4),)
"""
ROOT = str(Path(autosched.__file__).parent.parent)
REGISTER = (
    "import torch; from autosched.device.registrations import register_there; "
    "register_there(sys.argv[1]); torch.ops.users_operators.double(torch.ones(2))"
)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_models.py").write_text(MODULE)
    (tmp_path / "broken_models.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "misspelt_models.py").write_text("def make(:\n")
    (tmp_path / "raising_models.py").write_text("1 / 0\n")
    (tmp_path / "stopping_models.py").write_text("raise SystemExit\n")
    (tmp_path / "empty_models.py").write_text("")
    (tmp_path / "users_helpers.py").write_text(HELPERS)
    (tmp_path / "users_later.py").write_text("def twice(given):\n    return given + given\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("users_models", "users_helpers", "users_later"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("function", ["make", "plain", "with_kwargs", "attribute"])
def test_a_function_of_the_users_module(user_module, function, tmp_path):
    path = list(sys.path)
    for _ in range(2):
        made = zoo.load(f"users_models:{function}")
        assert made.model(*made.args, **made.kwargs).shape[1] == 2
        assert sys.path == [*path, str(tmp_path)]


def test_code_that_goes_to_another_folder_leaves_names_of_files_what_they_meant(user_module, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for function in ("goes_away", "goes_and_fails"):
        with contextlib.suppress(UsageError):
            zoo.load(f"users_models:{function}")
        assert Path.cwd() == tmp_path
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert zoo.load("autosched:toy").args


def test_what_the_users_code_imports_when_it_is_called_is_found(user_module):
    made = zoo.load("users_models:late")
    captured, outputs, expected = run_both(made)
    assert len(captured.program.graph)
    assert_close(outputs, expected)


def test_a_measuring_process_finds_the_operators_of_the_users_module(tmp_path, monkeypatch):
    (tmp_path / "users_operators.py").write_text(OPERATORS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    zoo.load("users_operators:make")
    with trusting(["users_operators"]):
        told = describe_registrations()
    process = [sys.executable, "-P", "-c", f"import sys; sys.path.append({ROOT!r}); {REGISTER}", told]
    subprocess.run(process, check=True, cwd="/")


def test_the_users_module_comes_before_a_package_of_its_name_and_hides_none_later(tmp_path, monkeypatch):
    (tmp_path / "colorsys.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    zoo.load("colorsys:make")
    monkeypatch.delitem(sys.modules, "colorsys")
    assert hasattr(importlib.import_module("colorsys"), "rgb_to_hsv")


def test_batch_reaches_a_function_that_takes_it_and_is_refused_otherwise(user_module):
    assert zoo.load("users_models:make", batch=7).args[0].shape == (7, 4)
    with pytest.raises(UsageError, match="batch 7 cannot be honoured"):
        zoo.load("users_models:plain", batch=7)


def test_mistakes_in_the_users_module_are_explained(user_module):
    with pytest.raises(UnknownModel, match=r"no function 'mak'; did you mean users_models:make"):
        zoo.load("users_models:mak")
    with pytest.raises(UnknownModel, match="no function 'make'; it has no function at all"):
        zoo.load("empty_models:make")
    with pytest.raises(UsageError, match="expected"):
        zoo.load("users_models:wrong")
    with pytest.raises(UsageError, match="no weights here"):
        zoo.load("users_models:fails")
    with pytest.raises(UsageError, match=r"users_models:stops called sys.exit\('no data set'\)"):
        zoo.load("users_models:stops")
    with pytest.raises(UsageError, match=r"stopping_models cannot be imported: it called sys.exit\(None\)"):
        zoo.load("stopping_models:make")
    with pytest.raises(UsageError, match="math:hypot takes no argument 'batch'"):
        zoo.load("math:hypot", batch=2)
    with pytest.raises(UsageError, match="math:hypot returned float; expected"):
        zoo.load("math:hypot")
    with pytest.raises(UsageError, match="a_package_nobody_has"):
        zoo.load("broken_models:make")
    with pytest.raises(UsageError, match=r"misspelt_models cannot be imported: it raised SyntaxError: .*line 1"):
        zoo.load("misspelt_models:make")
    with pytest.raises(UsageError, match=r"raised ZeroDivisionError: .* python -c 'import raising_models'"):
        zoo.load("raising_models:make")


def test_a_saved_program(tmp_path):
    model, inputs = torch.nn.Linear(4, 2).eval(), torch.randn(3, 4)
    path = tmp_path / "saved.pt2"
    torch.export.save(torch.export.export(model, (inputs,)), path)
    _, outputs, _ = run_both(zoo.load(str(path)))
    assert torch.allclose(outputs[0], model(inputs))
    with pytest.raises(UsageError, match="dtype"):
        zoo.load(str(path), batch=2)


def test_the_suite_lists_every_transformer_there_is():
    from autosched.zoo_models.transformer_configs import MODELS

    assert list(suite.TRANSFORMERS) == list(MODELS)


def test_a_function_that_returns_something_else_is_told_what_it_returned(tmp_path, monkeypatch):
    (tmp_path / "returns_a_function.py").write_text("def make():\n    return len, ([1],)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"returned \(builtin_function_or_method, tuple\); expected \(model, example_inputs\)"):
        zoo.load("returns_a_function:make")
