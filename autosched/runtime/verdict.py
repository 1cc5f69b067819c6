"""Whether a bundle may be used here: exact, degraded (verify again first), or incompatible, with one line for each difference."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch

from autosched.core.custom_operators import is_custom, trusted
from autosched.core.decided import decided_otherwise
from autosched.core.errors import UnsupportedGraph
from autosched.core.parts import named_tensors
from autosched.core.program import ConstantSource, Program, Ref
from autosched.core.program_json import decode_program
from autosched.core.records import DeviceKey, Engine, SoftwareKey
from autosched.core.variants import Variant
from autosched.runtime.bundle.format import Bundle, printable
from autosched.runtime.calls import resolve
from autosched.runtime.cpu_kernels.ways import missing_kernel
from autosched.runtime.host_key import LOW_PRECISION, numerics_key
from autosched.runtime.native.build import obstacle


class Compatibility(enum.StrEnum):
    """How well a bundle fits this machine and model."""

    EXACT = "exact"
    DEGRADED = "degraded"  # computes the same operators, maybe with other kernels: verify before use
    INCOMPATIBLE = "incompatible"


GRAVEST_FIRST = (Compatibility.INCOMPATIBLE, Compatibility.DEGRADED, Compatibility.EXACT)


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs, and what it means for the bundle."""

    compatibility: Compatibility
    line: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The worst of all differences; ``lines`` holds one for each, the worst first, empty if exact."""

    compatibility: Compatibility
    differences: tuple[Difference, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """One printable line for each differing field."""
        return tuple(difference.line for difference in self.differences)


def check_bundle(
    bundle: Bundle,
    device: DeviceKey,
    software: SoftwareKey,
    model: torch.nn.Module | None = None,
    *,
    numerics: tuple[tuple[str, str], ...] | None = None,
) -> Verdict:
    """Compare a bundle's key with a host and, if given, a model.

    A device or a setting that changes numerics makes it incompatible, as does a parameter with another name, shape or dtype.
    So do other numbers in a tensor by which the model decides what runs; a custom operator whose namespace the caller does not trust, that
    is not registered here, or that no schedule can hold; and a model that is itself a program of ``torch.export`` and refuses inputs of the
    bundle's shapes.
    Another version of torch or of a library makes it degraded, as does a parameter laid out otherwise in memory, and a processor of which
    the bundle says less than is known here.

    Args:
        device, software: keys of this host.
        model: the model it is to run on; without one, only the host is compared.
        numerics: settings of this process, by default read now.
    """
    found = [Difference(_of_device(line), f"device {line}") for line in bundle.key.device.differences(device)]
    found += [Difference(Compatibility.DEGRADED, line) for line in _software_differences(bundle.key.software, software)]
    here = SoftwareKey(numerics if numerics is not None else numerics_key(bundle.key.device.kind))
    found += [Difference(Compatibility.INCOMPATIBLE, f"setting {line}") for line in SoftwareKey(bundle.key.numerics).differences(here)]
    found += [Difference(Compatibility.INCOMPATIBLE, line) for line in _custom_operators(bundle.program)]
    found += [Difference(Compatibility.DEGRADED, line) for line in _missing_kernels(bundle)]
    if model is not None:
        found += differences_of(bundle.program, model)
    found.sort(key=lambda difference: GRAVEST_FIRST.index(difference.compatibility))
    found = [Difference(item.compatibility, printable(item.line)) for item in found]
    worst = found[0].compatibility if found else Compatibility.EXACT
    return Verdict(worst, tuple(found))


def differences_of(program: Program, model: torch.nn.Module) -> Iterator[Difference]:
    """In what ``model`` differs from the one that ``program`` was captured from, whatever the host is."""
    yield from _weight_differences(program, model)
    for line in (*_other_shapes(program, model), *decided_otherwise(program.decided, model)):
        yield Difference(Compatibility.INCOMPATIBLE, line)


def _of_device(line: str) -> Compatibility:
    # Bundles did not always name the instructions for few bits: then nothing speaks against the processor.
    return Compatibility.DEGRADED if line.startswith(f"{LOW_PRECISION}: absent there") else Compatibility.INCOMPATIBLE


def _software_differences(there: SoftwareKey, here: SoftwareKey) -> list[str]:
    lines = [f"software {line}" for line in there.differences(here) if not line.startswith(("lanes: ", "memory: "))]
    if there.engine is not here.engine:
        missing = f" ({obstacle()})" if here.engine is Engine.PYTHON and obstacle() else ""
        lines.append(f"lanes: {there.engine} there, {here.engine} here{missing}; times were taken with the former")
    if there.keeps_memory and not here.keeps_memory:
        lines.append("memory: kept between calls there, given back after each here; call autosched.keep_memory() first")
    return lines


def _missing_kernels(bundle: Bundle) -> list[str]:
    lines: list[str] = []
    kinds = (
        ("convolutions by Winograd's algorithm", (Variant.WINOGRAD_2, Variant.WINOGRAD_4)),
        ("convolutions", (Variant.OWN_CONVOLUTION, Variant.OWN_CHAIN)),
        ("products", (Variant.OWN_PRODUCT,)),
        ("recurrent layers", (Variant.OWN_RECURRENCE,)),
        ("attention", (Variant.OWN_ATTENTION,)),
        ("pooling", (Variant.OWN_POOLING,)),
    )
    for kind, variants in kinds:
        count = sum(variant in variants for variant in bundle.schedule.variant)
        if count and (why := missing_kernel(variants[0])):
            lines.append(f"{kind}: {count} by kernels of our own there, by those of libraries here ({why})")
    return lines


def _custom_operators(program: Program) -> list[str]:
    calls = [*program.prologue, *(call for operator in program.graph.operators for call in operator.calls)]
    if program.source:
        # One that cannot be read is refused when it is bound.
        with contextlib.suppress(msgspec.MsgspecError):
            source = decode_program(program.source.encode())
            calls += [*source.prologue, *(call for operator in source.graph.operators for call in operator.calls)]
    needed: dict[str, list[str]] = {}
    for target in sorted({call.target for call in calls if is_custom(call.target)}):
        needed.setdefault(target.partition("::")[0], []).append(target)
    lines: list[str] = []
    for namespace, targets in needed.items():
        if namespace not in trusted():
            shown = ", ".join(targets[:3]) + (f" and {len(targets) - 3} more" if len(targets) > 3 else "")
            lines.append(
                f"custom operators: it runs {shown}, and the namespace {namespace!r} is not trusted here; if you trust it, give "
                f"custom_operators=({namespace!r},) (--custom-operators {namespace})"
            )
            continue
        for target in targets:
            try:
                resolve(target)
            except UnsupportedGraph as error:
                lines.append(f"custom operators: {error}")
    return lines


def _weight_differences(program: Program, model: torch.nn.Module) -> Iterator[Difference]:
    own = named_tensors(model)
    for binding in (*program.bindings, *program.state):
        if binding.source is ConstantSource.LITERAL:
            continue
        spec = program.graph.values[binding.value].spec
        tensor = own[binding.source].get(binding.name)
        what = f"{binding.source} {binding.name}"
        there = f"{list(spec.shape)} {spec.dtype}"
        if tensor is None:
            yield Difference(Compatibility.INCOMPATIBLE, f"{what}: {there} there, absent here")
            continue
        here = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        if here != there:
            yield Difference(Compatibility.INCOMPATIBLE, f"{what}: {there} there, {here} here")
        elif spec.strides and tensor.layout is torch.strided and tensor.stride() != spec.strides:
            yield Difference(Compatibility.DEGRADED, f"{what}: strides {spec.strides} there, {tensor.stride()} here")


def _other_shapes(program: Program, model: torch.nn.Module) -> list[str]:
    """Which inputs an exported program as the model refuses: it looks at their sizes at each call, but for those that it leaves open."""
    if not (isinstance(model, torch.fx.GraphModule) and hasattr(model, "range_constraints") and getattr(model, "validate_inputs", True)):
        return []
    taken = [node.meta.get("val") for node in model.graph.nodes if node.op == "placeholder"]
    if len(taken) != len(program.input_leaves):
        return []  # another model altogether, which its parameters or the first call show
    lines: list[str] = []
    for place, (leaf, here) in enumerate(zip(program.input_leaves, taken, strict=True)):
        if not isinstance(leaf, Ref) or not isinstance(here, torch.Tensor):
            continue
        there, shape = program.graph.values[leaf.value].spec.shape, tuple(here.shape)
        # What is no integer is a size left open.
        if len(there) != len(shape) or any(isinstance(size, int) and size != other for size, other in zip(shape, there, strict=True)):
            lines.append(f"input {place}: {list(there)} there, and the exported program takes {list(shape)}")
    return lines
