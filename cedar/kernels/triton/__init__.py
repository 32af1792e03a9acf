"""Kernels in Triton: one source for Hopper, for Triton's interpreter on a CPU, and for reading."""
