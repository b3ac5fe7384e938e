"""Which waiting sequences run next: lengths and costs, no tensors, a clock that is handed in."""
