"""Execution on a CPU."""
