"""A loaded model with all that serves it, and what its batches cost."""
