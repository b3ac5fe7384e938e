"""One run on a GPU: correctness, times, tuning and a summary."""
