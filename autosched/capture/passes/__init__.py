"""Rewriting passes: one file each, each a function from a draft to how often it applied."""
