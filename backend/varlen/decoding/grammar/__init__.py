"""Grammars: compiled in a sandbox, and matched token by token."""
