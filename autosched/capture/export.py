"""From a PyTorch model to a program: ``torch.export``, its graph read as a draft, and the draft lowered."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten

from autosched.capture.assignments import assignments_seen, set_aside_empty_buffers
from autosched.capture.build import build_program
from autosched.capture.causal_masks import masks_taken_as_given
from autosched.capture.containers import plain_for, real_containers
from autosched.capture.custom import run_twice
from autosched.capture.decisions import Decisions, decisions_answered
from autosched.capture.decomposing import decompose
from autosched.capture.draft import Draft
from autosched.capture.dynamo import DynamoGraph
from autosched.capture.export_reader import ExportReader
from autosched.capture.flex_attention import flex_attention_spelled_out, require_no_block_mask
from autosched.capture.functional import make_functional, name_turns, spell_out
from autosched.capture.held_inputs import hold_inputs
from autosched.capture.leftovers import attributes_kept
from autosched.capture.model_screen import require_inference, require_values
from autosched.capture.passes.batch_norm import whole_batch_norms
from autosched.capture.passes.output_layout import restore_output_layout
from autosched.capture.passes.views import loosen_views
from autosched.capture.raw_data import DataAsDetached
from autosched.capture.rehearsal import rehearse
from autosched.capture.rewrite import RewriteReport, rewrite_draft
from autosched.capture.screen import (
    composites,
    explain_export_failure,
    no_nested_padding,
    quiet_torch,
    require_dense_dtypes,
)
from autosched.capture.selections import choose_selected
from autosched.capture.structure import structure_of
from autosched.capture.windows import spell_out_windows
from autosched.core.containers import pack_call, rebuild_packed
from autosched.core.errors import UnsupportedGraph, UsageError
from autosched.core.from_outside import let_through
from autosched.core.graph import TensorSpec
from autosched.core.namedtuples import register_namedtuples
from autosched.core.program import Program, Ref
from autosched.core.specs import only_adds_to_tensors, spec_of
from autosched.core.standing_aside import as_they_came
from autosched.core.variants import WHOLE, Lowering

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Args:
        program: what it computes.
        constants: the tensor of each of ``program.bindings``, by value index: the model's own, not copies.
        rewrites: what each pass did, in order; empty for the lowering ``aten``.
        structure: ``structure.structure_of`` the model, the same for every lowering; empty if nobody asked.
    """

    program: Program
    constants: dict[int, torch.Tensor]
    rewrites: tuple[RewriteReport, ...]
    structure: str = ""


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    rewrite: bool = True,
    target: str = "",
    lowering: Lowering | None = None,
) -> Captured:
    """Capture ``model`` for inputs shaped like ``args`` and ``kwargs``.

    Args:
        model: in inference mode; it is run on the example inputs, on the device they are on, and left unchanged, or as a first call
            leaves it for good (``first_call``).
        args, kwargs: example inputs; nested containers of tensors and numbers. Numbers become part of the program.
        rewrite: fold, simplify and fuse (lowering ``rewritten``); otherwise one operator for each ATen call (lowering ``aten``).
        target: kind of device (``cpu``, ``cuda``) whose operators the rewriting may choose; by default that of the example inputs. A
            model on a CPU can be captured for a GPU that this process never touches.
        lowering: what an operator is; by default what ``rewrite`` says. Not one of ``WHOLE``: ``pipeline.inductor_capture`` does those.

    A custom operator is captured where its namespace is trusted (``core.custom_operators.trusting``), as an operator of its own.

    Raises:
        UnsupportedGraph: if the model cannot be captured or scheduled, naming the operator, its source line and what to do.
        UsageError: for a lowering of ``WHOLE``.
    """
    chosen = lowering if lowering is not None else Lowering.REWRITTEN if rewrite else Lowering.ATEN
    if chosen in WHOLE:
        raise UsageError(f"capture() got the lowering {chosen}, which needs the compiler of the device; use pipeline.inductor_capture")
    return lower_draft(draft_of(model, args, kwargs), chosen, target)


