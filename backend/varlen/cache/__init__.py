"""The response cache: answers to equal prompts, kept and shared."""
