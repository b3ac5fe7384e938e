"""Processes with limits of time and memory, for grammars of clients and templates of checkpoints."""
