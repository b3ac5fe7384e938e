"""The memory benchmark: memory above the weights beside PyTorch's; see docs/benchmarks/memory.md."""
