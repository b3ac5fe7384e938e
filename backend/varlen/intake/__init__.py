"""Texts and token ids to prompts, and the threads that tokenize."""
