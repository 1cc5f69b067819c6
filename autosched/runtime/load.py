"""Loading a tuned schedule where it is used: verdict, bind, audit, one comparison with the model, and a guard at every call.

On any doubt the model runs as it came, with one warning that names the reason; ``strict=True`` raises instead. Nothing here needs
the tuning stack, and nothing touches CUDA unless the model is there.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched.core.errors import AutoschedError, IncompatibleArtifact, InputMismatch, UnsupportedGraph, UsageError
from autosched.core.program import Program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.runtime.audit import audit_run, changes_callers_memory
from autosched.runtime.bundle_format import Bundle, printable, read_bundle
from autosched.runtime.guard import FallbackWarning, LoadedModel, LoadReport, Prepared, Runner
from autosched.runtime.host_key import cpu_device_key, software_key, usable_cores
from autosched.runtime.kernels import BoundProgram, bind, gather_constants, random_inputs
from autosched.runtime.numerics import compare
from autosched.runtime.plan import Plan, make_plan
from autosched.runtime.trees import describe_tree, output_tensors, unflatten_inputs, unflatten_outputs
from autosched.runtime.verdict import Compatibility, Verdict, check_bundle
from autosched.runtime.weights import ModelWatch
from autosched.runtime.widths import WidePrograms

__all__ = ["FallbackWarning", "LoadReport", "LoadedModel", "load"]

_SEED = 20_259  # of the inputs of the comparison; any will do, one makes a failure reproducible

RunnerFactory = Callable[[BoundProgram, Plan, Sequence[torch.Tensor]], Runner]
"""Makes a runner of a bound program and a plan; the tensors are an example input."""


def load(source: str | os.PathLike[str] | bytes, model: torch.nn.Module, *, strict: bool = False) -> LoadedModel:
    """Bind a bundle to the model it was made for.

    The bundle's key is compared with this host and with the model's parameters. If they fit, the schedule is bound to the model's own
    parameters (no copy), its operators are audited in order, and its outputs are compared with the model's on random inputs, within
    ``numerics.tolerance`` of each dtype; NaN and infinities must be where the model has them.

    Args:
        source: path of a bundle, or its bytes.
        model: in eval mode, on the device the bundle was tuned for.
        strict: raise on any doubt, now and at call time, instead of running the model as it came with a warning.

    Returns:
        A callable with the model's signature; see :class:`LoadedModel`.

    Raises:
        UsageError: if there is no file at the path, or ``model`` is no module.
        ArtifactCorrupt: with ``strict``, if the bundle is damaged or forged.
        IncompatibleArtifact: with ``strict``, if it was made for another host or model, or computes something else.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"load() got a {type(model).__name__} as model; expected the torch.nn.Module that the bundle was tuned for")
    label = "the bundle" if isinstance(source, bytes) else os.fspath(source)
    facts = _Facts()
    try:
        prepared = _prepare(source, model, label, facts)
    except (UnsupportedGraph, InputMismatch) as error:
        if strict:
            raise IncompatibleArtifact(label, [printable(str(error))]) from error
        return _as_it_came(model, printable(str(error)), facts)
    except UsageError:
        raise
    except AutoschedError as error:
        if strict:
            raise
        return _as_it_came(model, str(error), facts)
    except Exception as error:
        reason = f"{type(error).__name__}: {printable(str(error))}"
        if strict:
            raise IncompatibleArtifact(label, [f"its schedule cannot run on this model here: {reason}"]) from error
        return _as_it_came(model, reason, facts)
    return LoadedModel(model, prepared, facts.report(""), strict=strict)


@dataclass(slots=True)
class _Facts:
    """What is known by the time a load ends, well or not."""

    bundle: Bundle | None = None
    verdict: Verdict | None = None
    max_abs_error: float = 0.0

    def report(self, reason: str) -> LoadReport:
        if self.bundle is None:
            return LoadReport(not reason, reason)
        return LoadReport(
            scheduled=not reason,
            reason=reason,
            schedule=printable(self.bundle.evidence.report.chosen),
            operators=len(self.bundle.program.graph),
            lanes=self.bundle.schedule.lanes,
            verdict=str(self.verdict.compatibility) if self.verdict else "",
            differences=self.verdict.lines if self.verdict else (),
            max_abs_error=self.max_abs_error,
        )


def _as_it_came(model: torch.nn.Module, reason: str, facts: _Facts) -> LoadedModel:
    warnings.warn(f"autosched runs {type(model).__name__} as it came: {reason}", FallbackWarning, stacklevel=3)
    return LoadedModel(model, None, facts.report(reason), strict=False)


