"""Regions of a program compiled one by one: pieces, the processes that compile them, and what they wrote, kept."""
