"""One file for each published scheduler."""
