"""From a Hugging Face checkpoint to a recorded forward pass: one file per model family."""
