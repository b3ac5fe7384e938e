"""Models in the process that uses them, without a server."""
