"""Proof that a schedule is right."""
