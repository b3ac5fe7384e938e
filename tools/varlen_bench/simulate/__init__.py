"""The engine's own scheduler on a virtual clock; batches take the predicted time."""
