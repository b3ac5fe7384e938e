"""Beam search, on the host and on the device."""