def _prepare(source: str | os.PathLike[str] | bytes, model: torch.nn.Module, label: str, facts: _Facts) -> Prepared:
    bundle = facts.bundle = read_bundle(source)
    kind = bundle.key.device.kind
    device = _home(model, kind)
    if device.type != kind and kind in ("cpu", "cuda"):
        raise IncompatibleArtifact(
            label, [f"device: tuned on {kind}, but the model is on {device}; move the model, or tune for {device.type}"]
        )
    verdict = facts.verdict = check_bundle(bundle, *_host_keys(kind, device, label), model)
    if verdict.compatibility is Compatibility.INCOMPATIBLE:
        raise IncompatibleArtifact(label, verdict.lines)
    if model.training:
        raise IncompatibleArtifact(label, ["mode: tuned in eval mode, but the model is in training mode; call model.eval() before load()"])
    _require_threads(bundle, label)
    plan = make_plan(bundle.program.graph, bundle.schedule)
    factory = _runner_factory(device)

    def rebind(verify: bool) -> tuple[Runner, ModelWatch]:
        # The watch first: a change while the weights are read is then seen at the next call.
        watch = ModelWatch(model, bundle.program)
        constants = gather_constants(bundle.program, model, bundle.literals)
        bound = WidePrograms(bundle.program, constants).for_plan(plan) if device.type == "cpu" else bind(bundle.program, constants, device)
        inputs = random_inputs(bundle.program, _SEED, device)
        runner = factory(bound, plan, inputs)
        if verify:
            facts.max_abs_error = _verify(bundle, bound, runner, model, label)
        return runner, watch

    runner, watch = rebind(True)
    offsets_matter = any("as_strided" in call.target for operator in bundle.program.graph.operators for call in operator.calls)
    return Prepared(bundle.program, runner, device, watch, rebind, offsets_matter)


def _home(model: torch.nn.Module, kind: str) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device(kind if kind in ("cpu", "cuda") else "cpu")


def _host_keys(kind: str, device: torch.device, label: str) -> tuple[DeviceKey, SoftwareKey]:
    if kind == "cpu":
        return cpu_device_key(), software_key()
    if kind == "cuda":
        from autosched.runtime.cuda_key import cuda_device_key, cuda_software_key

        index = device.index or 0
        return cuda_device_key(index), cuda_software_key(index)
    raise IncompatibleArtifact(label, [f"device: tuned on {printable(kind)!r}, which this version does not run"])


def _require_threads(bundle: Bundle, label: str) -> None:
    widest = max(bundle.schedule.width, default=1)
    # The thread library ends the process when it cannot start as many threads as it was told to.
    if bundle.key.device.kind == "cpu" and widest > usable_cores():
        raise IncompatibleArtifact(label, [f"width: an operator asks for {widest} threads there, {usable_cores()} cores are usable here"])


def _runner_factory(device: torch.device) -> RunnerFactory:
    if device.type == "cuda":
        from autosched.runtime.cuda_load import cuda_runner

        return cuda_runner
    from autosched.runtime.lanes import LaneExecutor, LanePool

    pool = LanePool()
    return lambda bound, plan, inputs: LaneExecutor(bound, plan, pool).run


def _verify(bundle: Bundle, bound: BoundProgram, runner: Runner, model: torch.nn.Module, label: str) -> float:
    """Audit the operators, then compare the schedule's outputs with the model's; the largest absolute difference.

    Raises:
        IncompatibleArtifact: saying what differs.
    """
    if operator := changes_callers_memory(bound):
        raise IncompatibleArtifact(label, [f"operator {operator} changes an input or a parameter in place; such a model is not scheduled"])
    program = bundle.program
    inputs = random_inputs(program, _SEED, bound.device)
    in_order, lies = audit_run(bound, inputs)
    if lies:
        raise IncompatibleArtifact(label, [printable(line) for line in lies[:5]])
    worst = _require_agreement(program, runner(inputs), _answer(program, model, inputs), label)
    _require_agreement(program, in_order, _answer(program, model, inputs), label)
    # Again with inputs that the file has no say in: its own may hide what it computes (all zeros, say).
    plain = dataclasses.replace(program, inputs=tuple(dataclasses.replace(item, mean=0.0, std=1.0) for item in program.inputs))
    others = random_inputs(plain, _SEED + 1, bound.device)
    try:
        answer = _answer(program, model, others)
    except Exception:
        # Inputs unlike the example's may be beyond the model itself.
        return worst
    return max(worst, _require_agreement(program, runner(others), answer, label))


def _answer(program: Program, model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    args, kwargs = unflatten_inputs(program, inputs)
    with torch.no_grad():
        return model(*args, **kwargs)


def _require_agreement(program: Program, outputs: list[torch.Tensor], answer: Any, label: str) -> float:
    result = unflatten_outputs(program, outputs)
    if not _same_containers(result, answer):
        raise IncompatibleArtifact(label, ["it returns other containers or other plain values than the model"])
    # After the output structure, which decides which tensors are returned, and how often.
    agreement = compare(output_tensors(result), output_tensors(answer))
    if not agreement.within_tolerance:
        raise IncompatibleArtifact(label, [f"it computes something else than the model: {agreement.reason}"])
    return agreement.max_abs_error


def _same_containers(result: object, answer: object) -> bool:
    (leaves, tree), (expected, expected_tree) = describe_tree(result), describe_tree(answer)
    return tree == expected_tree and all(
        isinstance(leaf, torch.Tensor) if isinstance(other, torch.Tensor) else type(leaf) is type(other) and repr(leaf) == repr(other)
        for leaf, other in zip(leaves, expected, strict=True)
    )