def lower_draft(draft: Draft, chosen: Lowering, target: str = "", structure: str = "") -> Captured:
    """A draft of :func:`draft_of` in the lowering ``chosen``, not one of ``WHOLE``; it is changed. Target, errors: as :func:`capture`.

    ``structure``: ``structure_of(draft)``, if that is known.
    """
    structure = structure or structure_of(draft)
    reports: tuple[RewriteReport, ...] = ()
    if chosen is not Lowering.ATEN:
        reports = rewrite_draft(draft, target, chosen)
    elif (target or draft.device.type) == "cuda":
        # The model's own call: what export has put in its place is slower there than the model is.
        whole_batch_norms(draft)
        # Tensors are laid out otherwise there than on the device that the draft was observed on.
        loosen_views(draft)
    program, constants = build_program(draft, chosen.value)
    logger.info("captured %d operators, %d constants, width %d", len(program.graph), len(constants), program.graph.width)
    return Captured(program, constants, reports, structure)


def exported_program(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, *, for_compiler: bool = False
) -> tuple[ExportedProgram, tuple[Any, ...], dict[str, Any], tuple[TensorSpec, ...], Decisions]:
    """What ``torch.export`` makes of a model as it came, the call as that takes it (objects are nodes of PyTorch's trees), how the tensors
    of the model's own answer are laid out, as ``rehearse`` says it, and what the model has asked its own tensors.

    ``for_compiler``: leave whole what only a compiler makes one kernel of.

    Raises:
        UnsupportedGraph: as :func:`capture`.
    """
    call = pack_call((args, dict(kwargs or {})))
    register_namedtuples(call)
    args, given = _as_examples(call)
    with as_they_came(model):
        # A graph of Dynamo's keeps nothing outside of itself: whatever does, Dynamo has traced already.
        answered = () if isinstance(model, DynamoGraph) else rehearse(model, args, given)
        with contextlib.nullcontext() if for_compiler else flex_attention_spelled_out():
            exported, decisions = _export(model, args, given)
            return exported, args, given, answered, decisions


def _export(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ExportedProgram, Decisions]:
    with (
        _explained(),
        no_nested_padding(model),
        masks_taken_as_given(model),
        real_containers(model),
        attributes_kept(model),
        assignments_seen(model),
        # Outside of the next, whose copies it is to see.
        decisions_answered(model) as decisions,
        DataAsDetached(),
    ):
        set_aside_empty_buffers(model)
        exported: ExportedProgram = torch.export.export(model, args, kwargs, strict=False)
    return exported, decisions


def _functional(exported: ExportedProgram) -> ExportedProgram:
    """The program with nothing changed in place, which takes longer than exporting it where its graph, which is changed, does not do."""
    name_turns(exported.graph)
    if make_functional(exported.graph):
        return exported
    spell_out(exported.graph)
    spell_out_windows(exported.graph)
    with _explained():
        return decompose(exported, composites(exported.graph))


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """While torch traces: what it says is not the user's, what fails is."""
    try:
        with torch.no_grad(), quiet_torch(), warnings.catch_warnings():
            # torch's own use of its own deprecated class.
            warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)", category=FutureWarning)
            # Tensors that a call leaves in attributes: a model that makes them once is right as it is (anchors of a detector, a second list
            # of parameters of LSTM), and one whose answers depend on the last call is refused when they are compared.
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .* assigned during export", category=UserWarning)
            yield
    except UnsupportedGraph:
        raise
    except Exception as error:  # Whatever the user's model raises is the user's to read.
        let_through(error)
        raise explain_export_failure(error) from error


def _observe(draft: Draft) -> None:
    try:
        try:
            draft.observe(around=run_twice)
        except RuntimeError as error:
            if "view size is not compatible" not in str(error):
                raise
            # Export guessed another layout than a kernel gives: a view there is a copy here, as it is in eager mode.
            loosen_views(draft)
            draft.observe(around=run_twice)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        short_of_memory = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in first
        advice = "Take a smaller batch" if short_of_memory else "Check that the model and its inputs are on one device"
        raise UnsupportedGraph(
            f"the captured operators cannot run on the example inputs: {first}. Expected what runs in eager mode under "
            f"torch.inference_mode(). {advice}."
        ) from error


