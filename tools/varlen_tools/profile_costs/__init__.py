"""What batches of a model cost on this machine: measured into the server's cache, printed and drawn.

`source` finds a checkpoint and its settings, `points` says what the table holds, `printed` and `picture` show it, and
`page` puts the picture on a page that explains itself.
"""
