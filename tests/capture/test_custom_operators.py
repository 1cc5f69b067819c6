"""Custom operators: captured where their namespace is trusted, each an operator of its own, and refused by name where they are unfit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.custom_operators import is_custom, parse_namespaces, trusted, trusting
from autosched.core.errors import UnsupportedGraph, UsageError
from autosched.core.graph import Operator
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind
from autosched.runtime.regions.pieces import pieces_of, variants_of
from tests.conformance.custom_operators import NAMESPACE, Branches, Calls, Convolved

LOWERINGS = (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED)


def custom(operators: tuple[Operator, ...]) -> list[Operator]:
    return [operator for operator in operators if any(is_custom(call.target) for call in operator.calls)]


def working(operator: Operator) -> list[str]:
    return [call.target for call in operator.calls if not call.target.startswith(("aten::view", "aten::t.", "aten::transpose"))]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_trusted_operators_are_operators_of_their_own_and_compute_what_the_model_does(lowering: Lowering) -> None:
    model, x = Branches().eval(), torch.randn(8, 32)
    with trusting([NAMESPACE]):
        captured = capture(model, (x,), lowering=lowering)
        graph = captured.program.graph
        found = custom(graph.operators)
        assert [len(working(operator)) for operator in found] == [1] * 4
        assert sorted(operator.kind for operator in found) == [
            "testlib::halves", "testlib::mode", "testlib::scaled_mm", "testlib::scaled_mm",
        ]  # fmt: skip
        assert all(operator.flops == 0 and operator.bytes_read > 0 and operator.bytes_written > 0 for operator in found)
        products = [operator.index for operator in found if operator.kind == "testlib::scaled_mm"]
        assert graph.independent(*products)
        made = bind(captured.program, captured.constants).run([x])
    with torch.no_grad():
        assert torch.equal(made[0], model(x))


def test_a_tag_or_a_name_does_not_fuse_one_with_its_neighbours() -> None:
    model = nn.Sequential(nn.ReLU(), Calls("offset"), nn.ReLU()).eval()
    for lowering in (Lowering.REWRITTEN, Lowering.FUSED):
        with trusting([NAMESPACE]):
            graph = capture(model, (torch.randn(4, 4),), lowering=lowering).program.graph
        (only,) = custom(graph.operators)
        assert working(only) == ["testlib::offset.default"]
        assert only.flops == 0
        assert not any(piece.compiled for piece in pieces_of(only, graph))
        assert len(variants_of(only, graph, "cuda", lowering)) == 1


def test_neighbours_that_wait_for_one_another_around_it_stay_two() -> None:
    class Around(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = torch.relu(x @ x)
            return before * Calls("offset")(before)

    for lowering in (Lowering.REWRITTEN, Lowering.FUSED):
        with trusting([NAMESPACE]):
            graph = capture(Around().eval(), (torch.randn(4, 4),), lowering=lowering).program.graph
        graph.validate()
        (only,) = custom(graph.operators)
        assert working(only) == ["testlib::offset.default"]


def test_a_list_of_tensors_may_be_returned() -> None:
    model, x = Calls("both").eval(), torch.randn(3)
    with trusting([NAMESPACE]):
        captured = capture(model, (x,))
        made = bind(captured.program, captured.constants).run([x])
    assert torch.equal(made[0], model(x))


def test_rewriting_gives_back_the_layout_that_the_model_has() -> None:
    model, x = Convolved().eval(), torch.randn(2, 3, 8, 8)
    with trusting([NAMESPACE]):
        captured = capture(model, (x,))
        made = bind(captured.program, captured.constants).run([x])
    reports = {report.name: report.applied for report in captured.rewrites}
    # Convolutions are packed all the same, and answer in another order than the model's.
    assert reports["cpu_convolution"] == 2
    assert reports["restore_custom_layouts"] == 1
    with torch.no_grad():
        torch.testing.assert_close(made[0], model(x), rtol=1e-4, atol=1e-5)


def test_layouts_that_no_copy_brings_back_are_left_alone() -> None:
    class Turned(Convolved):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.ops.testlib.ramp(self.first(x).transpose(2, 3)).contiguous() / 1000)

    model, x = Turned().eval(), torch.randn(2, 3, 8, 8)
    with trusting([NAMESPACE]):
        captured = capture(model, (x,))
        made = bind(captured.program, captured.constants).run([x])
    assert {report.name: report.applied for report in captured.rewrites}["cpu_convolution"] == 0
    with torch.no_grad():
        torch.testing.assert_close(made[0], model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("writes", "changes its arguments"),
        ("window", r"alias annotations.*Return a copy"),
        ("secretly_writes", "changes its arguments, although its schema"),
        ("secretly_returns", "returns memory of its arguments, although its schema"),
        ("counts", "gave two results for the same tensors"),
        ("without_fake", r"no fake implementation.*register_fake"),
        ("maybe", r"testlib::maybe.*returns Optional\[Tensor\]"),
    ],
)
def test_an_unfit_operator_is_refused_by_name(name: str, why: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            made = getattr(torch.ops.testlib, name)(y)
            return made + 1 if made is not None else y

    with trusting([NAMESPACE]), pytest.raises(UnsupportedGraph, match=why) as caught:
        capture(Odd().eval(), (torch.randn(3, 4),))
    assert name in str(caught.value)


def test_without_trust_the_message_says_how_to_give_it() -> None:
    with pytest.raises(UnsupportedGraph, match=r"custom_operators=\('testlib',\)"):
        capture(Calls("offset").eval(), (torch.randn(3),))
    with trusting(["other"]), pytest.raises(UnsupportedGraph, match=r"testlib::offset.*'other'"):
        capture(Calls("offset").eval(), (torch.randn(3),))


def test_trust_ends_with_its_block() -> None:
    with trusting(["one"]):
        with trusting(["two"]):
            assert trusted() == {"two"}
        with pytest.raises(ZeroDivisionError), trusting(["three"]):
            _ = 1 / 0
        assert trusted() == {"one"}
        with ThreadPoolExecutor(1) as pool:
            # Of this thread alone.
            assert pool.submit(trusted).result() == frozenset()
    assert trusted() == frozenset()


@pytest.mark.parametrize("given", ["testlib", 3, ["testlib::offset"], ["a b"], [""], [None], [["testlib"]]])
def test_what_are_no_namespaces_is_a_usage_error(given: object) -> None:
    with pytest.raises(UsageError, match="custom_operators"):
        parse_namespaces(given)


def test_the_hash_is_that_of_what_is_computed() -> None:
    x = torch.randn(8, 32)
    with trusting([NAMESPACE]):
        first, again = (capture(Branches().eval(), (x,)).program.graph.hash for _ in range(2))
    with trusting(["other", NAMESPACE]):
        more = capture(Branches().eval(), (x,)).program.graph.hash
    assert first == again == more
    with trusting([NAMESPACE]):
        hashes = {capture(Calls(name).eval(), (x,)).program.graph.hash for name in ("offset", "mode", "ramp")}
    # Shapes are the same; which operator is called is not.
    assert len(hashes) == 3
    plain = nn.Sequential(nn.ReLU()).eval()
    with trusting([NAMESPACE]):
        trusting_hash = capture(plain, (x,)).program.graph.hash
    assert trusting_hash == capture(plain, (x,)).program.graph.hash
