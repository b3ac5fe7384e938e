"""Load real servers, ours and plain ones, until they cannot keep up: docs/benchmarks/serving.md."""
