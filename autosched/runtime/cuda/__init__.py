"""Plans on a GPU: streams, one CUDA Graph and its audit, and the interfaces of CUDA that they stand on."""
