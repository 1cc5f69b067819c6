"""From a model to an operator graph."""
