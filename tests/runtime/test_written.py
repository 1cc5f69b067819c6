"""What a stranger's schedule may not do to a model, even one that is refused in the end: its weights are as they were, and no file is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact, UnsupportedGraph
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Argument, Binding, Call, ConstantSource, Many, Program, Ref
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime.audit import audit_run
from autosched.runtime.calls import Kernel, Slots, resolve
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.load import load
from autosched.runtime.written import require_harmless, written_by
from tests.conformance.bundles import evidence_for, two_branches_bundle
from tests.conformance.graphs import Recorder, TwoBranches, two_branches_program

Forge = Callable[[Program], Program]
_ROW = TensorSpec((8,), "float32", (1,))


def forged(forge: Forge) -> bytes:
    """The schedule of the model after ``forge``, keys made to match."""
    bundle = two_branches_bundle(TwoBranches().eval())
    program = forge(bundle.program)
    evidence = evidence_for(len(program.graph), bundle.key.device, program.graph.hash)
    made = make_bundle(program, sequential(program.graph), evidence, bundle.literals, bundle.key.device, bundle.key.software)
    return encode_bundle(made)


def bound_as(program: Program, name: str) -> int:
    return next(binding.value for binding in program.bindings if binding.name == name)


def with_prologue(target: str, *args: str | float) -> Forge:
    """One more call of the prologue; its arguments by name of a parameter, or as they are."""

    def forge(program: Program) -> Program:
        given = tuple(Ref(bound_as(program, item)) if isinstance(item, str) else item for item in args)
        return dataclasses.replace(program, prologue=(*program.prologue, Call(target, given, (), (-1,))))

    return forge


def with_operators(*operators: tuple[Call, tuple[int, ...], tuple[int, ...], tuple[int, ...]], values: tuple[Value, ...] = ()) -> Forge:
    """Operators of one call each in front of all others: (call, reads, writes, mutates); and the values that they make, the last ones."""

    def forge(program: Program) -> Program:
        graph = program.graph
        first = tuple(
            Operator(index, f"forged{index}", (call,), reads, writes, mutates, 0, 0, 0, "", "")
            for index, (call, reads, writes, mutates) in enumerate(operators)
        )
        others = tuple(dataclasses.replace(operator, index=operator.index + len(first)) for operator in graph.operators)
        return dataclasses.replace(program, graph=OpGraph((*first, *others), (*graph.values, *values), graph.inputs, graph.outputs))

    return forge


BIAS = bound_as(two_branches_program(TwoBranches())[0], "left.bias")
OFFSET = bound_as(two_branches_program(TwoBranches())[0], "offset")
NEW = len(two_branches_program(TwoBranches())[0].graph.values)
VIEW = Call("aten::view.default", (Ref(BIAS), Many((8,))), (), (NEW,))


def zeroed(value: int) -> Call:
    return Call("aten::zero_.default", (Ref(value),), (), (-1,))


def in_storage(value: int, storage: int) -> Forge:
    """``value`` is said to be in the memory of ``storage``."""

    def forge(program: Program) -> Program:
        values = tuple(dataclasses.replace(item, storage=storage) if item.index == value else item for item in program.graph.values)
        return dataclasses.replace(program, graph=dataclasses.replace(program.graph, values=values))

    return forge


def after(first: Forge, then: Forge) -> Forge:
    return lambda program: then(first(program))


def owned(storage: int = NEW) -> Value:
    return Value(NEW, _ROW, ValueRole.INTERMEDIATE, storage)


_MEAN_AND_VARIANCE = with_prologue(
    "aten::batch_norm.default", "right.weight", "left.bias", "left.bias", "offset", "left.bias", True, 0.1, 1e-5, False
)

_PROLOGUE = "prologue changes a tensor in place"
_FORGERIES: dict[str, tuple[Forge, str]] = {
    "prologue multiplies a weight": (with_prologue("aten::mul_.Scalar", "right.weight", -3.0), _PROLOGUE),
    "prologue installs a weight": (with_prologue("aten::copy_.default", "left.weight", "right.weight"), _PROLOGUE),
    "prologue trains statistics, which no schema tells": (_MEAN_AND_VARIANCE, _PROLOGUE),
    "operator, not said": (with_operators((zeroed(BIAS), (BIAS,), (), ())), "in place and the graph does not say so"),
    "operator, said": (with_operators((zeroed(BIAS), (), (), (BIAS,))), "changes an input or a constant in place"),
    "view that is said to be memory of its own": (
        with_operators((VIEW, (BIAS,), (NEW,), ()), (zeroed(NEW), (), (), (NEW,)), values=(owned(),)),
        "as a view of older memory",
    ),
    "view of one of two weights said to be one": (
        after(
            in_storage(BIAS, OFFSET),
            with_operators((VIEW, (BIAS,), (NEW,), ()), (zeroed(NEW), (), (), (NEW,)), values=(owned(),)),
        ),
        "as a view of older memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _FORGERIES)
def test_no_forged_write_reaches_a_weight(name: str) -> None:
    forge, said = _FORGERIES[name]
    model = TwoBranches().eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(IncompatibleArtifact, match=said):
        load(forged(forge), model, strict=True)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_a_constant_in_memory_of_the_programs_own_is_no_constant() -> None:
    made = Call("aten::zeros.default", (Many((8,)),), (), (NEW,))
    forge = after(with_operators((made, (), (NEW,), ()), (zeroed(BIAS), (), (), (BIAS,)), values=(owned(),)), in_storage(BIAS, NEW))
    with pytest.raises(ArtifactCorrupt, match="in memory that the program makes itself"):
        forged(forge)


@pytest.mark.parametrize("layout", ["sparse", "mkldnn"])
def test_nothing_is_changed_beside_constants_whose_views_nobody_can_tell(layout: str) -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(3))
    weight = recorder.constant("weight", torch.randn(3))
    made = recorder.run("aten::relu_.default", recorder.run("aten::mul.Tensor", x, weight))
    program = recorder.build([made])
    bound = bind(program, recorder.constants())
    assert audit_run(bound, random_inputs(program, 0))[1] == []
    opaque = torch.eye(3).to_sparse() if layout == "sparse" else torch.eye(3).to_mkldnn()
    slots = [opaque if value == weight.value else item for value, item in enumerate(bound.constants)]
    other = BoundProgram(program, bound.device, bound.kernels, slots)
    assert "not strided" in audit_run(other, random_inputs(program, 0))[1][0]


def test_an_audit_runs_nothing_after_the_first_lie() -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(3))
    program = recorder.build([recorder.run("aten::add.Tensor", recorder.run("aten::view.default", x, Many((3,))), 1.0)])
    values = tuple(dataclasses.replace(value, storage=value.index) for value in program.graph.values)
    lying = dataclasses.replace(program, graph=dataclasses.replace(program.graph, values=values))
    bound = bind(lying, {})
    ran: list[int] = []

    def noting(index: int, kernel: Kernel) -> Kernel:
        def run(slots: Slots) -> None:
            ran.append(index)
            kernel(slots)

        return run

    kernels = tuple(noting(index, kernel) for index, kernel in enumerate(bound.kernels))
    outputs, lies = audit_run(dataclasses.replace(bound, kernels=kernels), random_inputs(lying, 0))
    assert (outputs, len(lies), ran) == ([], 1, [0])


@pytest.mark.parametrize(
    "target",
    [
        "aten::save.default",
        "aten::from_file.default",
        "aten::warn.default",
        "aten::manual_seed.default",
        "aten::_copy_from.default",
        "aten::_cudnn_rnn_flatten_weight.default",
        "aten::_sparse_coo_tensor_unsafe.default",
        "aten::_sparse_csr_tensor_unsafe.default",
        "aten::_convert_indices_from_csr_to_coo.default",
        "aten::_reshape_alias.default",
        "aten::_nested_view_from_buffer.default",
        "mkldnn::data_ptr.default",
    ],
)
def test_operators_that_reach_beyond_their_tensors_do_not_resolve(target: str) -> None:
    with pytest.raises(UnsupportedGraph, match="may not run"):
        resolve(target)


def test_a_schedule_writes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "written"
    forge = with_operators((Call("aten::save.default", (Ref(BIAS), str(path)), (), ()), (BIAS,), (), ()))
    with pytest.raises(IncompatibleArtifact, match="may not run"):
        load(forged(forge), TwoBranches().eval(), strict=True)
    assert not path.exists()


def test_indices_are_checked() -> None:
    recorder = Recorder()
    x, index = recorder.input(torch.randn(3)), recorder.input(torch.tensor([1, 0, 2]))
    args: tuple[Argument, ...] = (x, Many((index,)), x, False)
    program = recorder.build([recorder.run("aten::_index_put_impl.default", *args)])
    require_harmless(program)
    (operator,) = program.graph.operators
    unsafe = dataclasses.replace(operator, calls=(dataclasses.replace(operator.calls[0], args=(*args, True)),))
    with pytest.raises(IncompatibleArtifact, match="unsafe=True"):
        require_harmless(dataclasses.replace(program, graph=dataclasses.replace(program.graph, operators=(unsafe,))))


@pytest.mark.parametrize(
    ("target", "args", "written"),
    [
        ("aten::batch_norm.default", (Ref(0), None, None, Ref(1), Ref(2), False, 0.1, 1e-5, False), ()),
        ("aten::batch_norm.default", (Ref(0), None, None, Ref(1), Ref(2), True, 0.1, 1e-5, False), (1, 2)),
        ("aten::batch_norm.default", (Ref(0), None, None, None, None, True, 0.1, 1e-5, False), ()),
        ("aten::instance_norm.default", (Ref(0), None, None, Ref(1), Ref(2), True, 0.1, 1e-5, False), (1, 2)),
        ("aten::_native_batch_norm_legit_functional.default", (Ref(0), None, None, Ref(1), Ref(2), True, 0.1, 1e-5), ()),
        ("aten::_native_batch_norm_legit_no_training.default", (Ref(0), None, None, Ref(1), Ref(2), 0.1, 1e-5), ()),
        ("aten::index_put_.default", (Ref(3), Many((None, Ref(1))), Ref(2)), (3,)),
        ("aten::_foreach_add_.Scalar", (Many((Ref(1), Ref(2))), 1.0), ()),
        ("aten::add.Tensor", (Ref(0), Ref(1)), ()),
    ],
)  # fmt: skip
def test_what_a_call_writes_to(target: str, args: tuple[Argument, ...], written: tuple[int, ...]) -> None:
    if "foreach" in target:
        # It returns nothing, so that it does not run at all.
        with pytest.raises(UnsupportedGraph, match="no tensor"):
            written_by(Call(target, args, (), ()))
        return
    assert written_by(Call(target, args, (), (9,))) == written


def test_an_out_argument_by_keyword_is_written_to() -> None:
    call = Call("aten::mm.out", (Ref(0), Ref(1)), (("out", Ref(2)),), (3,))
    assert written_by(call) == (2,)


def test_a_programs_own_memory_may_be_changed() -> None:
    program, _ = two_branches_program(TwoBranches())
    assert any(operator.mutates for operator in program.graph.operators)
    require_harmless(program)
    assert Binding(BIAS, ConstantSource.PARAMETER, "left.bias") in program.bindings
