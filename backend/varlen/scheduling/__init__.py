"""Which waiting sequences run next: plain Python, no tensors, a clock that is handed in."""
