"""Costs of a model's batches on this machine: measured into the server's cache, printed and drawn.

`source` finds a checkpoint and its settings, `profile` holds what is shown, `tables` prints it, `picture` draws it,
and `page` shows both on an HTML page.
"""
