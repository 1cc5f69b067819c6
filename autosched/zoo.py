"""Names to models: everything the command line takes as MODEL.

Forms: ``torchvision:NAME``, ``timm:NAME``, ``transformers:NAME``, ``autosched:NAME``, ``module:function`` and ``file.pt2``. Library models
have random weights from a seed: nothing is downloaded, and building one leaves the global random state as it was.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autosched.capture.pt2 import load_pt2
from autosched.core.errors import UnknownModel, UsageError
from autosched.core.extras import install_command
from autosched.zoo_models.suite import OWN, names

_Made = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]
_LIBRARIES = ("torchvision", "timm", "transformers", "autosched")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class ZooModel:
    """A model ready to be captured: in inference mode, with example inputs."""

    name: str
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load(name: str, *, batch: int | None = None, dtype: str | None = None, seed: int = 0) -> ZooModel:
    """Build the model called ``name`` on the CPU.

    Args:
        name: one of the forms above.
        batch: size of the first dimension of every input; by default 1, or whatever the function or file has.
        dtype: ``float32``, ``float16``, ``bfloat16`` or ``float64`` for parameters and floating inputs; by default as built.
        seed: decides weights and inputs.

    Raises:
        UnknownModel: if nothing answers to the name, with the closest names.
        UsageError: if a package is missing, or batch or dtype cannot be honoured.
    """
    if batch is not None and batch < 1:
        raise UsageError(f"batch is {batch}; expected at least 1")
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
    with torch.random.fork_rng(devices=[]), _working_folder_kept():
        torch.manual_seed(seed)
        model, args, kwargs = _build(name, batch, dtype, seed)
    if dtype is not None:
        model = model.to(_DTYPES[dtype])
        args, kwargs = torch.utils._pytree.tree_map(lambda leaf: _cast(leaf, _DTYPES[dtype]), (args, kwargs))
    if not name.endswith(".pt2"):
        model = model.eval()
    return ZooModel(name, model, tuple(args), dict(kwargs))


@contextmanager
def _working_folder_kept() -> Iterator[None]:
    """Code that builds a model may go to where its files are. What is read and written later was named where the command began."""
    try:
        here = os.getcwd()
    except OSError:  # somebody has removed it
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            os.chdir(here)


def of_library(name: str) -> bool:
    """Whether :func:`load` builds what is called so from a library, and neither imports a user's module nor reads a file.

    >>> of_library("autosched:toy"), of_library("mymodels:make"), of_library("model.pt2")
    (True, False, False)
    """
    family, _, rest = name.partition(":")
    return family in _LIBRARIES and bool(rest) and not name.endswith(".pt2")


def _cast(leaf: object, dtype: torch.dtype) -> object:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _build(name: str, batch: int | None, dtype: str | None, seed: int) -> _Made:
    if name.endswith(".pt2"):
        if batch is not None or dtype is not None:
            raise UsageError(f"{name} has the shapes and dtypes it was exported with; leave out --batch and --dtype, or export it again.")
        return load_pt2(name)
    family, separator, rest = name.partition(":")
    if not family or not separator or not rest:
        raise _no_colon(name)
    size = batch or 1
    if family == "autosched":
        return _own(name, rest, size)
    if family == "torchvision":
        return _torchvision(name, rest, size)
    if family == "timm":
        return _timm(name, rest, size)
    if family == "transformers":
        return _transformers(name, rest, size)
    return _from_module(name, family, rest, {"batch": batch, "dtype": dtype, "seed": seed})


def _no_colon(name: str) -> UnknownModel:
    """A file, or a name without its library."""
    path = Path(name)
    if path.suffix == ".py":
        found = f"{name} is a Python file; expected one of its functions, such as {path.stem}:make, that returns (model, example_inputs)."
    elif os.path.exists(name):
        found = f"{name} is a file of an unknown kind; expected a program saved by torch.export.save (.pt2), or module:function."
    elif "/" not in name and ("." in name or os.path.isfile(f"{name}.py")):
        found = f"there is no file {name}, and as a module it lacks a function; expected FILE.pt2, or module:function such as {name}:make."
    else:
        found = f"unknown model {name!r}; did you mean {_closest(name)}?"
    return UnknownModel(f"{found} 'autosched models' lists names and the other forms.")


def _closest(name: str, also: list[str] | None = None) -> str:
    known = list(dict.fromkeys([*(entry.name for entry in names()), *(also or [])]))
    rest = name.partition(":")[2] or name
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    close += [item for item in known if item.partition(":")[2] == rest or (len(rest) > 3 and rest in item)]
    return ", ".join(list(dict.fromkeys(close or known))[:6])


def _unknown(name: str, also: list[str] | None = None) -> UnknownModel:
    return UnknownModel(f"unknown model {name!r}; the closest known: {_closest(name, also)}. 'autosched models' lists the built-in ones.")


@contextmanager
def _needs(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UsageError(f"{package} models need the package {package} ({error}); install it with: {install_command('zoo')}") from error


def _own(name: str, rest: str, batch: int) -> _Made:
    if rest not in OWN:
        raise _unknown(name)
    model, args = getattr(importlib.import_module(f"autosched.zoo_models.{rest}"), f"make_{rest}")(batch)
    _enliven(model)
    return model, args, {}


def _torchvision(name: str, rest: str, batch: int) -> _Made:
    with _needs("torchvision"):
        from autosched.zoo_models.torchvision_schemas import import_torchvision

        models = import_torchvision().models
    known = models.list_models(module=models)
    if rest not in known:
        raise _unknown(name, [f"torchvision:{item}" for item in known])
    # Auxiliary classifiers exist for training; weights are random anyway, so the slow careful initialisation is skipped.
    options = {"aux_logits": False, "init_weights": False} if rest in ("googlenet", "inception_v3") else {}
    model = models.get_model(rest, weights=None, **options)
    weights = models.get_model_weights(rest)
    size = next(iter(weights)).transforms.keywords.get("crop_size", 224) if len(weights) else 224
    _enliven(model)
    return model, (torch.randn(batch, 3, size, size),), {}


def _timm(name: str, rest: str, batch: int) -> _Made:
    with _needs("timm"):
        from autosched.zoo_models.torchvision_schemas import import_torchvision

        import_torchvision()
        timm = importlib.import_module("timm")
    if not timm.is_model(rest):
        raise _unknown(name, [f"timm:{item}" for item in timm.list_models()])
    model = timm.create_model(rest, pretrained=False)
    shape = model.pretrained_cfg.get("input_size", (3, 224, 224))
    _enliven(model)
    return model, (torch.randn(batch, *shape),), {}


def _transformers(name: str, rest: str, batch: int) -> _Made:
    from autosched.zoo_models.transformer_configs import MODELS

    if rest not in MODELS:
        raise _unknown(name)
    with _needs("transformers"), warnings.catch_warnings():
        # transformers looks at torchvision when both are there; the import must not fail for it.
        if importlib.util.find_spec("torchvision") is not None:
            from autosched.zoo_models.torchvision_schemas import import_torchvision

            import_torchvision()
        importlib.import_module("transformers")
        return MODELS[rest](batch)


def _from_module(name: str, module: str, function: str, options: dict[str, object]) -> _Made:
    make = _find_function(name, module, function)
    accepted = _arguments_of(make)
    if options["batch"] is not None and "batch" not in accepted:
        raise UsageError(f"{name} takes no argument 'batch', so batch {options['batch']} cannot be honoured; add it to the function.")
    given = {key: value for key, value in options.items() if key in accepted and value is not None}
    try:
        made = make(**given)
    except Exception as error:  # The user's own code: its failure is theirs to read.
        raise UsageError(
            f"{name} raised {type(error).__name__}: {error}. Expected a model and its example inputs; call it yourself."
        ) from error
    except SystemExit as stopped:
        raise UsageError(
            f"{name} called sys.exit({stopped.code!r}). Expected a model and its example inputs; call it yourself."
        ) from stopped
    return _as_model(name, made)


def _arguments_of(make: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):  # written in C, and it does not say
        return ()


def _find_function(name: str, module: str, function: str) -> Callable[..., Any]:
    if module.endswith(".py"):
        dotted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise UnknownModel(f"unknown model {name!r}; a module is named without .py: did you mean {dotted}:{function}?")
    here = str(Path.cwd())
    # First while the named module is looked for, so that it is the user's own; later no module of his hides a package of the same name.
    sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None and module.startswith(error.name):
            where = f"there is no module {error.name!r} in {Path.cwd()} or on Python's path"
            raise UnknownModel(f"unknown model {name!r}: {where}; the closest known: {_closest(name)}.") from error
        raise UsageError(f"{module} cannot be imported: {error}. Install what it needs, or run from its folder.") from error
    except Exception as error:  # As a function's failure: theirs to read.
        said = f"it raised {type(error).__name__}: {error}"
        raise UsageError(f"{module} cannot be imported: {said}. See where it does: python -c 'import {module}'") from error
    except SystemExit as stopped:
        said = f"it called sys.exit({stopped.code!r})"
        raise UsageError(f"{module} cannot be imported: {said}. Put what only a script does under if __name__ == '__main__'.") from stopped
    finally:
        sys.path.remove(here)
        # Last for as long as the process lives: for what its functions import when they are called, and for measuring processes.
        if here not in sys.path:
            sys.path.append(here)
    make = getattr(found, function, None)
    if not callable(make):
        functions = [key for key, value in vars(found).items() if inspect.isfunction(value)]
        close = difflib.get_close_matches(function, functions, n=3, cutoff=0.3) or functions[:3]
        known = f"did you mean {' or '.join(f'{module}:{item}' for item in close)}?" if close else "it has no function at all."
        raise UnknownModel(f"module {module} has no function {function!r}; {known}")
    return make  # type: ignore[no-any-return]


def _as_model(name: str, made: object) -> _Made:
    if isinstance(made, torch.nn.Module) and hasattr(made, "example_inputs"):
        made = (made, made.example_inputs)
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module):
        inputs = made[1] if isinstance(made[1], tuple | list) else (made[1],)
        kwargs = made[2] if len(made) == 3 else {}
        if isinstance(kwargs, dict):
            return made[0], tuple(inputs), kwargs
    kinds = f"({', '.join(type(item).__name__ for item in made)})" if isinstance(made, tuple) else type(made).__name__
    raise UsageError(
        f"{name} returned {kinds}; expected (model, example_inputs), (model, example_inputs, example_kwargs), or a model "
        "with an attribute example_inputs."
    )


def _enliven(model: torch.nn.Module) -> None:
    """Give batch norms statistics as after training: with the initial ones, folding them would change nothing and test nothing.

    The running variance follows the weights of the convolution before it (unit Gaussians behind a ReLU have a mean square of one
    half), so that activations neither vanish nor explode in deep models.
    """
    energy, features = 1.0, 0
    for module in model.modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            squares = module.weight.detach().double().square().sum() / module.out_channels
            # Two digits: the sum's last bits depend on the number of threads, the model must not.
            energy, features = float(f"{0.5 * float(squares):.2g}"), module.out_channels
        elif (
            isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.running_mean is not None and module.running_var is not None
        ):
            scale = energy if module.num_features == features else 1.0
            torch.nn.init.normal_(module.running_mean, std=0.1 * scale**0.5)
            torch.nn.init.uniform_(module.running_var, 0.5 * scale, 1.5 * scale)
            if module.affine:
                torch.nn.init.uniform_(module.weight, 0.4, 1.0)
                torch.nn.init.normal_(module.bias, std=0.1)
