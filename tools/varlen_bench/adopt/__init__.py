"""The benchmark of `varlen adopt`: a stock ensemble of a tokenizer and an ONNX encoder beside its varlen model."""
