"""Other engines on the same checkpoint: transformers, onnxruntime and CTranslate2."""
