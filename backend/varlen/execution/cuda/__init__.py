"""Execution on a CUDA GPU."""
