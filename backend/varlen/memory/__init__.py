"""Where the intermediates of a forward pass live."""
