"""Rewriting: an ordered tuple of small named passes over a draft, each a function that reports how often it applied."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from autosched.capture.custom import layouts_of, restore_custom_layouts
from autosched.capture.draft import Draft
from autosched.capture.passes.attention import attend_in_place, drop_idle_fills, settle_masks
from autosched.capture.passes.attention_dimensions import attend_in_four_dimensions
from autosched.capture.passes.batch_norm import fold_batch_norm, fold_batch_norm_ahead, spell_batch_norms, whole_batch_norms
from autosched.capture.passes.channel_scales import fold_channel_scales
from autosched.capture.passes.channels_last import prefer_channels_last
from autosched.capture.passes.common_calls import eliminate_common_calls
from autosched.capture.passes.concatenations import activate_before_joining, part_batch_norms
from autosched.capture.passes.constants import fold_constants
from autosched.capture.passes.cpu_convolution import pack_cpu_convolutions
from autosched.capture.passes.cpu_linear import pack_cpu_linears
from autosched.capture.passes.cpu_recurrent import part_cpu_recurrences
from autosched.capture.passes.cpu_rows import spell_row_products
from autosched.capture.passes.depthwise import join_depthwise
from autosched.capture.passes.einsums import spell_einsums
from autosched.capture.passes.extremes import drop_places
from autosched.capture.passes.gates import hand_on_gates
from autosched.capture.passes.identities import drop_identities
from autosched.capture.passes.instance_norm import spell_instance_norms
from autosched.capture.passes.named_activations import name_activations
from autosched.capture.passes.output_layout import restore_output_layout
from autosched.capture.passes.padding import hand_on_padding
from autosched.capture.passes.parallel_convolutions import join_parallel_convolutions
from autosched.capture.passes.pointwise import fuse_pointwise
from autosched.capture.passes.rearranging import join_rearrangements
from autosched.capture.passes.resizing import mix_before_resizing
from autosched.capture.passes.slow_activations import spell_slow_activations
from autosched.capture.passes.spelled_attention import join_attention
from autosched.capture.passes.token_pictures import order_token_pictures
from autosched.capture.passes.views import loosen_views, sink_views
from autosched.capture.passes.widening import widen_convolutions
from autosched.capture.regions import fuse_regions
from autosched.core.program import Ref
from autosched.core.variants import Lowering

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewriteReport:
    """How often a pass applied."""

    name: str
    applied: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite.

    ``changes_values``: it makes new values or changes strides, so the draft must be observed again after it. ``only_on``: the kind of
    device whose operators it chooses, empty for any; ``lowerings``: those that it is for.
    """

    name: str
    run: Callable[[Draft], int]
    changes_values: bool = False
    only_on: str = ""
    lowerings: tuple[Lowering, ...] = (Lowering.REWRITTEN, Lowering.FUSED)


