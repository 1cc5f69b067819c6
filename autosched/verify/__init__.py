"""Proof that a schedule is right, and that it is faster."""
