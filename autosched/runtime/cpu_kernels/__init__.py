"""Kernels of our own for CPUs, in float32: convolutions, products of a few rows, and recurrent layers."""
