"""What it costs that several processes hold one model: `make bench-ranks`."""
