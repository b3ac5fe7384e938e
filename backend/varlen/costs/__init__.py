"""Costs of batches in seconds: measured, stored and predicted. Plain numbers, no tensors."""