def draft_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Draft:
    """The observed draft of a model, one node for each ATen call, without dead code.

    Raises:
        UnsupportedGraph: as :func:`capture`.
    """
    require_inference(model)
    require_values(model)
    exported, args, given, answered, decisions = exported_program(model, args, kwargs)
    with as_they_came(model):
        functional = _functional(exported)
        decisions.require_kept(functional)
        choose_selected(functional)
        draft = ExportReader(functional, model).read(args, given)
    decisions.note(draft)
    draft.remove_dead()
    _observe(draft)
    require_dense_dtypes(draft)
    if _lay_out(draft, answered):
        _observe(draft)
    hold_inputs(draft)
    return draft


def _lay_out(draft: Draft, answered: tuple[TensorSpec, ...]) -> int:
    """Copies of outputs that the model itself lays out otherwise; how many.

    Where nothing traces them, attention layers call a kernel of their own, whose result may be viewed in ways in which that of the
    operators that they are traced as may not.
    """
    made = [draft.specs[leaf.value] for leaf in draft.output_leaves if isinstance(leaf, Ref)]
    if [(spec.shape, spec.dtype) for spec in made] != [(spec.shape, spec.dtype) for spec in answered]:
        return 0
    following = iter(answered)
    wanted = [next(following) if isinstance(leaf, Ref) else None for leaf in draft.output_leaves]
    return restore_output_layout(draft, [*wanted, *(None for _ in draft.writes)])


def _as_examples(call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, each a dense tensor of its own: export takes one given twice for one input, no call is laid out as one that was
    expanded, of one with a size that is marked as open (``mark_dynamic``) export would leave it open, and of a view it takes the memory
    behind it to be of any size, at which some operators fail.

    Raises:
        UnsupportedGraph: if one is sparse, nested, without values, of a class of its own, or a ``BlockMask``; or a number or text that is
            more than that (a member of an enumeration, a number of NumPy's): written down it is another, and no call would be like it.
    """
    leaves, spec = tree_flatten(call)
    seen: set[int] = set()
    for place, leaf in enumerate(leaves):
        if plain := plain_for(leaf):
            raise UnsupportedGraph(
                f"an example input is {leaf!r}, a {type(leaf).__name__}, which cannot be written down; expected tensors, numbers and text. "
                f"Give {plain}, or keep it in the model."
            )
        if not isinstance(leaf, torch.Tensor):
            require_no_block_mask(leaf)
            continue
        if leaf.is_nested:
            raise UnsupportedGraph("an example input is a nested tensor; expected a dense one. Pad it to a fixed size, with a mask.")
        if leaf.is_meta:
            raise UnsupportedGraph(
                f"an example input of shape {list(leaf.shape)} is on the meta device, which holds no values; expected one with values."
            )
        if leaf.layout is not torch.strided:
            raise UnsupportedGraph(
                f"an example input of shape {list(leaf.shape)} is {leaf.layout}; expected strided tensors. Give it as to_dense(), or make "
                "it sparse inside the model."
            )
        if only_adds_to_tensors(leaf):
            raise UnsupportedGraph(
                f"an example input is a {type(leaf).__name__}; expected a plain tensor, for calls with others run the model as it came. "
                "Give x.as_subclass(torch.Tensor), here and in calls."
            )
        if id(leaf) in seen:
            leaves[place] = leaf.detach().clone()
        elif leaf._is_view() or any(name.startswith("_dynamo_") for name in vars(leaf)):
            leaves[place] = leaf.detach()
        if spec_of(leaf).overlaps:
            leaves[place] = leaf.detach().contiguous()
        seen.add(id(leaf))
    made: tuple[tuple[Any, ...], dict[str, Any]] = rebuild_packed(spec, iter(leaves))
    return made
