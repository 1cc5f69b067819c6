"""Kernels of our own for CPUs (float32): convolutions, also by Winograd's minimal filtering, products of a few rows, and recurrent layers."""
