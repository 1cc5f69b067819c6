"""Searching stream assignments and launch orders."""
