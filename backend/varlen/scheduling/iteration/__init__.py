"""Iteration-level scheduling: which tokens run in the next step, and their KV cache blocks."""
