"""The encoder benchmark: varlen beside transformers, onnxruntime and CTranslate2; see docs/benchmarks/encoder.md."""
