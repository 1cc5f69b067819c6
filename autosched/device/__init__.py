"""What is measured on: the CPU, CUDA, and recorded runs."""
