"""Costs of a model's batches, measured into the server's cache and printed."""
