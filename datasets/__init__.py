"""Measured runs: schema, store, collection plans, splits."""
