"""Answers of engines for checkpoints of the hub, beside the original libraries."""
