"""Kernels of our own for CPUs, in float32: convolutions, matrix products, recurrent layers and attention."""
