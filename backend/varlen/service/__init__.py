"""A loaded model with all that serves it."""
