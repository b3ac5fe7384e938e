"""Parts that models of several families share."""
