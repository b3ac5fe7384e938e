"""Benchmarks, the kernel tuner and the checks of compiled kernels; not in the wheel."""
