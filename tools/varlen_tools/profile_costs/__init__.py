"""What batches of a model cost on this machine: measured into the server's cache, printed and drawn.

`source` finds a checkpoint and its settings, `points` prepares what is shown, `printed` and `picture` show it, and
`page` puts the picture on an HTML page.
"""
