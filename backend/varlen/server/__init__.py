"""The server's side: the only package that knows Triton Inference Server."""
