"""A forward pass as data: recorded once, planned and run for any batch."""
