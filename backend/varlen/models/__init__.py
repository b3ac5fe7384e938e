"""From a Hugging Face checkpoint to a recorded forward pass over packed tokens."""
