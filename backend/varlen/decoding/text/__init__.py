"""Text on both sides of the tokens: chat templates, detokenization, stop strings."""
