"""Texts and token ids to prompts."""
