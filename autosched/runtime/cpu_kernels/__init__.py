"""Kernels of our own for CPUs, in float32: 3x3 convolutions by Winograd's minimal filtering, and products of a few rows."""
