"""Train a small model on text that ships with Python, so that a demo needs no download."""
