"""Train a small model on text that ships with Python: no download."""
