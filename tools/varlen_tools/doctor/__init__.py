"""Examines a checkpoint: contents, memory, speed, and equality with the original library."""
