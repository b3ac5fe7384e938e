"""Sampling: logits processors, random numbers, and a token for each sequence."""
