"""The generation benchmark: iterations beside static batches and other engines; see docs/benchmarks/generate.md."""
