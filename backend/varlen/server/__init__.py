"""The class that the server loads. Only this package knows Triton Inference Server."""
