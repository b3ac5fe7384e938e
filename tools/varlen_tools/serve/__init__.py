"""`varlen serve`: from a checkpoint to a server with a gateway, in one command."""