PASSES: tuple[Pass, ...] = (
    Pass("loosen_views", loosen_views, only_on="cuda"),
    Pass("drop_identities", drop_identities),
    Pass("eliminate_common_calls", eliminate_common_calls),
    Pass("fold_constants", fold_constants),
    Pass("name_activations", name_activations, changes_values=True, only_on="cpu"),
    Pass("spell_einsums", spell_einsums, changes_values=True, only_on="cpu"),
    Pass("order_token_pictures", order_token_pictures, changes_values=True, only_on="cpu"),
    Pass("join_attention", join_attention, changes_values=True, only_on="cpu"),
    # Results that come as the model goes on need no copy any more, and all layers may have the same mask; nor is a picture enlarged to its
    # own size.
    Pass("drop_identities", drop_identities, changes_values=True, only_on="cpu"),
    Pass("eliminate_common_calls", eliminate_common_calls, only_on="cpu"),
    Pass("fold_constants", fold_constants, only_on="cpu"),
    Pass("drop_idle_fills", drop_idle_fills),
    Pass("settle_masks", settle_masks, changes_values=True),
    Pass("attend_in_four_dimensions", attend_in_four_dimensions, changes_values=True, only_on="cpu"),
    Pass("hand_on_padding", hand_on_padding),
    Pass("part_batch_norms", part_batch_norms, changes_values=True),
    Pass("fold_batch_norm", fold_batch_norm, changes_values=True),
    Pass("fold_channel_scales", fold_channel_scales, changes_values=True),
    Pass("join_parallel_convolutions", join_parallel_convolutions, changes_values=True),
    Pass("fold_batch_norm_ahead", fold_batch_norm_ahead, changes_values=True),
    Pass("activate_before_joining", activate_before_joining, changes_values=True, only_on="cpu"),
    Pass("mix_before_resizing", mix_before_resizing, changes_values=True),
    Pass("whole_batch_norms", whole_batch_norms, only_on="cuda"),
    Pass("channels_last", prefer_channels_last, changes_values=True, only_on="cuda"),
    Pass("cpu_rows", spell_row_products, changes_values=True, only_on="cpu", lowerings=(Lowering.FUSED,)),
    Pass("widen_convolutions", widen_convolutions, changes_values=True, only_on="cpu"),
    Pass("cpu_convolution", pack_cpu_convolutions, changes_values=True, only_on="cpu"),
    # When convolutions are channels last.
    Pass("attend_in_place", attend_in_place, changes_values=True, only_on="cpu"),
    Pass("join_rearrangements", join_rearrangements, changes_values=True, only_on="cpu"),
    Pass("spell_batch_norms", spell_batch_norms, changes_values=True, only_on="cpu"),
    Pass("cpu_linear", partial(pack_cpu_linears, rows=False), changes_values=True, only_on="cpu", lowerings=(Lowering.FUSED,)),
    Pass("cpu_linear", pack_cpu_linears, changes_values=True, only_on="cpu", lowerings=(Lowering.REWRITTEN,)),
    Pass("instance_norm", spell_instance_norms, changes_values=True, only_on="cpu"),
    Pass("drop_places", drop_places, changes_values=True, only_on="cpu"),
    Pass("slow_activations", spell_slow_activations, changes_values=True, only_on="cpu"),
    Pass("cpu_recurrent", part_cpu_recurrences, changes_values=True, only_on="cpu"),
)
_JOIN_DEPTHWISE = Pass("join_depthwise", join_depthwise, only_on="cpu")
GROUPING: dict[Lowering, tuple[Pass, ...]] = {
    Lowering.REWRITTEN: (
        Pass("sink_views", sink_views),
        Pass("fuse_pointwise", fuse_pointwise),
        Pass("hand_on_gates", hand_on_gates, only_on="cpu"),
        _JOIN_DEPTHWISE,
    ),
    Lowering.FUSED: (Pass("sink_views", sink_views), Pass("fuse_regions", fuse_regions), _JOIN_DEPTHWISE),
}


def rewrite_draft(draft: Draft, target: str = "", lowering: Lowering = Lowering.REWRITTEN) -> tuple[RewriteReport, ...]:
    """Run every pass on an observed ``draft``, in order; it is observed and grouped into operators afterwards.

    Args:
        lowering: which operators to group it into.
        target: kind of device the program is for; by default the draft's own.
    """
    kind = draft.target = target or draft.device.type
    reports: list[RewriteReport] = []
    layouts = [draft.specs[leaf.value] if isinstance(leaf, Ref) else None for leaf in draft.output_leaves]
    layouts += [draft.specs[value] for _, value in draft.writes]
    owed = layouts_of(draft)
    stale = False
    for item in PASSES:
        if item.only_on not in ("", kind) or lowering not in item.lowerings:
            continue
        if stale and item.changes_values:
            draft.observe()
            stale = False
        applied = item.run(draft)
        stale = stale or (item.changes_values and applied > 0)
        reports.append(RewriteReport(item.name, applied))
        logger.debug("%s applied %d times", item.name, applied)
    if stale:
        draft.observe()
    copied = restore_custom_layouts(draft, owed)
    if owed:
        reports.append(RewriteReport("restore_custom_layouts", copied))
    if copied:
        draft.observe()
    restored = restore_output_layout(draft, layouts)
    reports.append(RewriteReport("restore_output_layout", restored))
    if restored:
        draft.observe()
    for item in GROUPING[lowering]:
        if item.only_on in ("", kind):
            reports.append(RewriteReport(item.name, item.run(draft)))
    return tuple(reports)
