"""Train small models on text that needs no download."""
