"""The engine's loop, and which sequences run next. No tensors."""
