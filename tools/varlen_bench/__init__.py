"""Benchmarks, the kernel tuner and the checks of compiled kernels; for development, not in the wheel."""
