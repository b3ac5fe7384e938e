"""The benchmark of beam search: translations beside transformers and CTranslate2; see docs/benchmarks/beam.md."""
