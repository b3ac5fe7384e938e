"""Decides which sequences run next, from lengths and costs. No tensors, no clock."""
