"""The kernel benchmark: every op and the encoder on a GPU beside their peers; see docs/benchmarks/kernels.md."""
