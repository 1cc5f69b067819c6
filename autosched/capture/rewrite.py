"""Rewriting: an ordered tuple of small named passes over a draft, each a function that reports how often it applied."""

from __future__ import annotations

from dataclasses import dataclass

from autosched.capture.draft import Draft


@dataclass(frozen=True, slots=True)
class RewriteReport:
    """How often a pass applied."""

    name: str
    applied: int


def rewrite_draft(draft: Draft) -> tuple[RewriteReport, ...]:
    """Run every pass on ``draft``, in order."""
    return ()
