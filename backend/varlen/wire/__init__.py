"""Tensors of the server to requests, and results to tensors of a response."""
