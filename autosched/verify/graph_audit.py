"""Static audit of a captured CUDA graph against its plan. The audit itself is in ``runtime``: a server repeats it at load."""

from __future__ import annotations

from autosched.runtime.graph_audit import AuditReport, audit_graph, node_counts

__all__ = ["AuditReport", "audit_graph", "node_counts"]
