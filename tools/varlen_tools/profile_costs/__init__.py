"""Costs of a model's batches: measured into the server's cache, printed and drawn.

`profile` holds what is shown, `tables` prints it, `picture` draws it, and `page` shows both on an HTML page.
"""
