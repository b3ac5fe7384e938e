"""The kernel benchmark: every op and the encoder on a GPU, see docs/benchmarks/kernels.md."""
