"""What a batch costs in seconds: measured, stored and interpolated. Plain numbers, no tensors."""
