"""Costs of a model's batches: measured into the server's cache, printed and drawn.

`profile` holds what is shown, `tables` prints it, and `picture` draws it, with the tables on an HTML page.
"""
